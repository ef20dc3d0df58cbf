"""Three heads: class prompts, a vocabulary, a classification head of a task's own. Each is a `Head`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from featcal.errors import InputError
from featcal.models.language import capped


@dataclass(frozen=True)
class CosineHead:
    """z = scale * prompts @ h / ||h||, CLIP's zero-shot classifier."""

    prompts: Float[Tensor, "c k"]
    """Unit rows, one per class."""
    scale: float
    """CLIP's exp(logit_scale)."""
    classes: tuple[str, ...]

    def scores(self, features: Float[Tensor, "n k"]) -> Float[Tensor, "n c"]:
        return self.scale * torch.nn.functional.normalize(features, dim=1) @ self.prompts.to(features).mT

    def lipschitz(self, expert: Float[Tensor, "n k"], model: Float[Tensor, "n k"]) -> Float[Tensor, " n"]:
        """scale * sigma_max(prompts) / d_min, d_min the distance of the segment expert-model from the origin.

        The Jacobian of h / ||h|| has norm 1 / ||h||, so this is a true upper bound; infinite for a segment
        through the origin.
        """
        e = model - expert
        square = e.square().sum(1)
        t = (-(expert * e).sum(1) / square.clamp_min(torch.finfo(square.dtype).tiny)).clamp(0, 1)
        nearest = (expert + t[:, None] * e).norm(dim=1)
        bound: Tensor = self.scale * torch.linalg.matrix_norm(self.prompts.to(expert), ord=2) / nearest
        return bound


@dataclass(frozen=True)
class LinearHead:
    """z = scale * weight @ h, a language model's head on its final normed state; its scores are of tokens.

    Where the model has a `softcap` its scores are cap * tanh(z / cap).
    """

    read: Callable[[], Float[Tensor, "c k"]]
    """Gives the weight; a vocabulary-sized matrix of every expert is not held all the time."""
    scale: float = 1.0
    softcap: float | None = None
    classes: None = None

    def scores(self, features: Float[Tensor, "n k"]) -> Float[Tensor, "n c"]:
        return capped(self.scale * features @ self.read().to(features).mT, self.softcap)

    def lipschitz(self, expert: Float[Tensor, "n k"], model: Float[Tensor, "n k"]) -> Float[Tensor, " n"]:
        """|scale| * sigma_max(weight), the same for every sample; tanh has no slope above 1."""
        weight = self.read().to(expert)
        gram = weight.mT @ weight
        largest = torch.linalg.eigvalsh(gram)[-1].clamp_min(0).sqrt()
        everywhere: Tensor = (abs(self.scale) * largest).expand(len(expert))
        return everywhere


@dataclass(frozen=True)
class ClassificationHead:
    """z = weight @ h + bias, the classifier of one task.

    Raises:
        InputError: shapes that do not belong together.
    """

    weight: Tensor
    """`[c, k]`, one row per class."""
    bias: Tensor | None = None
    """`[c]`"""
    classes: tuple[str, ...] = ()
    """Given none, the classes are called "0", "1" and so on."""

    def __post_init__(self) -> None:
        if self.weight.ndim != 2:
            raise InputError(f"classification head: the weight has shape {list(self.weight.shape)}, not [classes, k]")
        rows = len(self.weight)
        if self.bias is not None and tuple(self.bias.shape) != (rows,):
            raise InputError(f"classification head: a bias of shape {list(self.bias.shape)} for {rows} classes")
        if self.classes and len(self.classes) != rows:
            raise InputError(f"classification head: {len(self.classes)} names for {rows} classes")
        if not self.classes:
            object.__setattr__(self, "classes", tuple(str(number) for number in range(rows)))

    def scores(self, features: Float[Tensor, "n k"]) -> Float[Tensor, "n c"]:
        bias = None if self.bias is None else self.bias.to(features)
        return torch.nn.functional.linear(features, self.weight.to(features), bias)

    def lipschitz(self, expert: Float[Tensor, "n k"], model: Float[Tensor, "n k"]) -> Float[Tensor, " n"]:
        """sigma_max(weight), the same for every sample."""
        largest: Tensor = torch.linalg.matrix_norm(self.weight.to(expert), ord=2)
        return largest.expand(len(expert))

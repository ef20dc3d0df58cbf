"""Score features with a head: class prompts, a vocabulary, or a task's own classifier, bare or after a pooler."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call

from featcal.formats.weights import Weights
from featcal.models.adapter import Adapter
from featcal.models.families.language import cap_scores
from featcal.models.model import Head
from featcal.system.errors import InputError


@dataclass(frozen=True)
class CosineHead:
    """CLIP's zero-shot classifier, z = scale * prompts @ h / ||h||."""

    prompts: Float[Tensor, "c k"]
    """Unit rows, one per class."""
    scale: float
    """CLIP's exp(logit_scale)."""
    classes: tuple[str, ...]

    def scores(self, features: Float[Tensor, "n k"]) -> Float[Tensor, "n c"]:
        return self.scale * torch.nn.functional.normalize(features, dim=1) @ self.prompts.to(features).mT

    def lipschitz(self, expert: Float[Tensor, "n k"], model: Float[Tensor, "n k"]) -> Float[Tensor, " n"]:
        """Return scale * sigma_max(prompts) / d_min, with d_min the distance of the segment expert-model from the
        origin.

        The Jacobian of h / ||h|| has norm 1 / ||h||, so this is a true upper bound; infinite for a segment through the
        origin.
        """
        e = model - expert
        square = e.square().sum(1)
        # `tiny` keeps a segment of length 0 from dividing by 0: t is 0 there, the point itself.
        t = (-(expert * e).sum(1) / square.clamp_min(torch.finfo(square.dtype).tiny)).clamp(0, 1)
        nearest = (expert + t[:, None] * e).norm(dim=1)
        bound: Tensor = self.scale * torch.linalg.matrix_norm(self.prompts.to(expert), ord=2) / nearest
        return bound


@dataclass(frozen=True)
class LinearHead:
    """A language model's head on its final normed state, z = scale * weight @ h; its scores are of tokens.

    With a `softcap` its scores are cap * tanh(z / cap).
    """

    read: Callable[[], Float[Tensor, "c k"]]
    """Function that reads the weight, so that not every expert's vocabulary-sized matrix stays in memory."""
    scale: float = 1.0
    softcap: float | None = None
    classes: None = None

    def scores(self, features: Float[Tensor, "n k"]) -> Float[Tensor, "n c"]:
        return cap_scores(self.scale * features @ self.read().to(features).mT, self.softcap)

    def lipschitz(self, expert: Float[Tensor, "n k"], model: Float[Tensor, "n k"]) -> Float[Tensor, " n"]:
        """Return |scale| * sigma_max(weight), equal for every sample; tanh has no slope above 1."""
        weight = self.read().to(expert)
        # [k, k] instead of an SVD of the vocabulary-sized weight; its largest eigenvalue is sigma_max squared.
        gram = weight.mT @ weight
        largest = torch.linalg.eigvalsh(gram)[-1].clamp_min(0).sqrt()
        everywhere: Tensor = (abs(self.scale) * largest).expand(len(expert))
        return everywhere


@dataclass(frozen=True)
class ClassificationHead:
    """The classifier of one task, z = weight @ h + bias.

    Raises:
        InputError: shapes that do not belong together.

    >>> import featcal, torch
    >>> head = featcal.ClassificationHead(torch.eye(2), torch.tensor([0.0, 1.0]), ("no", "yes"))
    >>> head.scores(torch.tensor([[3.0, 1.0], [0.0, 0.5]])).tolist()
    [[3.0, 2.0], [0.0, 1.5]]
    """

    weight: Tensor
    """`[c, k]`, one row per class."""
    bias: Tensor | None = None
    """`[c]`"""
    classes: tuple[str, ...] = ()
    """Names of the classes; by default "0", "1" and so on."""

    def __post_init__(self) -> None:
        if self.weight.ndim != 2:
            raise InputError(f"classification head: the weight has shape {list(self.weight.shape)}, not [classes, k]")
        rows = len(self.weight)
        if self.bias is not None and tuple(self.bias.shape) != (rows,):
            raise InputError(f"classification head: a bias of shape {list(self.bias.shape)} for {rows} classes")
        if self.classes and len(self.classes) != rows:
            raise InputError(f"classification head: {len(self.classes)} names for {rows} classes")
        if not self.classes:
            # The dataclass is frozen; this is its one value that others decide.
            object.__setattr__(self, "classes", tuple(str(number) for number in range(rows)))

    def scores(self, features: Float[Tensor, "n k"]) -> Float[Tensor, "n c"]:
        bias = None if self.bias is None else self.bias.to(features)
        return torch.nn.functional.linear(features, self.weight.to(features), bias)

    def lipschitz(self, expert: Float[Tensor, "n k"], model: Float[Tensor, "n k"]) -> Float[Tensor, " n"]:
        """Return sigma_max(weight), equal for every sample."""
        largest: Tensor = torch.linalg.matrix_norm(self.weight.to(expert), ord=2)
        return largest.expand(len(expert))


@dataclass(frozen=True)
class PooledHead:
    """A classifier after a pooler, as in BERT and RoBERTa, z = head(tanh(weight @ h + bias))."""

    weight: Float[Tensor, "w k"]
    bias: Float[Tensor, " w"] | None
    head: ClassificationHead

    @property
    def classes(self) -> tuple[str, ...]:
        return self.head.classes

    def scores(self, features: Float[Tensor, "n k"]) -> Float[Tensor, "n c"]:
        bias = None if self.bias is None else self.bias.to(features)
        return self.head.scores(torch.tanh(torch.nn.functional.linear(features, self.weight.to(features), bias)))

    def lipschitz(self, expert: Float[Tensor, "n k"], model: Float[Tensor, "n k"]) -> Float[Tensor, " n"]:
        """Return sigma_max(weight) times the classifier's own bound; tanh has no slope above 1."""
        largest: Tensor = torch.linalg.matrix_norm(self.weight.to(expert), ord=2)
        return largest * self.head.lipschitz(expert, model)


@dataclass(frozen=True)
class ModuleHead:
    """A classifier that runs the library's own module, for heads that are more than linear maps with tanh between
    them."""

    module: nn.Module
    tensors: Mapping[str, Tensor]
    """Tensors of the head by name in the module."""
    classes: tuple[str, ...]

    def scores(self, features: Float[Tensor, "n k"]) -> Float[Tensor, "n c"]:
        own = {name: tensor.to(features) for name, tensor in self.tensors.items()}
        found: Tensor = functional_call(self.module, own, (features,), strict=True)
        return found

    def lipschitz(self, expert: Float[Tensor, "n k"], model: Float[Tensor, "n k"]) -> Float[Tensor, " n"]:
        """Return the product of the bounds of all parts, equal for every sample; loose if a norm is among them."""
        return expert.new_full((len(expert),), math.prod(self._slopes()))

    def _slopes(self) -> Iterator[float]:
        """Yield a Lipschitz constant of every part of the module."""
        for name, part in self.module.named_modules():
            weight = self.tensors.get(f"{name}.weight")
            if isinstance(part, nn.Linear) and weight is not None:
                yield float(torch.linalg.matrix_norm(weight.double(), ord=2))
            elif isinstance(part, nn.LayerNorm) and weight is not None:
                # The norm of its derivative is at most max |weight| over the standard deviation, which eps bounds.
                yield float(weight.double().abs().max()) / math.sqrt(part.eps)
            elif not [*part.children()]:
                yield _largest_slope(part)


def _largest_slope(function: nn.Module) -> float:
    """Return the largest |derivative| of a scalar function, such as an activation, on a fine grid."""
    at = torch.linspace(-20, 20, 40_001, dtype=torch.float64, requires_grad=True)
    with torch.enable_grad():
        (slopes,) = torch.autograd.grad(function(at).sum(), at)
    return float(slopes.abs().max())


def stored_head(adapter: Adapter, model: Weights, classes: tuple[str, ...]) -> Head | None:
    """Return the head in a model's files; None if a part of it is missing.

    Args:
        classes: their names, if known.

    Raises:
        InputError: shapes that do not belong together.
    """
    found = adapter.head_module()
    if found is None:
        return linear_head(model, adapter.classifier, classes)
    module, names = found
    if any(name not in model.info for name in names.values()):
        return None
    stored = model.read(names.values())
    rows = len(stored[f"{adapter.classifier[-1]}.weight"])
    named = classes if len(classes) == rows else tuple(map(str, range(rows)))
    return ModuleHead(module, {inside: stored[name] for inside, name in names.items()}, named)


def linear_head(model: Weights, maps: Sequence[str], classes: tuple[str, ...]) -> Head | None:
    """Return the head of linear maps in a model's files; None if one of them is missing.

    Args:
        maps: names of its linear maps, one or two (`Adapter.classifier`).
        classes: their names, if known.

    Raises:
        InputError: shapes that do not belong together.
    """
    if any(f"{name}.weight" not in model.info for name in maps):
        return None
    found = model.read(
        f"{name}.{kind}" for name in maps for kind in ("weight", "bias") if f"{name}.{kind}" in model.info
    )
    *pooler, last = ((found[f"{name}.weight"], found.get(f"{name}.bias")) for name in maps)
    head = ClassificationHead(*last, classes=classes if len(classes) == len(last[0]) else ())
    return PooledHead(*pooler[0], head) if pooler else head

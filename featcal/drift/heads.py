"""Score maps: what turns final features into scores of classes or tokens (Props. 3 and 6)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from featcal.errors import InputError
from featcal.evaluation.evaluate import heads_for, require_labels
from featcal.evaluation.language import first_answers
from featcal.family import Family
from featcal.formats.weights import Weights
from featcal.models.language import LanguageModel
from featcal.tasks.sources import Samples


@runtime_checkable
class Head(Protocol):
    """A score map psi, from final features to one score per class or token."""

    def scores(self, features: Float[Tensor, "n k"]) -> Float[Tensor, "n c"]:
        """psi(h)."""

    def lipschitz(self, expert: Float[Tensor, "n k"], model: Float[Tensor, "n k"]) -> Float[Tensor, " n"]:
        """B of Prop. 3: psi moves no faster anywhere on the segment between the two features."""


@dataclass(frozen=True)
class CosineHead:
    """z = scale * prompts @ h / ||h||, CLIP's zero-shot classifier."""

    prompts: Float[Tensor, "c k"]
    """Unit rows, one per class."""
    scale: float
    """CLIP's exp(logit_scale)."""

    def scores(self, features: Float[Tensor, "n k"]) -> Float[Tensor, "n c"]:
        return self.scale * torch.nn.functional.normalize(features, dim=1) @ self.prompts.to(features).mT

    def lipschitz(self, expert: Float[Tensor, "n k"], model: Float[Tensor, "n k"]) -> Float[Tensor, " n"]:
        return cosine_head_lipschitz(expert, model, self.prompts.to(expert), self.scale)


@dataclass(frozen=True)
class LinearHead:
    """z = scale * weight @ h, a language model's head on its final normed state."""

    read: Callable[[], Float[Tensor, "c k"]]
    """Gives the weight; a vocabulary-sized matrix of every expert is not held all the time."""
    scale: float = 1.0

    def scores(self, features: Float[Tensor, "n k"]) -> Float[Tensor, "n c"]:
        return self.scale * features @ self.read().to(features).mT

    def lipschitz(self, expert: Float[Tensor, "n k"], model: Float[Tensor, "n k"]) -> Float[Tensor, " n"]:
        """|scale| * sigma_max(weight), the same for every sample."""
        weight = self.read().to(expert)
        gram = weight.mT @ weight
        largest = torch.linalg.eigvalsh(gram)[-1].clamp_min(0).sqrt()
        everywhere: Tensor = (abs(self.scale) * largest).expand(len(expert))
        return everywhere


def cosine_head_lipschitz(
    expert: Float[Tensor, "n k"], model: Float[Tensor, "n k"], prompts: Float[Tensor, "c k"], scale: float
) -> Float[Tensor, " n"]:
    """B = scale * sigma_max(prompts) / d_min, d_min the distance of the segment expert-model from the origin.

    The Jacobian of h / ||h|| has norm 1 / ||h||, so this is a true upper bound; infinite for a segment
    through the origin.
    """
    e = model - expert
    square = e.square().sum(1)
    t = (-(expert * e).sum(1) / square.clamp_min(torch.finfo(square.dtype).tiny)).clamp(0, 1)
    nearest = (expert + t[:, None] * e).norm(dim=1)
    bound: Tensor = scale * torch.linalg.matrix_norm(prompts, ord=2) / nearest
    return bound


def judges(family: Family, model: Weights, drawn: Mapping[str, Samples]) -> dict[str, tuple[Head, Head, Tensor]]:
    """For every task the expert's head, the model's head and the right class or first token of every sample.

    Raises:
        InputError: labels, answers, class names or a text tower are missing.
    """
    if isinstance(family.adapter, LanguageModel):
        own = language_head(family, model)
        return {t: (language_head(family, family.experts[t]), own, first_answers(one)) for t, one in drawn.items()}
    heads = heads_for(family, {task: _names(one) for task, one in drawn.items()})
    found: dict[str, tuple[Head, Head, Tensor]] = {}
    for task, head in heads.items():
        labels = drawn[task].labels
        assert labels is not None
        shared = CosineHead(head.prompts, head.scale)
        found[task] = shared, shared, labels
    return found


def language_head(family: Family, model: Weights) -> LinearHead:
    """The language-modelling head of one model of a family, which may be tied to its embedding."""
    adapter = family.adapter
    assert isinstance(adapter, LanguageModel)

    def read() -> Tensor:
        return model.read([adapter.lm_head])[adapter.lm_head]

    return LinearHead(read, adapter.scale)


def _names(drawn: Samples) -> tuple[str, ...]:
    names = require_labels(drawn).class_names or ()
    if len(names) < 2:
        raise InputError(f"task '{drawn.task}': a margin needs at least two classes")
    return names

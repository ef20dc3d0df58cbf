"""One kind of model: weights and, optionally, a map of final features and a head per task."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from featcal.formats.weights import Over, Weights

FeatureMap = Callable[[Float[Tensor, "n k"]], Float[Tensor, "n k2"]]
"""What a task's own module makes of final features, such as h + W_up relu(W_down h); on any device, in any dtype."""


@runtime_checkable
class Head(Protocol):
    """A score map psi, from final features to one score per class or token (Props. 3 and 6)."""

    @property
    def classes(self) -> tuple[str, ...] | None:
        """Names of the classes in the order of the scores; None where scores are of tokens, so answers are text."""

    def scores(self, features: Float[Tensor, "n k"]) -> Float[Tensor, "n c"]:
        """psi(h)."""

    def lipschitz(self, expert: Float[Tensor, "n k"], model: Float[Tensor, "n k"]) -> Float[Tensor, " n"]:
        """B of Prop. 3: psi moves no faster anywhere on the segment between the two features."""


@dataclass(frozen=True)
class Model(Over):
    """Weights with what belongs to single tasks. It is `Weights` itself: everything that takes those takes it."""

    under: Weights
    maps: Mapping[str, FeatureMap] = field(default_factory=dict)
    """By task; a task without one has the features of the weights alone."""
    heads: Mapping[str, Head] = field(default_factory=dict)
    """By task; a task without one has the head that the architecture gives (`Adapter.scores_with`)."""

    @property
    def label(self) -> str:
        return self.under.label


def map_features(model: Weights, task: str, features: Float[Tensor, "n k"]) -> Float[Tensor, "n k2"]:
    """The model's final features for a task: through the task's map where the model has one, else as they are."""
    for one in _models(model):
        if task in one.maps:
            return one.maps[task](features)
    return features


def own_head(model: Weights, task: str) -> Head | None:
    """The head that a model brings for a task; None if it brings none."""
    return next((one.heads[task] for one in _models(model) if task in one.heads), None)


def brings(model: Weights) -> set[str]:
    """Tasks for which a model has a map or a head of its own, beside its weights."""
    return {task for one in _models(model) for task in (*one.maps, *one.heads)}


def _models(weights: Weights) -> Iterator[Model]:
    """Every `Model` among the weights and what they lie over, the outermost first: a calibrated or resident model
    keeps the maps and heads of the one below."""
    below: object = weights
    while isinstance(below, Over):
        if isinstance(below, Model):
            yield below
        below = below.under

"""Describe the one kind of model: weights and, optionally, for single tasks, other weights,
a map of final features and a head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from featcal.formats.weights import Weights, WrappedWeights

FeatureMap = Callable[[Float[Tensor, "n k"]], Float[Tensor, "n k2"]]
"""A task's own module on final features, such as h + W_up relu(W_down h); accepts any device and dtype."""


@runtime_checkable
class Head(Protocol):
    """A score map psi: from final features to one score per class or token (Props. 3 and 6)."""

    @property
    def classes(self) -> tuple[str, ...] | None:
        """Return the names of the classes in the order of the scores; None if scores are of tokens."""

    def scores(self, features: Float[Tensor, "n k"]) -> Float[Tensor, "n c"]:
        """Return psi(h), the scores of final features h."""

    def lipschitz(self, expert: Float[Tensor, "n k"], model: Float[Tensor, "n k"]) -> Float[Tensor, " n"]:
        """Return B of Prop. 3: an upper bound of how fast psi changes on the segment between the two features."""


@dataclass(frozen=True)
class Model(WrappedWeights):
    """Weights together with modules for single tasks; a `Model` is itself `Weights`, and can be used wherever they can.

    >>> import featcal
    >>> family = featcal.open_family(featcal.load_suite("lm-mini"))
    >>> model = featcal.Model(family.base, adapted={"sentiment": family.experts["sentiment"]})
    >>> ledger = featcal.measure_drift(family, model, samples=8)
    >>> {task: round(one.layers[-1].relative_drift, 1) for task, one in ledger.tasks.items()}
    {'sentiment': 0.0, 'entailment': 0.9, 'correct': 0.2, 'rewrite': 0.6}
    """

    under: Weights
    maps: Mapping[str, FeatureMap] = field(default_factory=dict)
    """Maps by task; for a task without a map, the features are those of the weights alone."""
    heads: Mapping[str, Head] = field(default_factory=dict)
    """Heads by task; a task without one has the head that the architecture supplies (`Adapter.scores_with`)."""
    adapted: Mapping[str, Weights] = field(default_factory=dict)
    """Weights by task, which differ from `under` inside the blocks alone; a task without an
    entry has those of `under`.
    """

    @property
    def label(self) -> str:
        return self.under.label


def map_features(model: Weights, task: str, features: Float[Tensor, "n k"]) -> Float[Tensor, "n k2"]:
    """Return the model's final features for a task, through the task's map if the model has one."""
    for one in _models(model):
        if task in one.maps:
            return one.maps[task](features)
    return features


def task_weights(model: Weights, task: str) -> Weights:
    """Return the weights with which a model computes the features of a task: the model itself if it has one set."""
    return next((one.adapted[task] for one in _models(model) if task in one.adapted), model)


def strip_maps(model: Weights) -> Weights:
    """Return the model without its maps: the model itself if it has no maps, or if a task has its own weights."""
    while isinstance(model, Model) and not model.adapted:
        model = model.under
    return model


def own_head(model: Weights, task: str) -> Head | None:
    """Return the head that a model has for a task; None if it has none."""
    return next((one.heads[task] for one in _models(model) if task in one.heads), None)


def tasks_with_own_modules(model: Weights) -> set[str]:
    """Return the tasks for which a model has its own weights, map or head."""
    return {task for one in _models(model) for task in (*one.maps, *one.heads, *one.adapted)}


def answers_apart(model: Weights, task: str) -> bool:
    """Say whether a model has its own map or head for a task, which the library's
    `generate` does not apply; weights of its own do not count.
    """
    return any(task in one.maps or task in one.heads for one in _models(model))


def _models(weights: Weights) -> Iterator[Model]:
    """Yield every `Model` among the weights and those that they wrap, the outermost first."""
    below: object = weights
    while isinstance(below, WrappedWeights):
        if isinstance(below, Model):
            yield below
        # A calibrated or resident model keeps the maps and heads of the one below.
        below = below.under

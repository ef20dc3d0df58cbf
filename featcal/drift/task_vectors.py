"""Locate a model in parameter space: the cosine of its task vector to each expert's (Fig. 2d of the paper), and how far
both are from the base, layer by layer. It needs no samples and no forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from featcal.family.opening import Family
from featcal.formats.weights import Weights
from featcal.models.adapter import LAST_LAYER, Adapter


@dataclass(frozen=True)
class WeightChange:
    """The task vectors of a model and of an expert, theta - theta_base, in the weights of one layer."""

    layer: str
    base_square: float
    """Squared norm of theta_base."""
    model_square: float
    """Squared norm of the model's task vector."""
    expert_square: float
    """Squared norm of the expert's task vector."""
    dot: float
    """Product of both task vectors."""

    def to_json(self) -> dict[str, Any]:
        """Return the three norms, and the cosine of both task vectors (0 if one vanishes)."""
        return {
            "layer": self.layer,
            "base_norm": self.base_square**0.5,
            "model_change": self.model_square**0.5,
            "expert_change": self.expert_square**0.5,
            "cosine": _cosine([self]),
        }


def task_vector_cosines(family: Family, model: Weights) -> dict[str, float]:
    """Return for each task the cosine between theta_model - theta_base and theta_expert - theta_base over all tensors
    of the tower; 0 if a task vector vanishes.

    >>> import featcal
    >>> family = featcal.open_family(featcal.load_suite("lm-mini"))
    >>> cosines = featcal.task_vector_cosines(family, family.merged)
    >>> {task: round(one, 2) for task, one in cosines.items()}
    {'sentiment': 0.41, 'entailment': 0.44, 'correct': 0.68, 'rewrite': 0.52}
    """
    return join_layers(measure_weight_changes(family, model))


def join_layers(changes: Mapping[str, Sequence[WeightChange]]) -> dict[str, float]:
    """Return what `task_vector_cosines` returns, from the changes of all layers."""
    return {task: _cosine(layers) for task, layers in changes.items()}


def measure_weight_changes(family: Family, model: Weights) -> dict[str, list[WeightChange]]:
    """Measure by task how far the model and the task's expert are from the base in the weights of every layer, in
    forward order; layers without weights in the tower are left out.

    Raises:
        InputError: the base is not known.
    """
    shared, own = dict[str, list[float]](), {task: dict[str, list[float]]() for task in family.experts}

    def add(sums: dict[str, list[float]], layer: str, *pairs: tuple[torch.Tensor, torch.Tensor]) -> None:
        products = [float(torch.dot(one.flatten(), other.flatten())) for one, other in pairs]
        sums[layer] = [a + b for a, b in zip(sums.get(layer, [0.0, 0.0]), products, strict=True)]

    # One tensor at a time: memory does not grow with the size of the models.
    for name, layer in _layers_of_tensors(family.adapter):
        base = family.base.read([name])[name].double()
        moved = model.read([name])[name].double() - base
        add(shared, layer, (base, base), (moved, moved))
        for task, expert in family.experts.items():
            vector = expert.read([name])[name].double() - base
            add(own[task], layer, (vector, vector), (vector, moved))
    layers = [layer for layer in family.adapter.layers() if layer in shared]
    return {task: [WeightChange(one, *shared[one], *sums[one]) for one in layers] for task, sums in own.items()}


def _cosine(layers: Sequence[WeightChange]) -> float:
    """Return the cosine of both task vectors over layers; 0 if one vanishes."""
    norms = (sum(one.model_square for one in layers) * sum(one.expert_square for one in layers)) ** 0.5
    return sum(one.dot for one in layers) / norms if norms > 0 else 0.0


def _layers_of_tensors(adapter: Adapter) -> Iterator[tuple[str, str]]:
    """Yield every tensor of the tower with its layer, as charts and tables name it."""
    found = {name: adapter.name_of(block) for block in adapter.blocks() for name in block.names}
    for stage in reversed(adapter.stages):  # what stages share is the first one's
        found |= dict.fromkeys(stage.outer, adapter.first_layer(stage))
    return ((name, found.get(name, LAST_LAYER)) for name in adapter.tower)

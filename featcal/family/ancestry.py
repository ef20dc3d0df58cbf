"""Determine whether experts come from the base, by the distance of their weights, layer by layer.

Weights that were trained from the same start point in nearly the same direction as the base's. Those of another
training are orthogonal to it, because units have no common order in two networks. Norms and biases are left out: they
point the same way in every network.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from featcal.family.opening import Family
from featcal.formats.weights import Weights
from featcal.suite.recipe import MergeRecipe
from featcal.system.distributed import ALONE, Ranks
from featcal.system.errors import InputError

UNRELATED = 0.5
"""Cosine of a layer's weights to the base's below which they are not its descendants. Noise of relative size d gives
1 / sqrt(1 + d^2); the embedded experts have at least 0.97 (d up to 0.22), unrelated models less than 0.05 (d about
1.4). 0.5 means d = 1.7: moved by more than there was to begin with."""
FAR = 5.0
"""Distance, in medians of the other experts', from which on an expert gets a note."""
READ_WHOLE = 2**26
"""Parameters per model up to which every matrix is compared; of larger models the smallest one of each layer."""
ABSURD = 1e6
"""Absolute value that no trained weight reaches; a flipped exponent bit makes such numbers."""


@dataclass(frozen=True)
class Lineage:
    """Distance ||model - base|| / ||base|| of one model, and the cosine of the two, per layer over its matrices."""

    distance: tuple[float, ...]
    cosine: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.distance)


@dataclass(frozen=True)
class Lineages:
    """Distances of a suite's models to its base, or to the model that replaces it."""

    layers: tuple[str, ...]
    models: Mapping[str, Lineage]
    whole: bool
    """True if every matrix was compared, False if one of each layer."""
    start: str = "base"
    """Name of the start of the distances: the base, the merged model if the base is not known, or the expert that
    stands in for it."""

    def to_json(self) -> dict[str, Any]:
        models = {role: {"distance": list(o.distance), "cosine": list(o.cosine)} for role, o in self.models.items()}
        return {"layers": list(self.layers), "whole": self.whole, "models": models}


def measure_lineage(family: Family, models: Mapping[str, Weights]) -> tuple[Lineages, dict[str, list[str]]]:
    """Compare models with the base of a family, or with its merged model if the base is not known, one layer in memory
    at a time. (Models of one base lie near their merge too.)

    Returns:
        The distances of models with readable values, and the problems of models with implausible values.
    """
    shapes = family.adapter.shapes()
    matrices = [name for name in family.adapter.tower if len(shapes[name]) > 1]
    whole = sum(torch.Size(shapes[name]).numel() for name in matrices) <= READ_WHOLE
    layers: dict[str, Sequence[str]] = {
        "embeddings": [name for name in family.adapter.stages[0].outer if name in matrices],
        **{
            layer: [name for name in block.names if name in matrices]
            for layer, block in zip(family.adapter.block_layers(), family.adapter.blocks(), strict=True)
        },
    }
    if not whole:
        layers = {
            layer: [min(names, key=lambda name: torch.Size(shapes[name]).numel())] for layer, names in layers.items()
        }
        layers.pop("embeddings")
    rows: dict[str, list[tuple[float, float]]] = {role: [] for role in models}
    problems: dict[str, list[str]] = {}
    start = family.base if family.is_base_known else family.merged
    for names in layers.values():
        base = {name: tensor.double() for name, tensor in start.read(names).items()}
        for role in [role for role in models if role not in problems]:
            try:
                rows[role].append(_compare(base, models[role], names))
            except InputError as error:
                problems[role] = list(error.problems)
    found = {
        role: Lineage(tuple(d for d, _ in row), tuple(c for _, c in row))
        for role, row in rows.items()
        if role not in problems
    }
    return Lineages(tuple(layers), found, whole, "base" if family.is_base_known else "merged model"), problems


def check_lineage(family: Family, merged: Weights | None = None, ranks: Ranks = ALONE) -> list[str]:
    """Return notes on the origin of the experts of a family and of a merged model, as `featcal check` prints them.

    Raises:
        InputError: a model does not descend from the base in any layer, or has values that no training produces.
    """
    # Each rank reads the experts whose tasks it leads, and rank 0 the merged model: no file is read twice.
    stand_in = _stand_in(family)
    own = {f"expert '{task}'": one for task, one in ranks.select_led(family.experts).items() if task != stand_in}
    found, wrong_values = measure_lineage(family, own if merged is None or ranks.rank else {"merged": merged, **own})
    lineages, damaged = replace(found, models=ranks.union(found.models)), ranks.union(wrong_values)
    if stand_in is not None:
        lineages = replace(lineages, start=f"expert '{stand_in}'")
    problems, notes = judge_distances(lineages)
    wrong = [problem for found in (damaged, problems) for own in found.values() for problem in own]
    if wrong:
        raise InputError(*wrong)
    return [note for own in notes.values() for note in own]


def _stand_in(family: Family) -> str | None:
    """Return the task whose expert is the base of a mean of whole models too, which has none; None for other merges,
    whose experts should differ from the base."""
    suite = family.suite
    if not isinstance(suite.merged, MergeRecipe) or suite.merged.method != "linear":
        return None
    return next((name for name, task in suite.tasks.items() if task.expert == suite.base), None)


def judge_distances(lineages: Lineages) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Interpret the distances, as (problems, notes) by model.

    A model that is unrelated in every layer is a problem; in some layers it may have been trained far away, or anew.
    """
    problems: dict[str, list[str]] = {}
    notes: dict[str, list[str]] = {}
    sampled, start = "" if lineages.whole else ", one matrix of each layer", lineages.start
    for role, own in lineages.models.items():
        foreign = [layer for layer, cosine in zip(lineages.layers, own.cosine, strict=True) if cosine < UNRELATED]
        # A merged model lies near the base by its making: it does not say how far experts usually are.
        others = [one.mean for name, one in lineages.models.items() if name != role and name != "merged"]
        usual = statistics.median(others) if others else own.mean
        twins = [name for name, one in lineages.models.items() if name != role and one == own and own.mean > 0]
        if foreign:
            whole = len(foreign) == len(lineages.layers)
            (problems if whole else notes)[role] = [
                f"{role}: different base lineage in {'every layer' if whole else ', '.join(foreign)}: distance to the "
                f"{start} {own.mean:.2f} of its norm, lowest cosine {min(own.cosine):.2f} (descendants have "
                f"{UNRELATED} at least{sampled}); "
                + ("give a model that was trained from this base" if whole else "was it trained from this base?")
            ]
        elif own.mean == 0 and role != "merged":
            notes[role] = [f"{role}: its weights are those of the {start}; is it the right file?"]
        elif own.mean > FAR * usual > 0 and role != "merged":
            notes[role] = [
                f"{role}: {own.mean / usual:.0f} times as far from the {start} as the other experts ({own.mean:.2f} of "
                f"its norm against {usual:.2f}{sampled}); was it trained from this base?"
            ]
        elif twins:
            notes[role] = [f"{role}: exactly as far from the {start} as {', '.join(twins)}: the same file twice?"]
    return problems, notes


def _compare(base: Mapping[str, torch.Tensor], model: Weights, names: Sequence[str]) -> tuple[float, float]:
    """Return relative distance and cosine of two lists of tensors, each taken as one vector."""
    moved = own = square = dot = 0.0
    for name, tensor in model.read(names).items():
        largest = float(tensor.abs().max())
        if largest > ABSURD:
            raise InputError(
                f"{model.label}: tensor '{name}' holds {largest:.1e}, far beyond any trained weight; the file is "
                "damaged, fetch it again"
            )
        other = tensor.double()
        moved += float((other - base[name]).square().sum())
        own += float(other.square().sum())
        square += float(base[name].square().sum())
        dot += float((other * base[name]).sum())
    # Tensors of zeros have no direction: their cosine is 0 instead of NaN.
    tiny = 1e-300
    return (moved / max(square, tiny)) ** 0.5, dot / max((own * square) ** 0.5, tiny)

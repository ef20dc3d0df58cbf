"""Determine the ingredients of a merged model from its weights: the coefficient of every expert, layer by layer, and
the unexplained rest.

Merged weights are theta_0 + tau with tau nearly a sum of the experts' task vectors, sum_i c_i tau_i. The coefficients
are those of least squares, layer by layer; the median over layers counts for each, so that one damaged layer does not
change the result for the others.

If theta_0 is not known, differences start at the first expert, whose coefficient is 1 minus those of the others: then
merged weights are sum_i c_i theta_i with sum_i c_i = 1, for any choice of the first expert.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from featcal.family.opening import Family
from featcal.formats.weights import Weights

FAINT = 0.1
"""Share of the largest coefficient below which an expert counts as absent from a merge. TIES and DARE, which change
single values, keep coefficients of experts within a factor of two."""
FAR = 5.0
"""Distance, in medians of all layers' distances, from which on a layer counts as merged unlike the others."""
ALIKE = 1e-3
"""Difference (1 - cosine) below which the directions of two task vectors count as equal."""
PIECE = 1 << 20
"""Number of values of every model that are compared at a time, in float64."""


@dataclass(frozen=True)
class LayerContents:
    """Ingredients of one layer of a merged model."""

    layer: str
    coefficients: Mapping[str, float]
    """Task → coefficient of its expert; experts that did not change the layer are left out."""
    moved: float
    """||tau||, the layer's distance from the base."""
    summed: float
    """||sum_i tau_i||, the distance of Task Arithmetic at scale 1."""
    explained: float
    """||sum_i c_i tau_i||."""
    base: float
    """Norm of the base's weights, ||theta_0||."""
    rounding: float
    """Norm of the rounding error of storing the merge, estimated as uniform errors of half a unit in the last place."""
    zeros: tuple[str, ...]
    """Tensors of zeros that are not zero in the base."""
    is_zero: bool
    """True if all its matrices are zeros."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Task → ||c_i tau_i||, except for the expert from which differences start."""
    stock: float = 0.0
    """Share t of the way from the base to the experts' mean that Model Stock takes, by the angles between their task
    vectors, tensor by tensor; for the whole layer by least squares."""
    stocked: float = 0.0
    """Distance from the base to which Model Stock goes by these shares."""


@dataclass(frozen=True)
class Makeup:
    """Ingredients of a merged model, layer by layer and as a whole."""

    layers: tuple[LayerContents, ...]
    """Layers in forward order: embeddings, blocks, and the layers after them."""
    start: str = "the base"
    """Name of the start of differences: the base, or an expert if the base is not known."""
    is_base_known: bool = True
    computed: str = ""
    """dtype in which it was merged, if narrower than the one in which it is stored."""

    @cached_property
    def coefficients(self) -> dict[str, float]:
        """Return task → coefficient of its expert, the median over the layers that the expert changed."""
        tasks = dict.fromkeys(task for layer in self.layers for task in layer.coefficients)
        return {
            task: statistics.median(one.coefficients[task] for one in self.layers if task in one.coefficients)
            for task in tasks
        }

    @property
    def scale(self) -> float:
        """Return the scale of the merge: its distance in units of the plain sum of the task vectors."""
        return self._median(one.explained / one.summed for one in self.layers if one.summed > 0)

    @property
    def rest(self) -> float:
        """Return the share of the merge's difference from the base that no sum of the task vectors explains, 0-1."""
        rest = ((1 - min(one.explained / one.moved, 1) ** 2) ** 0.5 for one in self.layers if one.moved > 0)
        return self._median(rest)

    @property
    def stock(self) -> float:
        """Return the share of the way from the base to the experts' mean that Model Stock takes."""
        return self._median(one.stock for one in self.layers if one.summed > 0)

    @property
    def rounding(self) -> float:
        """Estimate the share of the merge's difference from the base that is rounding."""
        return self._median(one.rounding / one.moved for one in self.layers if one.moved > 0)

    @property
    def is_base(self) -> bool:
        """Say whether the merge has exactly the weights of the base, or of the expert from which differences start."""
        return not any(one.moved for one in self.layers)

    @property
    def layers_by_owner(self) -> dict[str, int]:
        """Return task → number of layers in which its expert has the largest part."""
        owners = [max(one.coefficients, key=one.coefficients.__getitem__) for one in self.layers if one.coefficients]
        return {task: owners.count(task) for task in self.coefficients}

    @property
    def is_as_stocked(self) -> bool:
        """Say whether no expert is present in the merge and Model Stock would also leave none of them."""
        shares = self.stock, sum(self.coefficients.values())
        return self.is_base_known and max(map(abs, shares)) < FAINT * len(self.coefficients)

    @property
    def zero_layers(self) -> tuple[str, ...]:
        """Return the layers whose matrices are all zeros."""
        return tuple(one.layer for one in self.layers if one.is_zero)

    @property
    def zero_tensors(self) -> tuple[str, ...]:
        """Return the tensors of zeros in other layers."""
        return tuple(name for one in self.layers if not one.is_zero for name in one.zeros)

    @property
    def far_layers(self) -> dict[str, float]:
        """Return the layers with a distance out of all proportion, with that distance in medians."""
        return self._find_far({one.layer: one.moved / one.summed for one in self.layers if one.summed > 0})

    @property
    def far_from_stock(self) -> dict[str, float]:
        """Return the layers whose distance is out of all proportion to the one of Model Stock, with it in medians."""
        stock = {one.layer: math.hypot(one.stocked, one.rounding) for one in self.layers}
        return self._find_far({one.layer: one.moved / stock[one.layer] for one in self.layers if stock[one.layer] > 0})

    def _find_far(self, ways: Mapping[str, float]) -> dict[str, float]:
        usual = self._median(ways.values())
        return {
            layer: way / usual for layer, way in ways.items() if way > FAR * usual > 0 and layer not in self.zero_layers
        }

    def is_in_a_layer(self, task: str) -> bool:
        """Say whether an expert makes up more than a negligible part of some layer's difference from the base."""
        return any(one.parts.get(task, 0.0) > FAINT * one.moved > 0 for one in self.layers)

    def find_absent(self, stated: Mapping[str, float] | None = None) -> tuple[str, ...]:
        """Find the tasks whose experts are absent from the merge: their coefficients are faint, and their parts of its
        difference from the base negligible.

        Args:
            stated: coefficients by the recipe, if known; if all coefficients are faint compared with these, all experts
                are absent.
        """
        largest, meant = (max(map(abs, (one or {}).values()), default=0.0) for one in (self.coefficients, stated))
        return tuple(
            task
            for task, one in self.coefficients.items()
            if largest < FAINT * meant
            or ((abs(one) <= FAINT * largest or largest < FAINT) and self._share_of(task) <= FAINT)
        )

    def _share_of(self, task: str) -> float:
        """Return the length of an expert's part as a share of the merge's distance; 0 for the expert from which
        differences start."""
        return self._median(one.parts.get(task, 0.0) / one.moved for one in self.layers if one.moved > 0)

    @staticmethod
    def _median(values: Any) -> float:
        found = list(values)
        return statistics.median(found) if found else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return coefficients, scale and the unexplained share, as a whole and by layer."""
        layers = [
            {"layer": one.layer, "coefficients": dict(one.coefficients), "zeros": list(one.zeros)}
            for one in self.layers
        ]
        whole = {"coefficients": self.coefficients, "scale": self.scale, "unexplained": self.rest}
        return {**whole, "layers": layers}


def take_contents(family: Family, merged: Weights, computed: str = "") -> Makeup:
    """Measure the ingredients of a merged model, with one tensor of every model in memory at a time.

    Args:
        computed: dtype in which it was merged, if known.

    Raises:
        InputError: values that are not finite, with the tensor's name.
    """
    first = next(iter(family.experts))
    start = family.base if family.is_base_known else family.experts[first]
    dtype = getattr(torch, computed, None)
    coarse = torch.finfo(dtype).eps if isinstance(dtype, torch.dtype) and dtype.is_floating_point else 0.0
    stored = [torch.finfo(merged.info[name].dtype).eps for _, names in _layers(family) for name in names]
    layers = tuple(_take_layer(family, start, merged, layer, names, coarse) for layer, names in _layers(family))
    whose = "the base" if family.is_base_known else f"the expert '{first}'"
    return Makeup(layers, whose, family.is_base_known, computed if coarse > max(stored, default=0.0) else "")


def _layers(family: Family) -> Iterator[tuple[str, Sequence[str]]]:
    adapter = family.adapter
    blocks = dict(zip(adapter.block_layers(), (block.names for block in adapter.blocks()), strict=True))
    outer = [name for stage in adapter.stages for name in stage.outer]
    inside = {name for names in (outer, *blocks.values()) for name in names}
    behind = [name for name in adapter.tower if name not in inside]
    for layer, names in {"embeddings": outer, **blocks, "head": behind}.items():
        known = [name for name in dict.fromkeys(names) if name in family.base.info]
        if known:
            yield layer, known


def _take_layer(
    family: Family, start: Weights, merged: Weights, layer: str, names: Sequence[str], coarse: float
) -> LayerContents:
    """Measure the ingredients of one layer; rounding is at least as coarse as the given epsilon."""
    tasks = list(family.experts)
    gram = torch.zeros(len(tasks) + 1, len(tasks) + 1, dtype=torch.float64)
    base, noise, stock, stocked, zeros, matrices = 0.0, 0.0, 0.0, 0.0, [], []
    for name in names:
        first = start.read([name])[name]
        own = merged.read([name])[name]
        others = [family.experts[task].read([name])[name] for task in tasks]
        products, square = _multiply(first, [*others, own])
        gram += products
        ratio, way = _stock_ratio(products[:-1, :-1]), float(products[:-1, :-1].sum().clamp(min=0))
        stock += ratio * way
        stocked += (ratio / len(tasks)) ** 2 * way
        base += square
        noise += square * max(torch.finfo(own.dtype).eps, coarse) ** 2 / 12
        matrices += [name] * (first.ndim > 1 and square > 0)
        zeros += [name] * (square > 0 and not bool(own.any()))
    own_gram, dots, moved = gram[:-1, :-1], gram[:-1, -1], float(gram[-1, -1])
    changed = own_gram.diagonal() > 0
    found = _share_out(own_gram, dots)
    coefficients = {task: float(found[i]) for i, task in enumerate(tasks) if changed[i]}
    if not family.is_base_known and coefficients:
        coefficients = {tasks[0]: 1 - sum(coefficients.values()), **coefficients}
    summed = float(own_gram.sum().clamp(min=0))
    return LayerContents(
        layer,
        coefficients,
        moved**0.5,
        summed**0.5,
        float((found @ own_gram @ found).clamp(min=0)) ** 0.5,
        base**0.5,
        noise**0.5,
        tuple(zeros),
        bool(matrices) and set(matrices) <= set(zeros),
        {task: abs(float(found[i])) * float(own_gram[i, i]) ** 0.5 for i, task in enumerate(tasks) if changed[i]},
        stock / summed if summed > 0 else 0.0,
        stocked**0.5,
    )


def _stock_ratio(gram: Tensor) -> float:
    """Return t = N cos / (1 + (N - 1) cos), with cos the mean over all pairs of N task vectors.

    Args:
        gram: their inner products, `[N, N]`.
    """
    count, lengths = len(gram), gram.diagonal().sqrt()
    directions = gram / (lengths[:, None] * lengths).clamp(min=torch.finfo(gram.dtype).tiny)
    cosine = float(directions.sum() - directions.trace()) / (count * (count - 1)) if count > 1 else 1.0
    rest = 1 + (count - 1) * cosine
    return count * cosine / rest if rest > ALIKE else 0.0


def _share_out(gram: Tensor, dots: Tensor) -> Tensor:
    """Return the coefficients of least squares; equal or nearly equal experts get equal parts.

    Otherwise rounding would decide their coefficients: plus a thousand for one and minus a thousand for the other.

    Args:
        gram: inner products of the task vectors, `[experts, experts]`.
        dots: those with the merge's, `[experts]`.
    """
    lengths = gram.diagonal().sqrt()
    scale = torch.where(lengths > 0, lengths, 1.0)
    directions = gram / scale[:, None] / scale
    inverse: Tensor = torch.linalg.pinv(directions, atol=ALIKE, rtol=0.0, hermitian=True)
    return inverse @ (dots / scale) / scale


def _multiply(start: Tensor, models: Sequence[Tensor]) -> tuple[Tensor, float]:
    """Return the inner products of models' differences from a tensor of the base, `[models, models]`, and its
    square."""
    products = torch.zeros(len(models), len(models), dtype=torch.float64)
    square, flat = 0.0, [one.reshape(-1) for one in (start, *models)]
    for first in range(0, start.numel(), PIECE):
        piece, *own = (one[first : first + PIECE].double() for one in flat)
        vectors = torch.stack(own) - piece
        products += vectors @ vectors.T
        square += float(piece @ piece)
    return products, square

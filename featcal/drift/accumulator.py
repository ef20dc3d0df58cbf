"""Collect the measurements of one task, batch by batch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from featcal.drift.crosscheck import SecondStates
from featcal.drift.ledger import Attribution, LayerDrift, TaskDrift
from featcal.drift.propagation import TINY, Contributions
from featcal.drift.split import Parts, split_drift
from featcal.drift.streams import LayerTransition
from featcal.models.adapter import LAST_LAYER
from featcal.models.compute import widen
from featcal.system.errors import NumericalError


@dataclass
class Record:
    """Measurements of the layers of one task, whose samples may run in several parts."""

    attribution: bool
    numbers: dict[str, list[dict[str, Tensor]]] = field(default_factory=dict)
    residuals: dict[str, tuple[Tensor, Tensor | None]] = field(default_factory=dict)
    """Residuals by layer, of the sample that runs a second time."""
    final: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    _carried: dict[int, Contributions] = field(default_factory=dict)
    booked: list[tuple[Tensor, ...]] = field(default_factory=list)
    """Results of `Contributions.book`, one per batch."""

    def add(self, crossing: LayerTransition, parts: Parts, on_expert: Tensor) -> None:
        """Add one batch after it passed one layer; in the very first layer all drift is mismatch.

        Args:
            on_expert: the model's layer on the expert's state.
        """
        self.numbers.setdefault(crossing.layer, []).append(_measure(parts))
        position, (expert, model) = crossing.position, crossing.after
        if self.attribution:
            if crossing.run is None or crossing.before is None:
                self._carried[position] = Contributions.begin(expert, model)
            else:
                self._carried[position].step(crossing.run, crossing.before, (expert, on_expert, model))
        if crossing.layer == LAST_LAYER:
            self.final.append(crossing.after)

    def take_contributions(self) -> list[Contributions]:
        """Return the contributions of every batch that was added since the last call, in order, and release them."""
        carried, self._carried = self._carried, {}
        return [*carried.values()]

    def check(self, crossing: LayerTransition, parts: Parts, second: SecondStates, class_token: bool) -> None:
        """Compare a layer of the first batch with a second computation of one of its samples.

        Args:
            class_token: use only the first token.
        """
        states, before = (second.expert, second.on_expert, second.model), second.before if crossing.skip else None
        self.residuals[crossing.layer] = _residuals(parts, split_drift(states, before, class_token), second.row)

    def result(self, task: str, indices: tuple[int, ...]) -> TaskDrift:
        layers = []
        for layer, batches in self.numbers.items():
            numbers = dict(zip(batches[0], concat_batches([tuple(batch.values()) for batch in batches]), strict=True))
            response, (residual, skip) = numbers.pop("response", None), self.residuals[layer]
            layers.append(LayerDrift(layer, **numbers, residual=residual, response=response, skip_residual=skip))
        expert, model = checked_features(task, self.final)
        booked = None
        if self.attribution:
            inner, quality = (torch.cat(one, dim=1) for one in zip(*self.booked, strict=True))
            booked = Attribution(inner, quality, widen(model - expert).square().sum(1))
        return TaskDrift(task, tuple(layers), expert, model, indices, booked)


def book_contributions(records: Iterable[Record]) -> None:
    """Attribute the final drift of every batch that was added since the last call to the layers. All batches pass
    backwards through a layer before any of them passes the layer below, so that a layer's tensors are read once.
    """
    ways = [(record, one.book()) for record in records for one in record.take_contributions()]
    *_, found = zip(*(way for _, way in ways), strict=True)
    for (record, _), one in zip(ways, found, strict=True):
        record.booked.append(tuple(widen(part).cpu() for part in one))


def _measure(parts: Parts) -> dict[str, Tensor]:
    """Return the numbers of one layer, one per sample."""
    drift, mismatch, propagation = parts.e.norm(dim=1), parts.m.norm(dim=1), parts.p.norm(dim=1)
    numbers = {
        "drift": drift,
        "expert_norm": parts.expert.norm(dim=1),
        "mismatch": mismatch,
        "propagation": propagation,
        "alignment": _cosine(parts.m, parts.p, mismatch * propagation),
    }
    before, r = parts.incoming, parts.r
    if before is not None and r is not None:
        numbers["response"] = _cosine(r, before, r.norm(dim=1) * before.norm(dim=1))
    return numbers


def _residuals(parts: Parts, again: Parts, row: int) -> tuple[Tensor, Tensor | None]:
    """Return the distance of m or p, and of r, in `row` from a second computation, relative to the drift there."""
    only = slice(row, row + 1)
    scale = parts.e[only].norm(dim=1)
    apart = torch.maximum((parts.m[only] - again.m).norm(dim=1), (parts.p[only] - again.p).norm(dim=1))
    r, second_r = parts.r, again.r
    response = None if r is None or second_r is None else _relative((r[only] - second_r).norm(dim=1), scale)
    return _relative(apart, scale), response


def concat_batches(batches: Iterable[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """Concatenate batches along their first axis, on the CPU."""
    return tuple(torch.cat(parts).cpu() for parts in zip(*batches, strict=True))


def checked_features(task: str, batches: Iterable[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """Return the expert's and the model's final features; raise NumericalError if they are not finite."""
    features = concat_batches(batches)
    if not all(bool(torch.isfinite(one).all()) for one in features):
        raise NumericalError(f"task '{task}': final features are not finite")
    return features


def _cosine(left: Tensor, right: Tensor, norms: Tensor) -> Tensor:
    """Return the cosine per row; `norms` are the products of the rows' norms."""
    # Where a norm vanishes the product does, too: the cosine is 0 there and not NaN.
    cosine: Tensor = (left * right).sum(1) / norms.clamp_min(torch.finfo(norms.dtype).tiny)
    return cosine


def _relative(rest: Tensor, scale: Tensor) -> Tensor:
    """Return `rest` over `scale` on the CPU: 0 if `rest` is 0, and finite even if `scale` is 0."""
    return (rest / scale.clamp_min(TINY)).cpu()

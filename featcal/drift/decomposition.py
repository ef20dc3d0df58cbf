"""Propositions 1, 2 and 4: the drift of a model from its experts, layer by layer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from featcal.drift.ledger import Attribution, FeatureDrift, LayerDrift, TaskDrift, TaskFeatures
from featcal.drift.propagation import TINY, Contributions
from featcal.drift.second_run import SecondRun, SecondStates
from featcal.drift.streams import LAST_LAYER, Crossing, cross
from featcal.errors import NumericalError
from featcal.formats.weights import Weights
from featcal.models.adapter import walking
from featcal.models.expert_pass import ExpertPass
from featcal.models.run import Run


def decompose(
    run: Run,
    model: Weights,
    experts: Mapping[str, ExpertPass],
    *,
    class_token: bool = False,
    sublayers: bool = False,
    attribution: bool = False,
) -> dict[str, TaskDrift]:
    """The drift of a model from experts whose passes are at hand, taken apart layer by layer (Prop. 1).

    Each layer runs three times per task: the expert on its own features, the model on its own, and the model
    on the expert's, which is what separates mismatch from propagation. One sample per task does so a second time,
    in float64 and by other means (`SecondRun`): the residuals say how far the two computations are apart.
    """
    records = {task: _Record(class_token, attribution) for task in experts}
    with walking(run.adapter):
        second = SecondRun(run.adapter, run.head, experts, run.compute.device, sublayers)
        for crossing in cross(run, model, experts, sublayers):
            records[crossing.task].add(crossing, second.states(crossing) if crossing.position == 0 else None)
    return {task: record.result(task, experts[task].indices) for task, record in records.items()}


def follow(run: Run, model: Weights, experts: Mapping[str, ExpertPass]) -> dict[str, TaskFeatures]:
    """How far the features drift, and the final ones, not why: the numbers of `decompose` over all tokens and whole
    blocks, without its run of the model on the expert's features."""
    norms: dict[str, dict[str, list[tuple[Tensor, Tensor]]]] = {task: {} for task in experts}
    final: dict[str, list[tuple[Tensor, Tensor]]] = {task: [] for task in experts}
    with walking(run.adapter):
        for crossing in cross(run, model, experts):
            expert, reached = (state.flatten(1).double() for state in crossing.after)
            measured = (reached - expert).norm(dim=1), expert.norm(dim=1)
            norms[crossing.task].setdefault(crossing.layer, []).append(measured)
            if crossing.layer == LAST_LAYER:
                final[crossing.task].append(crossing.after)
    found = {}
    for task, layers in norms.items():
        drifts = tuple(FeatureDrift(layer, *_joined(batches)) for layer, batches in layers.items())
        own, reached = _features(task, final[task])
        found[task] = TaskFeatures(task, drifts, own, reached, experts[task].indices)
    return found


@dataclass(frozen=True)
class _Parts:
    """Drift through one layer taken apart, one row of float64 per sample."""

    expert: Float[Tensor, "n d"]
    e: Float[Tensor, "n d"]
    m: Float[Tensor, "n d"]
    p: Float[Tensor, "n d"]
    incoming: Float[Tensor, "n d"] | None
    """e before the layer; None where the layer has no skip connection."""

    @property
    def r(self) -> Float[Tensor, "n d"] | None:
        """What the residual branch answers to the incoming drift (Eq. 28)."""
        return None if self.incoming is None else self.p - self.incoming


@dataclass
class _Record:
    """Collects one task's layers batch by batch."""

    class_token: bool
    attribution: bool
    numbers: dict[str, list[dict[str, Tensor]]] = field(default_factory=dict)
    residuals: dict[str, tuple[Tensor, Tensor | None]] = field(default_factory=dict)
    contributions: list[Contributions] = field(default_factory=list)
    final: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def add(self, crossing: Crossing, second: SecondStates | None) -> None:
        """One batch through one layer. The very first layer has no drift before it: all of its drift is mismatch.

        Args:
            second: the same layer computed another way for one sample of the batch.
        """
        before, (expert, model), on_expert = crossing.before, crossing.after, crossing.on_expert()
        parts = self._parts((expert, on_expert, model), before if crossing.skip else None)
        self.numbers.setdefault(crossing.layer, []).append(_measured(parts))
        if second is not None:
            again = self._parts(
                (second.expert, second.on_expert, second.model), second.before if crossing.skip else None
            )
            self.residuals[crossing.layer] = _residuals(parts, again, second.row)
        if self.attribution:
            if crossing.run is None or before is None:
                self.contributions.append(Contributions.first(expert, model))
            else:
                self.contributions[crossing.position].step(crossing.run, before, (expert, on_expert, model))
        if crossing.layer == LAST_LAYER:
            self.final.append(crossing.after)

    def _parts(self, after: tuple[Tensor, Tensor, Tensor], before: tuple[Tensor, Tensor] | None) -> _Parts:
        """Args: `after` is the expert's state, the model's layer on the expert's state, the model's own state."""
        expert, on_expert, model = (self._state(state) for state in after)
        incoming = None if before is None else self._state(before[1] - before[0])
        return _Parts(expert, model - expert, on_expert - expert, model - on_expert, incoming)

    def _state(self, state: Tensor) -> Tensor:
        chosen = state[:, :1] if self.class_token and state.ndim == 3 else state
        return chosen.flatten(1).double()

    def result(self, task: str, indices: tuple[int, ...]) -> TaskDrift:
        layers = []
        for layer, batches in self.numbers.items():
            numbers = dict(zip(batches[0], _joined([tuple(batch.values()) for batch in batches]), strict=True))
            response, (residual, skip) = numbers.pop("response", None), self.residuals[layer]
            layers.append(LayerDrift(layer, **numbers, residual=residual, response=response, skip_residual=skip))
        expert, model = _features(task, self.final)
        booked = None
        if self.attribution:
            inner, norm, telescoped, quality = (
                torch.cat(parts, dim=1).double().cpu()
                for parts in zip(*(one.book() for one in self.contributions), strict=True)
            )
            booked = Attribution(inner, norm, telescoped, quality, (model - expert).double().square().sum(1))
        return TaskDrift(task, tuple(layers), expert, model, indices, booked)


def _measured(parts: _Parts) -> dict[str, Tensor]:
    """The numbers of one layer, one per sample."""
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


def _residuals(parts: _Parts, again: _Parts, row: int) -> tuple[Tensor, Tensor | None]:
    """How far m or p, and r, of the sample in `row` are from a second computation, relative to its drift."""
    only = slice(row, row + 1)
    scale = parts.e[only].norm(dim=1)
    apart = torch.maximum((parts.m[only] - again.m).norm(dim=1), (parts.p[only] - again.p).norm(dim=1))
    r, second_r = parts.r, again.r
    response = None if r is None or second_r is None else _relative((r[only] - second_r).norm(dim=1), scale)
    return _relative(apart, scale), response


def _joined(batches: Iterable[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """Batches below each other, on the CPU."""
    return tuple(torch.cat(parts).cpu() for parts in zip(*batches, strict=True))


def _features(task: str, batches: Iterable[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """The expert's and the model's final features; NumericalError if they are not finite."""
    features = _joined(batches)
    if not all(bool(torch.isfinite(one).all()) for one in features):
        raise NumericalError(f"task '{task}': final features are not finite")
    return features


def _cosine(left: Tensor, right: Tensor, norms: Tensor) -> Tensor:
    """Per row; `norms` are the products of theirs."""
    cosine: Tensor = (left * right).sum(1) / norms.clamp_min(torch.finfo(norms.dtype).tiny)
    return cosine


def _relative(rest: Tensor, scale: Tensor) -> Tensor:
    """`rest` over `scale` on the CPU: 0 where nothing is left, finite where there is no scale."""
    return (rest / scale.clamp_min(TINY)).cpu()

"""Propositions 1, 2 and 4: the drift of a model from its experts, layer by layer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float
from torch import Tensor

from featcal.drift.ledger import Attribution, DriftLedger, FeatureDrift, LayerDrift, TaskDrift, TaskFeatures
from featcal.drift.output import output_drift
from featcal.drift.propagation import TINY, Contributions
from featcal.drift.second_run import SecondRun, SecondStates
from featcal.drift.streams import LAST_LAYER, Crossing, cross
from featcal.errors import InputError, NumericalError
from featcal.evaluation.judges import judges
from featcal.family import Calibrated, Family, as_family
from featcal.formats.weights import Weights
from featcal.models.adapter import walking
from featcal.models.lane import ExpertPass
from featcal.models.run import Run
from featcal.progress import Progress, silent
from featcal.suite import Suite

BATCH_SIZE = 64
TOKENS = ("all", "class")


def measure_drift(
    suite: Suite | Family,
    model: str | Weights | Calibrated = "merged",
    *,
    samples: int = 64,
    split: str | None = None,
    seed: int = 42,
    tokens: str = "all",
    sublayers: bool = False,
    attribution: bool = False,
    output: bool = False,
    device: str = "auto",
    progress: Progress = silent,
) -> DriftLedger:
    """Decompose the drift of a model of the suite, layer by layer and task by task.

    Args:
        model: "merged", "base", a checkpoint folder, a `CalibrationResult`, or weights.
        samples: per task; a task that has fewer gives all it has.
        split: "calibration", "validation" or "test"; None takes validation where every task has it, since
            calibrated models have seen the calibration samples.
        tokens: "all", or "class" to take every norm over the class token alone.
        sublayers: measure attention and MLP of every block as layers of their own (Prop. 4 per sublayer).
        attribution: also book the final drift to the layers (Prop. 2), at several times the cost.
        output: also measure scores, losses and margins (Props. 3 and 7, Eq. 44); needs labels and a head.

    Raises:
        InputError: a model that does not fit the suite, or samples that are missing or not finite.
    """
    if tokens not in TOKENS:
        raise InputError(f"tokens is one of {', '.join(TOKENS)}, not '{tokens}'")
    family = as_family(suite, device)
    weights = family.model(model)
    split = split or family.suite.measured_split
    drawn = {task: family.samples(task, split, samples, seed) for task in family.suite.tasks}
    judged = judges(family, weights, drawn) if output else {}
    passes = {task: family.expert_pass(one, BATCH_SIZE) for task, one in drawn.items()}
    label = model if isinstance(model, str) else weights.label
    if tokens == "class" and not family.adapter.class_token:
        raise InputError(f"tokens: a {family.adapter.family} model has no class token; take 'all'")
    tasks = decompose(
        family.run(progress),
        weights,
        passes,
        class_token=tokens == "class",
        sublayers=sublayers,
        attribution=attribution,
    )
    for task, judge in judged.items():
        found = output_drift(tasks[task].expert_features, tasks[task].model_features, *judge)
        tasks[task] = replace(tasks[task], output=found)
    return DriftLedger(family.suite.name, label, split, tasks)


def decompose(
    run: Run,
    model: Weights,
    experts: Mapping[str, ExpertPass],
    *,
    class_token: bool = False,
    sublayers: bool = False,
    attribution: bool = False,
) -> dict[str, TaskDrift]:
    """The measurement behind `measure_drift`, on expert passes at hand.

    Each layer runs three times per task: the expert on its own features, the model on its own, and the model
    on the expert's, which is what separates mismatch from propagation. One sample per task does so a second time,
    in float64 and by other means (`SecondRun`): the residuals say how far the two computations are apart.
    """
    records = {task: _Record(class_token, attribution) for task in experts}
    with walking(run.adapter):
        second = SecondRun(run, experts, sublayers)
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

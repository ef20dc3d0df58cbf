"""Propositions 1, 2 and 4 in one walk over the layers: embeddings, every block, final norm and projection."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from featcal.drift.heads import judges
from featcal.drift.ledger import Attribution, DriftLedger, LayerDrift, TaskDrift
from featcal.drift.output import output_drift
from featcal.drift.propagation import Contributions, Layer
from featcal.errors import InputError, NumericalError
from featcal.family import Calibrated, Family, as_family
from featcal.models.adapter import Adapter, Batch, Block, Call, Stage
from featcal.models.compute import Compute, computing
from featcal.models.expert_pass import ExpertPass, first_calls
from featcal.models.weights import Weights
from featcal.progress import Progress, keep_memory, silent
from featcal.suite import Suite

FIRST_LAYER, LAST_LAYER = "embeddings", "head"
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
    split = split or ("validation" if "validation" in family.suite.splits() else "calibration")
    drawn = {task: family.samples(task, split, samples, seed) for task in family.suite.tasks}
    judged = judges(family, weights, drawn) if output else {}
    passes = {task: family.expert_pass(one, BATCH_SIZE) for task, one in drawn.items()}
    label = model if isinstance(model, str) else weights.label
    if tokens == "class" and not family.adapter.class_token:
        raise InputError(f"tokens: a {family.adapter.family} model has no class token; take 'all'")
    tasks = decompose(
        family.adapter,
        weights,
        family.head(),
        passes,
        family.compute,
        progress,
        class_token=tokens == "class",
        sublayers=sublayers,
        attribution=attribution,
    )
    for task, judge in judged.items():
        found = output_drift(tasks[task].expert_features, tasks[task].model_features, *judge)
        tasks[task] = replace(tasks[task], output=found)
    return DriftLedger(family.suite.name, label, split, tasks)


@torch.no_grad()
@computing
def decompose(
    adapter: Adapter,
    model: Weights,
    head: Mapping[str, Tensor],
    experts: Mapping[str, ExpertPass],
    compute: Compute,
    progress: Progress = silent,
    *,
    class_token: bool = False,
    sublayers: bool = False,
    attribution: bool = False,
) -> dict[str, TaskDrift]:
    """The walk behind `measure_drift`, on expert passes at hand.

    Each block runs three times per task: the expert on its own features, the model on its own, and the model
    on the expert's, which is what separates mismatch from propagation.
    """
    keep_memory()
    records = {task: _Record(class_token, attribution) for task in experts}
    streams: dict[str, list[Call]] = {}
    names = iter(adapter.block_layers())
    total, done = len(adapter.blocks()), 0
    for stage in adapter.stages:
        outer = compute.place(model.read(stage.outer))
        for task, expert in experts.items():
            upstream = streams.get(task)
            before = list(expert.calls()), upstream or []
            expert.start(stage)
            streams[task] = list(first_calls(stage, outer, expert.batches, upstream))
            after = list(expert.calls()), streams[task]
            records[task].enter(adapter, stage, outer, expert.batches, before, after)
        for block in stage.blocks:
            progress("measuring drift", done, total)
            tensors, layer, done = block.local(compute.place(model.read(block.names))), next(names), done + 1
            for task, expert in experts.items():
                stored = expert.tensors(block)
                own = compute.place(stored)
                for position, trace in enumerate(expert.walk(stage, block, stored)):
                    call, batch = streams[task][position], expert.batches[position]
                    walked = _Walked(stage, block, batch, (own, tensors), (trace.call, call), trace.after)
                    parts = walked.parts(layer, sublayers)
                    records[task].chain(position, parts, stage.state(trace.call, batch), walked.model_state)
                    streams[task][position] = walked.model_after()
    closing = compute.place(model.read(adapter.closing)) | dict(head)
    for task, expert in experts.items():
        own = compute.place(expert.weights.read(adapter.closing)) | dict(head)
        records[task].close(adapter, (own, closing), expert.batches, (list(expert.calls()), streams[task]))
    progress("measuring drift", total, total)
    return {task: record.result(task, experts[task].indices) for task, record in records.items()}


def _first_layer(adapter: Adapter, stage: str) -> str:
    return FIRST_LAYER if len(adapter.stages) == 1 else f"{stage} {FIRST_LAYER}"


@dataclass(frozen=True)
class _Part:
    """A residual layer of the chain: a block, or one part of it, of the expert and of the model."""

    name: str
    expert: Layer
    model: Layer


@dataclass
class _Walked:
    """One block on one batch: `tensors` and `calls` are the expert's and the model's."""

    stage: Stage
    block: Block
    batch: Batch
    tensors: tuple[Mapping[str, Tensor], Mapping[str, Tensor]]
    calls: tuple[Call, Call]
    expert_after: Call
    _model_after: Call | None = None

    def __post_init__(self) -> None:
        self.model_state = self.stage.state(self.calls[1], self.batch)

    def model_after(self) -> Call:
        """The model's call of the next block, on its own state."""
        if self._model_after is None:  # its parts were run, not the block itself
            self._run_model(self.model_state)
        assert self._model_after is not None
        return self._model_after

    def _run_model(self, state: Tensor) -> Tensor:
        call = self.stage.with_state(self.calls[1], state)
        after = self.stage.advance(call, self.block.run(self.tensors[1], call))
        if state is self.model_state:
            self._model_after = after
        return self.stage.state(after, self.batch)

    def parts(self, layer: str, sublayers: bool) -> list[_Part]:
        """What the ledger calls layers inside the block."""
        if not sublayers:
            return [_Part(layer, lambda _: self.stage.state(self.expert_after, self.batch), self._run_model)]
        own, model = (
            self.stage.sublayers(self.block, tensors, call)
            for tensors, call in zip(self.tensors, self.calls, strict=True)
        )
        return [_Part(f"{layer} {name}", self._masked(run), self._masked(model[name])) for name, run in own.items()]

    def _masked(self, run: Layer) -> Layer:
        def masked(state: Tensor) -> Tensor:
            return self.stage.state(self.stage.with_state(self.calls[1], run(state)), self.batch)

        return masked


@dataclass
class _Record:
    """Collects one task's layers batch by batch."""

    class_token: bool
    attribution: bool
    parts: dict[str, list[dict[str, Tensor]]] = field(default_factory=dict)
    contributions: list[Contributions] = field(default_factory=list)
    expert_features: list[Tensor] = field(default_factory=list)
    model_features: list[Tensor] = field(default_factory=list)

    def enter(
        self,
        adapter: Adapter,
        stage: Stage,
        outer: Mapping[str, Tensor],
        batches: Sequence[Batch],
        before: tuple[Sequence[Call], Sequence[Call]],
        after: tuple[Sequence[Call], Sequence[Call]],
    ) -> None:
        """The layer in front of a stage: embeddings, and for a later stage what leads over to it.

        The very first layer has no drift before it: all of its drift is local mismatch.

        Args:
            outer: the model's tensors for the stage's first call.
            before, after: the expert's and the model's calls, one per batch; `before` is empty for the first stage.
        """
        position_of_stage = adapter.stages.index(stage)
        for position, (batch, own, call) in enumerate(zip(batches, *after, strict=True)):
            expert, model = stage.state(own, batch), stage.state(call, batch)
            if position_of_stage == 0:
                self._measure(_first_layer(adapter, stage.name), (expert, model, model), None)
                if self.attribution:
                    self.contributions.append(Contributions.first(expert, model))
                continue
            upper, ended = adapter.stages[position_of_stage - 1], before[1][position]

            def lead_over(state: Tensor, upper: Stage = upper, ended: Call = ended, batch: Batch = batch) -> Tensor:
                return stage.state(stage.first_call(outer, batch, upper.with_state(ended, state)), batch)

            arrived = upper.state(before[0][position], batch), upper.state(ended, batch)
            states = (expert, lead_over(arrived[0]), model)
            self.step(_first_layer(adapter, stage.name), position, lead_over, arrived, states, skip=False)

    def chain(self, position: int, parts: Sequence[_Part], expert: Tensor, model: Tensor) -> None:
        """One batch through residual layers that follow each other, from the states before them."""
        for part in parts:
            after = (part.expert(expert), part.model(expert), part.model(model))
            self.step(part.name, position, part.model, (expert, model), after, skip=True)
            expert, _, model = after

    def step(
        self,
        layer: str,
        position: int,
        run: Layer,
        before: tuple[Tensor, Tensor],
        after: tuple[Tensor, Tensor, Tensor],
        skip: bool,
    ) -> None:
        """One batch through one layer.

        Args:
            before: expert's and model's states before the layer.
            after: expert's state, the model's layer on the expert's state before, the model's own state.
            skip: the layer has a skip connection around all of it.
        """
        self._measure(layer, after, before[1] - before[0] if skip else None)
        if self.attribution:
            self.contributions[position].step(run, before, after)

    def close(
        self,
        adapter: Adapter,
        tensors: tuple[Mapping[str, Tensor], Mapping[str, Tensor]],
        batches: Sequence[Batch],
        calls: tuple[Sequence[Call], Sequence[Call]],
    ) -> None:
        """The last layer: final norm and projection, which has no skip connection; expert's and model's."""
        stage = adapter.stages[-1]
        for position, (batch, expert_call, call) in enumerate(zip(batches, *calls, strict=True)):

            def run(state: Tensor, call: Call = call, batch: Batch = batch) -> Tensor:
                return adapter.final(tensors[1], stage.with_state(call, state), batch)

            before = stage.state(expert_call, batch), stage.state(call, batch)
            expert, features = adapter.final(tensors[0], expert_call, batch), run(before[1])
            self.step(LAST_LAYER, position, run, before, (expert, run(before[0]), features), skip=False)
            self.expert_features.append(expert)
            self.model_features.append(features)

    def _measure(self, layer: str, after: tuple[Tensor, Tensor, Tensor], incoming: Tensor | None) -> None:
        expert, on_expert, model = (self._state(state) for state in after)
        e, m, p = model - expert, on_expert - expert, model - on_expert
        drift, mismatch, propagation = e.norm(dim=1), m.norm(dim=1), p.norm(dim=1)
        numbers = {
            "drift": drift,
            "mismatch": mismatch,
            "propagation": propagation,
            "expert_norm": expert.norm(dim=1),
            "alignment": _cosine(m, p),
            "residual": _relative(e - (m + p), drift),
        }
        if incoming is not None:
            before = self._state(incoming)
            r = p - before
            numbers |= {"response": _cosine(r, before), "skip_residual": _relative(e - (before + r + m), drift)}
        self.parts.setdefault(layer, []).append(numbers)

    def _state(self, state: Tensor) -> Tensor:
        chosen = state[:, :1] if self.class_token and state.ndim == 3 else state
        return chosen.flatten(1).double()

    def result(self, task: str, indices: tuple[int, ...]) -> TaskDrift:
        layers = []
        for layer, batches in self.parts.items():
            numbers = {name: torch.cat([batch[name] for batch in batches]).cpu() for name in batches[0]}
            response, skip_residual = numbers.pop("response", None), numbers.pop("skip_residual", None)
            layers.append(LayerDrift(layer, **numbers, response=response, skip_residual=skip_residual))
        expert, model = torch.cat(self.expert_features).cpu(), torch.cat(self.model_features).cpu()
        if not bool(torch.isfinite(model).all() and torch.isfinite(expert).all()):
            raise NumericalError(f"task '{task}': final features are not finite")
        booked = None
        if self.attribution:
            inner, norm, telescoped, quality = (
                torch.cat(parts, dim=1).double().cpu()
                for parts in zip(*(one.book() for one in self.contributions), strict=True)
            )
            booked = Attribution(inner, norm, telescoped, quality, (model - expert).double().square().sum(1))
        return TaskDrift(task, tuple(layers), expert, model, indices, booked)


def _cosine(left: Tensor, right: Tensor) -> Tensor:
    scale = (left.norm(dim=1) * right.norm(dim=1)).clamp_min(torch.finfo(left.dtype).tiny)
    cosine: Tensor = (left * right).sum(1) / scale
    return cosine


def _relative(rest: Tensor, scale: Tensor) -> Tensor:
    relative: Tensor = rest.norm(dim=1) / scale.clamp_min(torch.finfo(scale.dtype).tiny)
    return relative

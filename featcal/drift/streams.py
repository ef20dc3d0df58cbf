"""Expert and model side by side through every layer: embeddings, every block, final norm and projection."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from featcal.drift.propagation import Layer
from featcal.formats.weights import Weights
from featcal.models.adapter import Adapter, Batch, Block, Call, Stage
from featcal.models.compute import Compute
from featcal.models.expert_pass import Entrance, ExpertPass
from featcal.models.run import Run

FIRST_LAYER, LAST_LAYER = "embeddings", "head"


@dataclass(frozen=True)
class Place:
    """Where in a model a layer is."""

    stage: Stage
    block: Block | None
    """None in front of a stage and after the last one."""
    tensors: tuple[Mapping[str, Tensor], Mapping[str, Tensor]]
    """The layer's tensors as they are stored, the expert's and the model's; of a block by names inside it."""


@dataclass(frozen=True)
class Crossing:
    """One batch of one task through one layer, on both streams."""

    task: str
    position: int
    """Of the batch among the task's."""
    layer: str
    run: Layer | None
    """The model's layer on any state before it; None for the first one, which starts from the sample."""
    before: tuple[Tensor, Tensor] | None
    """Expert's and model's states before the layer; None for the first one."""
    after: tuple[Tensor, Tensor]
    """Their states after it; after the last layer the final features."""
    skip: bool
    """Whether the layer has a skip connection around all of it."""
    place: Place

    def on_expert(self) -> Tensor:
        """The model's layer on the expert's state: what separates mismatch from propagation, for one more run."""
        return self.after[1] if self.run is None or self.before is None else self.run(self.before[0])


def cross(run: Run, model: Weights, experts: Mapping[str, ExpertPass], sublayers: bool = False) -> Iterator[Crossing]:
    """Every layer in forward order, for each of them every task, for each task every batch; sublayers of a block come
    together, batch by batch. To be walked inside `walking`.

    Args:
        sublayers: attention and MLP of every block are layers of their own.
    """
    adapter, compute, progress = run.adapter, run.compute, run.progress
    streams: dict[str, list[Call]] = {}
    names = iter(adapter.block_layers())
    total, done = len(adapter.blocks()), 0
    for stage in adapter.stages:
        yield from _enter(adapter, Entrance(stage, model.read(stage.outer), compute), experts, streams)
        for block in stage.blocks:
            progress("measuring drift", done, total)
            read, layer, done = block.local(model.read(block.names)), next(names), done + 1
            tensors = compute.place(read)
            for task, expert in experts.items():
                stored = expert.tensors(block)
                theirs = compute.place(stored) if sublayers else {}
                place = Place(stage, block, (stored, read))
                for position, trace in enumerate(expert.walk(stage, block, stored)):
                    call, batch = streams[task][position], expert.batches[position]
                    states = stage.state(trace.call, batch), stage.state(call, batch)
                    to_call, to_state = _through(stage, block, tensors, call, batch)
                    streams[task][position] = following = to_call(states[1])
                    if not sublayers:
                        after = stage.state(trace.after, batch), stage.state(following, batch)
                        yield Crossing(task, position, layer, to_state, states, after, True, place)
                        continue
                    own = stage.sublayers(block, theirs, trace.call)
                    for name, part in stage.sublayers(block, tensors, call).items():
                        of_expert, of_model = (_masked(one, stage, call, batch) for one in (own[name], part))
                        after = of_expert(states[0]), of_model(states[1])
                        yield Crossing(task, position, f"{layer} {name}", of_model, states, after, True, place)
                        states = after
    yield from _close(adapter, model, run.head, experts, compute, streams)
    progress("measuring drift", total, total)


def _through(
    stage: Stage, block: Block, tensors: Mapping[str, Tensor], call: Call, batch: Batch
) -> tuple[Callable[[Tensor], Call], Layer]:
    """From a state before a block to the call of the next one, and to the state after it."""

    def to_call(state: Tensor) -> Call:
        on_state = stage.with_state(call, state)
        return stage.advance(on_state, block.run(tensors, on_state))

    def to_state(state: Tensor) -> Tensor:
        return stage.state(to_call(state), batch)

    return to_call, to_state


def _masked(part: Layer, stage: Stage, call: Call, batch: Batch) -> Layer:
    """A part of a block, with padding zeroed after it."""

    def masked(state: Tensor) -> Tensor:
        return stage.state(stage.with_state(call, part(state)), batch)

    return masked


def _enter(
    adapter: Adapter,
    entrance: Entrance,
    experts: Mapping[str, ExpertPass],
    streams: dict[str, list[Call]],
) -> Iterator[Crossing]:
    """The layer in front of a stage: embeddings, and for a later stage what leads over to it.

    Args:
        entrance: of the model.
        streams: its calls per task after the stage before, which the first calls of this one replace.
    """
    stage = entrance.stage
    number = adapter.stages.index(stage)
    layer = FIRST_LAYER if len(adapter.stages) == 1 else f"{stage.name} {FIRST_LAYER}"
    for task, expert in experts.items():
        own_before, before = list(expert.calls()), streams.get(task)
        expert.start(stage)
        streams[task] = list(expert.enter(entrance, before))
        place = Place(stage, None, (expert.weights.read(stage.outer), entrance.stored))
        for position, (batch, own, call) in enumerate(zip(expert.batches, expert.calls(), streams[task], strict=True)):
            after = stage.state(own, batch), stage.state(call, batch)
            if before is None:
                yield Crossing(task, position, layer, None, None, after, False, place)
                continue
            upper, ended = adapter.stages[number - 1], before[position]

            def lead_over(state: Tensor, upper: Stage = upper, ended: Call = ended, batch: Batch = batch) -> Tensor:
                return stage.state(stage.first_call(entrance.placed, batch, upper.with_state(ended, state)), batch)

            arrived = upper.state(own_before[position], batch), upper.state(ended, batch)
            yield Crossing(task, position, layer, lead_over, arrived, after, False, place)


def _close(
    adapter: Adapter,
    model: Weights,
    head: Mapping[str, Tensor],
    experts: Mapping[str, ExpertPass],
    compute: Compute,
    streams: Mapping[str, list[Call]],
) -> Iterator[Crossing]:
    """The last layer: final norm and projection, which has no skip connection."""
    stage = adapter.stages[-1]
    read = model.read(adapter.closing)
    closing = compute.place(read) | dict(head)
    for task, expert in experts.items():
        stored = expert.weights.read(adapter.closing)
        place = Place(stage, None, (stored, read))
        own = compute.place(stored) | dict(head)
        calls = zip(expert.batches, expert.calls(), streams[task], strict=True)
        for position, (batch, expert_call, call) in enumerate(calls):

            def run(state: Tensor, call: Call = call, batch: Batch = batch) -> Tensor:
                return adapter.final(closing, stage.with_state(call, state), batch)

            before = stage.state(expert_call, batch), stage.state(call, batch)
            after = adapter.final(own, expert_call, batch), run(before[1])
            yield Crossing(task, position, LAST_LAYER, run, before, after, False, place)

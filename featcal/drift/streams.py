"""Run expert and model side by side through every layer: embeddings, every block, final norm and projection."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from featcal.drift.propagation import Layer
from featcal.formats.weights import Weights
from featcal.models.adapter import LAST_LAYER, Adapter, Batch, Block, Call, Stage
from featcal.models.context import Run
from featcal.models.lane import BlockStep, ExpertPass, run_block
from featcal.models.model import map_features, task_weights
from featcal.models.walk import BlockwiseForward, StageInputs

MODEL = "model"
"""Name of the model's streams next to the experts'."""


States = tuple[Tensor, Tensor]
"""States of the expert and of the model."""


@dataclass(frozen=True)
class LayerPlace:
    """The place of a layer in a model."""

    stage: Stage
    block: Block | None
    """The layer's block; None for the layer before a stage and the one after the last block."""
    tensors: tuple[Mapping[str, Tensor], Mapping[str, Tensor]]
    """The layer's tensors as they are stored, the expert's and the model's; names inside the block for a block."""


@dataclass(frozen=True, kw_only=True)
class LayerTransition:
    """One batch of one task through one layer, on both streams."""

    task: str
    position: int
    """Position of the batch among the batches of the task."""
    layer: str
    run: Layer | None
    """The model's layer as a function of a state; None for the first layer, which starts from the sample."""
    before: States | None
    """Expert's and model's states before the layer; None for the first layer."""
    after: States
    """Expert's and model's states after the layer; after the last layer the final features."""
    skip: bool
    """True if the layer has a skip connection around all of it."""
    place: LayerPlace

    @property
    def incoming(self) -> tuple[Tensor, Tensor] | None:
        """Return the states before a layer with a skip connection; None for others."""
        return self.before if self.skip else None

    def run_on_expert(self) -> Tensor:
        """Return the model's layer on the expert's state, which separates mismatch from propagation."""
        return self.after[1] if self.run is None or self.before is None else self.run(self.before[0])


class BlockTensors:
    """The tensors of the block that was requested last, read once for all tasks that share them."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._of: tuple[Block, Weights] | None = None
        self._held: tuple[dict[str, Tensor], dict[str, Tensor]] = {}, {}

    def read(self, block: Block, weights: Weights) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return a model's tensors of a block, as they are stored and as the forward takes them, by names inside."""
        if self._of is None or self._of[0] is not block or self._of[1] is not weights:
            self._held = {}, {}  # before the next ones are read
            stored = block.local(weights.read(block.names))
            self._of, self._held = (block, weights), (stored, self._run.compute.place(stored))
        return self._held

    def read_placed(self, block: Block, weights: Weights) -> dict[str, Tensor]:
        """Return a model's tensors of a block as the forward takes them, by names inside."""
        return self.read(block, weights)[1]


def cross(
    run: Run, model: Weights, experts: Mapping[str, ExpertPass], sublayers: bool = False
) -> Iterator[LayerTransition]:
    """Yield every batch of every task at every layer, in forward order of the layers; use it inside `walking`. The
    sublayers of a block are yielded one after the other for a batch, before the next batch.

    Args:
        sublayers: whether attention and MLP of every block are layers of their own.
    """
    walk = BlockwiseForward(run, "measuring drift", experts, {MODEL: model})
    names, held = iter(run.adapter.block_layers()), BlockTensors(run)
    for stage in run.adapter.stages:
        for entering in walk.entering(stage):
            yield _enter_stage(run.adapter, stage, experts[entering.task], entering)
        for _, block in walk.blocks(stage):
            layer = next(names)
            for task, stored in walk.experts_at(block):
                own_weights = task_weights(model, task)
                read, tensors = held.read(block, own_weights)
                place, one = LayerPlace(stage, block, (stored, read)), experts[task]
                again = partial(held.read_placed, block, own_weights)
                theirs = run.compute.place(stored) if sublayers else {}
                lanes = (
                    walk.experts[task].walk(stage, block, stored),
                    walk.lanes[MODEL][task].walk(stage, block, tensors),
                )
                for position, (own, step) in enumerate(zip(*lanes, strict=True)):
                    both = _Both(task, position, layer, own, step, one.batches[position], place, again)
                    yield from both.sublayers(theirs) if sublayers else [both.whole()]
    yield from _close(run, model, experts, walk)
    walk.finish()


@dataclass(frozen=True)
class _Both:
    """One batch of a task after it passed a block on both streams."""

    task: str
    position: int
    layer: str
    expert: BlockStep
    model: BlockStep
    batch: Batch
    place: LayerPlace
    tensors: Callable[[], Mapping[str, Tensor]]
    """Reads the model's tensors of the block, placed; so a layer that is used long after the walk holds none."""

    def whole(self) -> LayerTransition:
        """Return the transition of the model through the whole block."""
        # What the layer holds stays in memory as long as it: neither this object nor its place.
        stage, block, batch, call, tensors = self.place.stage, self._block, self.batch, self.model.call, self.tensors

        def layer(state: Tensor) -> Tensor:
            return stage.state(run_block(stage, block, tensors(), stage.with_state(call, state)), batch)

        after = stage.state(self.expert.after, batch), stage.state(self.model.after, batch)
        return self._crossing(self.layer, layer, self._states_before, after)

    def sublayers(self, theirs: Mapping[str, Tensor]) -> Iterator[LayerTransition]:
        """Yield the transitions through the block's residual parts, with the expert's tensors and the model's."""
        stage, block, states = self.place.stage, self._block, self._states_before
        for name in stage.sublayers(block, theirs):
            of_expert = _layer(stage, block, name, lambda: theirs, self.expert.call, self.batch)
            of_model = _layer(stage, block, name, self.tensors, self.model.call, self.batch)
            after = of_expert(states[0]), of_model(states[1])
            yield self._crossing(f"{self.layer} {name}", of_model, states, after)
            states = after

    def _crossing(self, name: str, layer: Layer, before: States, after: States) -> LayerTransition:
        return LayerTransition(
            task=self.task,
            position=self.position,
            layer=name,
            run=layer,
            before=before,
            after=after,
            skip=before[0].shape == after[0].shape,  # a merger of patches gives states of another form
            place=self.place,
        )

    @property
    def _block(self) -> Block:
        assert self.place.block is not None
        return self.place.block

    @property
    def _states_before(self) -> tuple[Tensor, Tensor]:
        state = self.place.stage.state
        return state(self.expert.call, self.batch), state(self.model.call, self.batch)


def _layer(
    stage: Stage, block: Block, name: str, tensors: Callable[[], Mapping[str, Tensor]], call: Call, batch: Batch
) -> Layer:
    """Return a residual part of a block as a function from state to state, with padding zeroed after it.

    Args:
        call: of the whole block.
    """

    def layer(state: Tensor) -> Tensor:
        return stage.state(stage.sublayers(block, tensors())[name](stage.with_state(call, state)), batch)

    return layer


def _enter_stage(adapter: Adapter, stage: Stage, one: ExpertPass, entering: StageInputs) -> LayerTransition:
    """Return the transition into a stage: embeddings, and for a later stage also the connection from the previous
    stage.

    Args:
        one: the task's samples.
    """
    batch, own, entry = one.batches[entering.position], entering.expert, entering.models[MODEL]
    front = entering.fronts[MODEL]
    first = LayerTransition(
        task=entering.task,
        position=entering.position,
        layer=adapter.first_layer(stage),
        run=None,
        before=None,
        after=(stage.state(own.first, batch), stage.state(entry.first, batch)),
        skip=False,
        place=LayerPlace(stage, None, (entering.front.stored, front.stored)),
    )
    if own.ended is None or entry.ended is None:
        return first
    upper, ended = adapter.stages[adapter.stages.index(stage) - 1], entry.ended

    def lead_over(state: Tensor) -> Tensor:
        return stage.state(stage.first_call(front.placed_tensors, batch, upper.with_state(ended, state)), batch)

    return replace(first, run=lead_over, before=(upper.state(own.ended, batch), upper.state(ended, batch)))


def _close(
    run: Run, model: Weights, experts: Mapping[str, ExpertPass], walk: BlockwiseForward
) -> Iterator[LayerTransition]:
    """Yield the transitions through the last layer: final norm, projection and the model's map for the task, if it has
    one."""
    adapter, place_on = run.adapter, run.compute.place
    stage, read = adapter.stages[-1], model.read(adapter.closing)
    closing = place_on(read) | dict(run.head)
    for task, one in experts.items():
        stored = one.weights.read(adapter.closing)
        place, own = LayerPlace(stage, None, (stored, read)), place_on(stored) | dict(run.head)
        calls = zip(one.batches, walk.experts[task].calls, walk.lanes[MODEL][task].calls, strict=True)
        for position, (batch, expert_call, call) in enumerate(calls):
            # Defaults bind the values of this turn of the loop: the layer may be run after the next one has begun.
            def layer(state: Tensor, task: str = task, call: Call = call, batch: Batch = batch) -> Tensor:
                return map_features(model, task, adapter.final(closing, stage.with_state(call, state), batch))

            before = stage.state(expert_call, batch), stage.state(call, batch)
            after = map_features(one.weights, task, adapter.final(own, expert_call, batch)), layer(before[1])
            yield LayerTransition(
                task=task,
                position=position,
                layer=LAST_LAYER,
                run=layer,
                before=before,
                after=after,
                skip=False,
                place=place,
            )

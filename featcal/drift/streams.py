"""Walk expert and model side by side through every layer: embeddings, every block, final norm and projection."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from featcal.drift.propagation import Layer
from featcal.formats.weights import Weights
from featcal.models.adapter import LAST_LAYER, Adapter, Batch, Block, Call, Stage, Sublayer
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
    """Position of the batch among the task's."""
    layer: str
    run: Layer | None
    """The model's layer on any state before it; None for the first one, which starts from the sample."""
    before: States | None
    """Expert's and model's states before the layer; None for the first one."""
    after: States
    """Their states after it; after the last layer the final features."""
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
    """The tensors of one block, read once for all tasks that share them."""

    def __init__(self, run: Run, block: Block) -> None:
        self._run, self._block = run, block
        self._of: Weights | None = None
        self._held: tuple[dict[str, Tensor], dict[str, Tensor]] = {}, {}

    def read(self, weights: Weights) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return a model's tensors of the block, as they are stored and in the form of the forward pass, by names
        inside."""
        if self._of is not weights:
            stored = self._block.local(weights.read(self._block.names))
            self._of, self._held = weights, (stored, self._run.compute.place(stored))
        return self._held


def cross(
    run: Run, model: Weights, experts: Mapping[str, ExpertPass], sublayers: bool = False
) -> Iterator[LayerTransition]:
    """Yield every batch of every task at every layer, in forward order of the layers; use it inside `walking`.

    For every batch, the sublayers of a block follow each other.

    Args:
        sublayers: whether attention and MLP of every block are layers of their own.
    """
    walk = BlockwiseForward(run, "measuring drift", experts, {MODEL: model})
    names = iter(run.adapter.block_layers())
    for stage in run.adapter.stages:
        for entering in walk.entering(stage):
            yield _enter_stage(run.adapter, stage, experts[entering.task], entering)
        for _, block in walk.blocks(stage):
            layer, own_block = next(names), BlockTensors(run, block)
            for task, stored in walk.experts_at(block):
                read, tensors = own_block.read(task_weights(model, task))
                place, one = LayerPlace(stage, block, (stored, read)), experts[task]
                theirs = run.compute.place(stored) if sublayers else {}
                lanes = (
                    walk.experts[task].walk(stage, block, stored),
                    walk.lanes[MODEL][task].walk(stage, block, tensors),
                )
                for position, (own, step) in enumerate(zip(*lanes, strict=True)):
                    both = _Both(task, position, layer, own, step, one.batches[position], place)
                    yield from both.sublayers(theirs, tensors) if sublayers else [both.whole(tensors)]
    yield from _close(run, model, experts, walk)
    walk.finish()


@dataclass(frozen=True)
class _Both:
    """One batch of a task that went through a block on both streams."""

    task: str
    position: int
    layer: str
    expert: BlockStep
    model: BlockStep
    batch: Batch
    place: LayerPlace

    def whole(self, tensors: Mapping[str, Tensor]) -> LayerTransition:
        """Return the transition of the model through the whole block; its tensors are on the device."""
        stage, block, batch = self.place.stage, self._block, self.batch

        def layer(state: Tensor) -> Tensor:
            return stage.state(run_block(stage, block, tensors, stage.with_state(self.model.call, state)), batch)

        after = stage.state(self.expert.after, batch), stage.state(self.model.after, batch)
        return self._crossing(self.layer, layer, self._states_before, after)

    def sublayers(self, theirs: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> Iterator[LayerTransition]:
        """Yield the transitions through the block's residual parts, with the expert's and the model's tensors."""
        stage, states = self.place.stage, self._states_before
        own = stage.sublayers(self._block, theirs)
        for name, part in stage.sublayers(self._block, tensors).items():
            of_expert = _layer(own[name], stage, self.expert.call, self.batch)
            of_model = _layer(part, stage, self.model.call, self.batch)
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


def _layer(part: Sublayer, stage: Stage, call: Call, batch: Batch) -> Layer:
    """Return a part of a block as a function from state to state, with padding zeroed after it.

    Args:
        call: of the whole block.
    """

    def layer(state: Tensor) -> Tensor:
        return stage.state(part(stage.with_state(call, state)), batch)

    return layer


def _enter_stage(adapter: Adapter, stage: Stage, one: ExpertPass, entering: StageInputs) -> LayerTransition:
    """Return the transition into a stage: embeddings, and for a later stage the connection from the stage before.

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

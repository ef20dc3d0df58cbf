"""Run one model on the batches of one task, block by block (a *lane*), and cache results for the next walk."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from featcal.formats.contents import inputs_digest
from featcal.formats.weights import Weights
from featcal.models.activations import ActivationStore
from featcal.models.adapter import Batch, Block, Call, Stage
from featcal.models.capture import capture_inputs, capture_outputs
from featcal.models.compute import Compute
from featcal.models.model import task_weights
from featcal.system.errors import InputError
from featcal.system.progress import Timing, available_bytes


@dataclass(frozen=True)
class BlockStep:
    """One batch through one block of a lane."""

    call: Call
    """Arguments of the block."""
    after: Call
    """Arguments of the next block."""
    inputs: Mapping[str, Tensor]
    """Inputs of the requested linear maps, by name."""
    outputs: Mapping[str, Tensor]
    """Outputs, bias included, of the requested linear maps, by name."""


def run_block(stage: Stage, block: Block, tensors: Mapping[str, Tensor], call: Call) -> Call:
    """Return the call of the next block after one block of any model; every step of every lane calls this function.

    Args:
        tensors: the model's, placed, by name inside the block.

    Raises:
        InputError: torch lacks one of the block's operations on this device; the message names the block.
    """
    try:
        return stage.advance(call, block.run(tensors, call))
    except NotImplementedError as error:  # Apple's devices have not all of them
        device, (reason, *_) = call.hidden_state.device, str(error).splitlines() or [""]
        raise InputError(f"{block.name} cannot be computed on {device} ({reason}); use --device cpu") from error


class Sums(Protocol):
    """Sums over tasks that depend only on the models."""

    def tensors(self) -> Iterable[Tensor]:
        """Return all tensors in the sums."""


Thing = BlockStep | Call | Sums


class WalkCache:
    """Cache, limited in size, of results of one walk that the next walk reuses. It holds the first calls of every lane;
    for lanes whose model stays the same (the experts'), also all steps and sums of their weights. These depend on
    models and samples, not on lam, rho or alpha.

    Args:
        budget: size in bytes; blocks that do not fit are run again each time.
    """

    def __init__(self, budget: int) -> None:
        self.left = budget
        """Bytes that are still available."""
        self.checked: set[str] = set()
        """Tasks whose first batch was compared with the library's own forward."""
        self.spared = Timing()
        """Time saved by reuse: how long the reused results took to compute."""
        self.spared_bytes = 0
        """Bytes of reused results, as far as they were asked for; counted again at each reuse."""
        self._entries: dict[Hashable, tuple[Sequence[object], list[Any], Timing]] = {}

    @classmethod
    def from_device(cls, device: torch.device) -> WalkCache:
        """Return an empty cache of a quarter of the memory that the device can spare now."""
        free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_bytes()
        return cls((free or 2**32) // 4)

    def find(self, key: Hashable, made_of: Sequence[object]) -> list[Any] | None:
        """Return the results under a key, one per batch; None if they were computed from other objects."""
        of, things, _ = self._entries.get(key, ((), [], None))
        # By identity, so that nothing stale is found and no tensor has to be compared.
        same = len(of) == len(made_of) and all(one is other for one, other in zip(of, made_of, strict=True))
        return things if things and same else None

    @contextmanager
    def keeping(self, key: Hashable, made_of: Sequence[object], effort: Timing) -> Iterator[Callable[[Thing], None]]:
        """Collect results inside the `with`, and store them under a key in place of the old ones: all of them, or none
        if room runs out or the walk is interrupted.

        Args:
            effort: time that the results take to compute, complete when the `with` ends.
        """
        self._drop(key)
        things: list[Thing] = []
        fits = True

        def add(thing: Thing) -> None:
            nonlocal fits
            size = _bytes(thing)
            fits = fits and size <= self.left
            if fits:
                self.left -= size
                things.append(thing)
            else:
                give_back()

        def give_back() -> None:
            self.left += sum(map(_bytes, things))
            things.clear()

        try:
            yield add
        except BaseException:
            give_back()
            raise
        if things:
            self._drop(key)  # another lane of this name may have come first
            self._entries[key] = made_of, things, effort

    def spare(self, key: Hashable, asked: Iterable[Thing]) -> None:
        """Count the results under a key as reused.

        Args:
            asked: the results that would have been stored if there had been none.
        """
        self.spared.add(self._entries[key][2])
        self.spared_bytes += sum(map(_bytes, asked))

    def _drop(self, key: Hashable) -> None:
        _, things, _ = self._entries.pop(key, ((), [], None))
        self.left += sum(map(_bytes, things))


def _bytes(thing: Thing) -> int:
    """Return the bytes of every tensor that a result adds; a step's call is the `after` of
    the step before, and is not counted.
    """
    if isinstance(thing, BlockStep):
        known = {id(one) for one in _tensors(thing.call.tree())}
        added = [one for one in _tensors(thing.after.tree()) if id(one) not in known]
        parts: Iterable[Tensor] = (*added, *thing.inputs.values(), *thing.outputs.values())
    elif isinstance(thing, Call):
        parts = _tensors(thing.tree())
    else:
        parts = thing.tensors()
    # By identity: maps that share an input, such as q, k and v, hold one tensor.
    return sum(t.nbytes for t in {id(t): t for t in parts}.values())


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor)]


def _reduce(step: BlockStep, inputs: Collection[str], outputs: Collection[str]) -> BlockStep:
    """Return a step with only these inputs and outputs."""
    given, returned = ({n: of[n] for n in names} for of, names in ((step.inputs, inputs), (step.outputs, outputs)))
    return replace(step, inputs=given, outputs=returned)


@dataclass(frozen=True)
class StageEntrance:
    """Embeddings and first norm of one model: the part before the blocks of a stage."""

    stage: Stage
    stored: Mapping[str, Tensor]
    """Tensors as they are stored in files."""
    compute: Compute

    @classmethod
    def from_model(cls, stage: Stage, model: Weights, compute: Compute) -> StageEntrance:
        return cls(stage, model.read(stage.outer), compute)

    @cached_property
    def placed_tensors(self) -> dict[str, Tensor]:
        """Return the tensors as the forward takes them."""
        return self.compute.place(self.stored)


@dataclass(frozen=True)
class StageInput:
    """One batch before the blocks of a stage."""

    ended: Call | None
    """The call after the last block of the previous stage; None for the first stage."""
    first: Call
    """The call of block 0."""


class ModelStream:
    """One model on the batches of one task (a *lane*), with the call of the next block for every batch.

    Args:
        batches: shared by all lanes of the task.
        store: limits the memory of states between two blocks.
        kept: cache that is shared with earlier and later walks.
        name: of the lane in `kept`.
        fixed: whether the next walk has the same model, so that its steps are worth caching.
    """

    def __init__(
        self,
        weights: Weights,
        batches: Sequence[Batch],
        compute: Compute,
        store: ActivationStore,
        kept: WalkCache | None = None,
        name: str = "",
        fixed: bool = False,
    ) -> None:
        self.weights, self.batches, self.compute = weights, batches, compute
        self.calls = store.hold()
        """The call of the next block for every batch."""
        self._kept, self._name, self._fixed = kept, name, fixed

    def tensors(self, block: Block, modules: Collection[str] | None = None) -> dict[str, Tensor]:
        """Return the model's tensors of a block as they are stored, by name inside the block, on the compute device.

        Args:
            modules: names inside the block of those that are enough; None for all of it.
        """
        names = block.names if modules is None else block.names_of(modules)
        return block.local(self.compute.move(self.weights.read(names)))

    def enter(self, entrance: StageEntrance) -> Iterator[StageInput]:
        """Replace the calls by first calls of a stage, and yield the old and the new ones; consume it to the end."""
        if self._kept is None or (self.calls and not self._fixed):
            yield from self._enter(entrance)
            return
        key = self._name, self._fixed, entrance.stage.name
        made_of = self._key_objects() if self._fixed else [*entrance.stored.values(), *self.batches]
        found = self._kept.find(key, made_of)
        if found is not None:
            self._kept.spare(key, found)
            yield from self._enter(entrance, found)
            return
        effort = Timing()
        with self._kept.keeping(key, made_of, effort) as keep:
            for entry in effort.time_each(self._enter(entrance)):
                keep(entry.first)
                yield entry

    def _enter(self, entrance: StageEntrance, found: Sequence[Call] | None = None) -> Iterator[StageInput]:
        for position, batch in enumerate(self.batches):
            ended = self.calls[position] if position < len(self.calls) else None
            first = (
                entrance.stage.first_call(entrance.placed_tensors, batch, ended) if found is None else found[position]
            )
            self.calls.put(position, first)
            yield StageInput(ended, first)

    def walk(
        self,
        stage: Stage,
        block: Block,
        stored: Mapping[str, Tensor],
        inputs: Collection[str] = (),
        outputs: Collection[str] = (),
        move: bool = True,
    ) -> Iterator[BlockStep]:
        """Run every batch through a block, in order; consume it to the end before the next block.

        Args:
            stored: `tensors(block)`, or other tensors for this block, by name inside it.
            inputs, outputs: names of the linear maps (inputs also of norms) whose inputs or outputs are wanted.
            move: False keeps the lane before the block.
        """
        kept = self._kept if self._fixed and move else None
        if kept is None:
            yield from self._walk(stage, block, stored, inputs, outputs, move)
            return
        key = self._name, block.name
        made_of = self._key_objects()
        found = kept.find(key, made_of)
        if found is not None and set(inputs) <= found[0].inputs.keys() and set(outputs) <= found[0].outputs.keys():
            kept.spare(key, (_reduce(step, inputs, outputs) for step in found))
            for position, step in enumerate(found):
                self.calls.put(position, step.after)
                yield step
            return
        effort = Timing()
        with kept.keeping(key, made_of, effort) as keep:
            for step in effort.time_each(self._walk(stage, block, stored, inputs, outputs, move)):
                keep(step)
                yield step

    def pass_block(self, stage: Stage, block: Block, stored: Mapping[str, Tensor]) -> None:
        """Run every batch through a block without capturing anything.

        Args:
            stored: as in `walk`.
        """
        for _ in self.walk(stage, block, stored):
            pass

    def _key_objects(self) -> list[object]:
        """Return the objects that determine all steps of a fixed lane."""
        return [self.weights, *self.batches]

    def _walk(
        self,
        stage: Stage,
        block: Block,
        stored: Mapping[str, Tensor],
        inputs: Collection[str],
        outputs: Collection[str],
        move: bool,
    ) -> Iterator[BlockStep]:
        placed = self.compute.place(stored)
        entering, leaving = ({n: block.module.get_submodule(n) for n in names} for names in (inputs, outputs))
        for position, call in enumerate(self.calls):
            with capture_inputs(entering) as given, capture_outputs(leaving) as returned:
                after = run_block(stage, block, placed, call)
            if move:
                self.calls.put(position, after)
            yield BlockStep(call, after, given, returned)

    def inputs(
        self, block: Block, placed: Mapping[str, Tensor], modules: Mapping[str, nn.Module], whole: bool
    ) -> Iterator[dict[str, Tensor]]:
        """Yield the inputs of the modules of a block, batch by batch; the lane stays before the block.

        Args:
            placed: the block's tensors as the forward takes them.
            whole: run the first batch to the end of the block, which detects a module that is called twice; all other
                batches stop at the last input.
        """
        for position, call in enumerate(self.calls):
            with capture_inputs(modules, to_the_end=whole and position == 0) as given:
                block.run(placed, call)
            yield given


@dataclass(frozen=True)
class ExpertPass:
    """The samples of one task in batches with the task's expert, from which a walk starts."""

    task: str
    weights: Weights
    batches: list[Batch]
    indices: tuple[int, ...]
    """Position of every sample in its source, in the order of the batches."""
    compute: Compute
    kept: WalkCache | None = None
    """Cache for the next walk; without it there can be only one walk, which drops inputs once they are read."""
    truncated: int = 0
    """Samples whose text was cut at the task's limits."""
    directions: Mapping[str, Tensor] = field(default_factory=dict)
    """Gradients `[samples, m]` of the samples' margins by a shift of a map's output, by the name that files give to the
    map (`calibration.decisions`); empty unless they were asked for.
    """
    draw_digest: str = ""
    """`digest` of the batches, if they differ from the samples that were drawn; empty if they do not."""

    def lane(self, store: ActivationStore, model: Weights | None = None) -> ModelStream:
        """Return the expert's lane, or another model's on the same samples."""
        fixed = model is None
        weights = task_weights(self.weights if model is None else model, self.task)
        return ModelStream(weights, self.batches, self.compute, store, self.kept, self.task, fixed)

    def copy_for_one_walk(self, weights: Weights | None = None) -> ExpertPass:
        """Return a pass over the same samples for one walk, with another model if one is
        given; nothing of it is cached.
        """
        # A list of its own: a walk takes spent inputs out of the batches that it is given.
        return replace(self, weights=self.weights if weights is None else weights, batches=[*self.batches], kept=None)

    def spend(self, stage: Stage) -> None:
        """Drop inputs that only the first calls of a stage read, unless there may be another walk."""
        if self.kept is None and stage.spent:
            self.batches[:] = [{n: t for n, t in batch.items() if n not in stage.spent} for batch in self.batches]

    @cached_property
    def digest(self) -> str:
        """Return the SHA-256 of all inputs in the order of the draw, computed on the first call."""
        return self.draw_digest or inputs_digest(self.batches)


def require_same_compute(passes: Mapping[str, ExpertPass], compute: Compute) -> None:
    """Raise InputError if expert passes were made on another device or in another precision."""
    if any(one.compute != compute for one in passes.values()):
        raise InputError("the expert passes were made on another device or in another precision; make them again")

"""An expert's own forward on its own stream: what every comparison and every calibration target starts from."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import repeat

import torch
from torch import Tensor

from featcal.errors import InputError
from featcal.formats.weights import Weights
from featcal.models.activations import ActivationStore, CallList
from featcal.models.adapter import Adapter, Batch, Block, Call, Stage
from featcal.models.capture import capture_inputs, capture_outputs
from featcal.models.compute import Compute
from featcal.progress import available_bytes


@dataclass(frozen=True)
class BlockTrace:
    """One batch through one expert block."""

    call: Call
    """What the block was called with."""
    after: Call
    """What the next block will be called with."""
    inputs: Mapping[str, Tensor]
    """Input of linear maps by name, of those that were asked for."""
    outputs: Mapping[str, Tensor]
    """Output of linear maps, bias included, of those that were asked for."""


class Kept:
    """Room for what several passes keep in memory.

    Args:
        budget: bytes, beyond which blocks are walked anew every time.
    """

    def __init__(self, budget: int) -> None:
        self._left = budget

    @classmethod
    def on(cls, device: torch.device) -> Kept:
        """A quarter of what the device has to spare now."""
        free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_bytes()
        return cls((free or 2**32) // 4)

    def take(self, *things: BlockTrace | Call) -> bool:
        """Whether there is room for all of them, which is then taken."""
        size = sum(map(_bytes, things))
        if size > self._left:
            return False
        self._left -= size
        return True

    def give_back(self, *things: BlockTrace | Call) -> None:
        """Free the room that they took."""
        self._left += sum(map(_bytes, things))


def _bytes(thing: BlockTrace | Call) -> int:
    if isinstance(thing, BlockTrace):
        parts: Iterable[Tensor] = (thing.after.hidden, *thing.inputs.values(), *thing.outputs.values())
    else:
        parts = (thing.hidden,)
    tensors = {id(t): t for t in parts}
    return sum(t.numel() * t.element_size() for t in tensors.values())


@dataclass(frozen=True)
class Entrance:
    """What the first calls of a stage need of a model."""

    stage: Stage
    stored: Mapping[str, Tensor]
    """Its tensors as they are stored."""
    compute: Compute

    @cached_property
    def placed(self) -> dict[str, Tensor]:
        """The tensors as the forward takes them."""
        return self.compute.place(self.stored)


@dataclass
class ExpertPass:
    """Walks one expert over its task's batches, block by block in forward order.

    With `kept`, traces stay in memory as far as there is room, and a second walk costs nothing: expert features
    depend on the expert and the samples alone, not on lam, rho or alpha.
    """

    adapter: Adapter
    weights: Weights
    batches: Sequence[Batch]
    indices: tuple[int, ...]
    """Position of every sample in its source, in the order of the batches."""
    compute: Compute
    kept: Kept | None = None
    once: bool = False
    """Whether nobody walks a second time, so that inputs may go when they were read."""
    store: ActivationStore = field(default_factory=ActivationStore)
    truncated: int = 0
    """Samples whose text was cut at the task's limits."""
    tokens: int = 0
    """Tokens of the first stage without padding; known once it was started."""
    _calls: CallList | list[Call] = field(default_factory=list)
    _traces: dict[str, list[BlockTrace]] = field(default_factory=dict)
    _started: dict[str, list[Call]] = field(default_factory=dict)
    _entered: tuple[Mapping[str, Tensor], list[Call]] | None = None

    def start(self, stage: Stage) -> None:
        """Make the first calls of a stage, one per batch; the stage before must have been walked."""
        if stage.name in self._started:
            self._calls = list(self._started[stage.name])
            return
        first = stage is self.adapter.stages[0]
        outer = self.compute.place(self.weights.read(stage.outer))
        calls = first_calls(stage, outer, self.batches, None if first else self._calls)
        if self.kept is not None:
            self._started[stage.name] = list(calls)
            self._calls = list(self._started[stage.name])
        else:
            self._calls = self.store.replace(self._calls, calls)
        if first:
            self.tokens = sum(_tokens(call, batch) for call, batch in zip(self._calls, self.batches, strict=True))

    def enter(self, entrance: Entrance, upstream: Iterable[Call] | None) -> Iterable[Call]:
        """First calls of another model on the same batches; `upstream` as in `first_calls`.

        With `kept`, those of the first stage stay for the next model whose tensors in front of it are the very same
        objects, as far as there is room: calibration leaves these tensors alone.
        """
        stage, stored = entrance.stage, entrance.stored
        if upstream is not None or self.kept is None or entrance.compute != self.compute:
            return first_calls(stage, entrance.placed, self.batches, upstream)
        if self._entered is not None:
            of, calls = self._entered
            if all(of[name] is tensor for name, tensor in stored.items()):
                return calls
            self.kept.give_back(*calls)
            self._entered = None
        calls = list(first_calls(stage, entrance.placed, self.batches, None))
        if self.kept.take(*calls):
            self._entered = stored, calls
        return calls

    def spend(self, stage: Stage) -> None:
        """Let go of the inputs that only the first calls of a stage read, once they are made on both streams."""
        if self.once:
            self.batches = [{n: t for n, t in batch.items() if n not in stage.spent} for batch in self.batches]

    def digest(self) -> str:
        """SHA-256 of all inputs, in order."""
        digest = hashlib.sha256()
        for batch in self.batches:
            for name in sorted(batch):
                digest.update(batch[name].cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()

    def calls(self) -> Iterable[Call]:
        """The calls of the next block, one per batch: the first ones, or those after the last block walked."""
        return self._calls

    def tensors(self, block: Block) -> dict[str, Tensor]:
        """The expert's tensors of a block as they are stored, by name inside the block, on the compute device."""
        return block.local(self.compute.move(self.weights.read(block.names)))

    def walk(
        self,
        stage: Stage,
        block: Block,
        tensors: Mapping[str, Tensor],
        inputs: Sequence[str] = (),
        outputs: Sequence[str] = (),
    ) -> Iterator[BlockTrace]:
        """Every batch through `block`, in order; to be consumed to the end before the next block.

        Args:
            tensors: what `tensors(block)` gave.
            inputs, outputs: names of the linear maps whose inputs or outputs are wanted.
        """
        kept = self._traces.get(block.name)
        if kept and set(inputs) <= kept[0].inputs.keys() and set(outputs) <= kept[0].outputs.keys():
            self._calls = [trace.after for trace in kept]
            yield from kept
            return
        if kept and self.kept is not None:  # walked before, for other modules
            self.kept.give_back(*self._traces.pop(block.name))
            self._calls = [trace.call for trace in kept]
        traces: list[BlockTrace] | None = None if self.kept is None else []
        running = self.compute.place(tensors)
        before, after = ({name: block.linears[name] for name in names} for names in (inputs, outputs))
        try:
            for position, call in enumerate(self._calls):
                with capture_inputs(before) as given, capture_outputs(after) as returned:
                    following = stage.advance(call, block.run(running, call))
                self._calls[position] = following
                trace = BlockTrace(call, following, given, returned)
                if traces is not None and self.kept is not None:
                    if self.kept.take(trace):
                        traces.append(trace)
                    else:
                        self.kept.give_back(*traces)
                        traces = None
                yield trace
        except BaseException:  # the walk was given up, so what it kept is of no use
            if traces and self.kept is not None:
                self.kept.give_back(*traces)
            raise
        if traces is not None:
            self._traces[block.name] = traces


def require_same_compute(passes: Mapping[str, ExpertPass], compute: Compute) -> None:
    """Raise InputError if expert passes were made on another device or in another precision."""
    if any(one.compute != compute for one in passes.values()):
        raise InputError("the expert passes were made on another device or in another precision; make them anew")


def first_calls(
    stage: Stage, outer: Mapping[str, Tensor], batches: Sequence[Batch], upstream: Iterable[Call] | None
) -> Iterator[Call]:
    """First calls of a stage for every batch, one by one; `upstream` is None for the first stage."""
    before = repeat(None, len(batches)) if upstream is None else upstream
    return (stage.first_call(outer, batch, call) for batch, call in zip(batches, before, strict=True))


def _tokens(call: Call, batch: Batch) -> int:
    mask = batch.get("attention_mask")
    return call.hidden.shape[:2].numel() if mask is None else int(mask.sum())

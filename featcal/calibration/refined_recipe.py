"""The recipes "refined" and "informed": a block is calibrated piece by piece, each on what the pieces before it give it
in their final form (docs/theory.md, "The refined recipe"). They are featcal's own, not the paper's. "informed" has one
more term per linear map (`calibration.prior`).

Algorithm 1 counts all modules of a block in one snapshot of the merged block, so that an output map is fitted to inputs
that the deployed model will never give it. Here a block is taken as its residual parts (attention, then MLP), a part as
its pieces (norm, query, key and value maps, output map), and every piece is counted after those before it were solved.
The map that writes a part's result into the residual stream is asked to close `beta` of the gap that stands there.

Where a norm stands between that map and the stream (the post-norms of Gemma-2 and OLMo-2) its output is not what is
added, and a target moved by the gap would be wrong by the norm. Such a map is no writer: it is fitted with beta 0.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn

from featcal.calibration.block_statistics import BlockMoments
from featcal.calibration.distributed import end_task, solve
from featcal.calibration.linear_group import LinearGroup
from featcal.calibration.prior import TaskVectors
from featcal.calibration.store import STUDENT, Solved, Watch, prefix_errors
from featcal.calibration.token_rows import Named, TaskRows, TokenRows
from featcal.calibration.weighed_tokens import Acting, weigh
from featcal.models.activations import CallList
from featcal.models.adapter import Block, Call, Stage, Sublayer
from featcal.models.capture import capture_inputs, capture_outputs, record_inputs
from featcal.models.context import Run
from featcal.models.lane import Step, run_block
from featcal.models.walk import Walk
from featcal.suite.calibration_options import CalibrationConfig
from featcal.system.errors import InputError

Weighed = Mapping[str, Sequence[TokenRows]]
"""The rows of every batch of a task, by group of linear maps, where they are not those of the stage."""
_SAME = 0.02
"""Relative difference of what a part adds to the stream and of what its last map puts out, beside rounding, below
which they are the same: a scale or a norm between them is more."""


@dataclass(frozen=True)
class Part:
    """A residual part of a block, as one batch was seen to pass through it."""

    name: str
    given: Mapping[str, Tensor]
    """Linear maps and norms that were called, in order, with a token of their inputs: the same tensor where they share
    it."""
    entering: str | None
    """The module whose input is the residual stream in front of the part; None where none gets it unchanged."""
    writer: str | None
    """The linear map whose output is added to the stream; None where something comes between, or it is one of many."""
    mixed: Mapping[str, tuple[str, bool]] = field(default_factory=dict)
    """Of every map of a mixture of experts the mixture, and whether the map is given what the others make."""

    @cached_property
    def pieces(self) -> list[tuple[str, ...]]:
        """Modules that share an input, in the order of their first call; of a mixture first the maps of all experts
        that are given tokens, then all that are given what these make."""
        shared: dict[Hashable, list[str]] = {}
        for name, given in self.given.items():
            shared.setdefault(self.mixed.get(name, id(given)), []).append(name)
        return [tuple(names) for names in shared.values()]


class Pieces:
    """Calibrates blocks piece by piece.

    Args:
        walk: experts and student; both stand in front of a block when it is calibrated, and behind it afterwards.
        watch: called with the finished statistics of every piece before it is solved; then with those of `also`.
        also: other options that every piece is counted with too, on the same tokens; they differ in lam, alpha or beta,
            and nothing is solved with them.
    """

    def __init__(
        self,
        run: Run,
        walk: Walk,
        config: CalibrationConfig,
        watch: Watch,
        also: Sequence[CalibrationConfig] = (),
    ) -> None:
        self._run, self._walk, self._config, self._watch, self._also = run, walk, config, watch, also
        self._parts: dict[tuple[str, ...], list[Part]] = {}
        self._held: tuple[str, Mapping[str, Mapping[str, Tensor]]] = ("", {})

    def calibrate(self, stage: Stage, index: int, rows: Mapping[str, TaskRows]) -> Solved:
        """Solve a block.

        Args:
            rows: which tokens of every task count.

        Raises:
            NumericalError: features that are not finite, or a system that cannot be solved; names the block.
            InputError: a block that does not fall apart into residual parts, or a module that cannot be calibrated.
        """
        run, block = self._run, stage.blocks[index]
        merged, solved = run.merged.read(block.names), Solved()
        parts = self._find_parts(stage, block)
        counting = {
            (part.name, names): [self._moments(stage, index, part, names, one) for one in (self._config, *self._also)]
            for part in parts
            for names in part.pieces
        }
        known = self._config.mu or self._config.weigh_tokens  # of task vectors
        base = block.local(run.compute.move(run.base.read(block.names))) if known else None
        every = [one for same in counting.values() for one in same]
        traces, weighed = self._run_experts(stage, block, parts, every, rows, base)
        placed = block.local(run.compute.place(merged))
        for part in parts:
            for names in part.pieces:
                moments = counting.pop((part.name, names))
                if not moments[0].groups:
                    continue
                self._count(part, moments, (placed, base), traces, rows, weighed)
                for one in moments:
                    self._watch(one)
                solved |= solve(run, block, merged, moments[0])
                placed = block.local(run.compute.place(merged | solved.tensors))
            with run.seconds("student forward"):
                self._pass(stage.sublayers(block, placed)[part.name])
        return solved

    def _find_parts(self, stage: Stage, block: Block) -> list[Part]:
        """The residual parts of a block, found on an expert's first batch; once for blocks of the same modules.

        Raises:
            InputError: parts that together are not the block.
        """
        key = stage.name, *(name for name, _ in block.module.named_modules())
        if key not in self._parts:
            lane = next(iter(self._walk.experts.values()))
            placed = self._run.compute.place(lane.tensors(block))
            self._parts[key] = _parts_of(stage, block, placed, lane.calls[0])
        return self._parts[key]

    def _moments(
        self, stage: Stage, index: int, part: Part, names: tuple[str, ...], config: CalibrationConfig
    ) -> BlockMoments:
        """Empty statistics of one piece."""
        moved = [part.writer] if part.writer and part.entering and config.beta else []
        moments = BlockMoments(stage, index, config, only=names, moved=moved)
        if moments.modules:
            moments.see(part.given)
        return moments

    def _experts_at(self, block: Block) -> Iterator[tuple[str, Mapping[str, Tensor]]]:
        """Every task with its expert's tensors of a block; read once where memory is not limited."""
        if self._run.store.budget is not None:
            yield from self._walk.experts_at(block)
            return
        if self._held[0] != block.name:
            self._held = block.name, dict(self._walk.experts_at(block))
        yield from self._held[1].items()

    def _run_experts(
        self,
        stage: Stage,
        block: Block,
        parts: Sequence[Part],
        counting: Sequence[BlockMoments],
        rows: Mapping[str, TaskRows],
        base: Named | None,
    ) -> tuple[dict[str, CallList], dict[str, Weighed]]:
        """Every expert through its block, and what targets need of it: by task and batch a call of nothing, whose
        named tensors are inputs and outputs of modules; and how tokens are weighed, where the options say so.

        Args:
            base: the base's tensors of the block, where there are task vectors.
        """
        streams = {part.entering for part in parts if part.entering}
        own = [moments for moments in counting if moments.config is self._config and not moments.has_routers]
        groups = [group for moments in own for group in moments.linears]
        held: dict[str, CallList] = {}
        weighed: dict[str, Weighed] = {}
        for task, tensors in self._experts_at(block):
            asked = [moments.expert_modules(rows[task]) for moments in counting]
            inputs, outputs = ({name for one in asked for name in one[kind]} for kind in (0, 1))
            inputs, acting = inputs | streams, self._begin_acting(groups, block, task, tensors, base)
            watched = inputs | {group.names[0] for group in groups if acting}
            steps = self._walk.experts[task].walk(stage, block, tensors, watched, outputs)
            with self._run.seconds("expert forward"):
                seen = zip(steps, rows[task].batches, strict=True)
                acted = list(zip(groups, acting, strict=True)) if acting else []
                held[task] = self._run.store.hold(_reduce_call(step, inputs, acted, tensors, own) for step, own in seen)
            with self._run.seconds("moments"):
                weighed[task] = dict(zip(map(str, groups), weigh(acting, self._run.ranks), strict=False))
            self._run.store.settle()
        return held, weighed

    def _begin_acting(
        self, groups: Sequence[LinearGroup], block: Block, task: str, tensors: Named, base: Named | None
    ) -> list[Acting]:
        """What the task's vectors do to the tokens of every group; of none where tokens keep their weights."""
        if not self._config.weigh_tokens or base is None:
            return []
        vectors = TaskVectors(block, tensors, base, self._walk.experts[task].weights)
        dtype = torch.promote_types(self._run.compute.dtype, torch.float32)
        return [group.begin_acting(vectors, dtype) for group in groups]

    def _count(
        self,
        part: Part,
        every: Sequence[BlockMoments],
        models: tuple[Named, Named | None],
        traces: Mapping[str, CallList],
        rows: Mapping[str, TaskRows],
        weighed: Mapping[str, Weighed],
    ) -> None:
        """Count one piece on all tasks; the student stands in front of the part.

        Args:
            every: its statistics, with the options of the calibration first.
            models: the student's block as it is now, and the base's where there are task vectors.
        """
        (placed, base), moments, seconds = models, every[0], self._run.seconds
        run = moments.stage.sublayers(moments.block, placed)[part.name]
        name = next(name for name in part.given if name in moments.modules)
        watched = (
            moments.modules if moments.has_routers else {name: moments.modules[name]}
        )  # all others are given the same
        prior = base if self._config.mu else None
        for task, tensors in self._experts_at(moments.block):
            calls, own = self._walk.lanes[STUDENT][task].calls, weighed[task]
            if moments.has_routers and self._config.weigh_tokens:
                own = self._weighed_routes(moments, run, (calls, traces[task]), (task, tensors, base), rows[task])
            for position, (call, trace) in enumerate(zip(calls, traces[task], strict=True)):
                with seconds("student forward"), capture_inputs(watched, to_the_end=False) as seen:
                    run(call)
                with seconds("moments"):
                    given = seen if moments.has_routers else dict.fromkeys(moments.modules, seen[name])
                    for one in every:
                        one.update(
                            rows[task], position, given, _target_step(part, call, trace, one.config), tensors, own
                        )
            with seconds("moments"), prefix_errors(f"{moments.block.name}, task '{task}'"):
                expert = self._walk.experts[task].weights
                vectors = None if prior is None else TaskVectors(moments.block, tensors, prior, expert)
                for one in every:
                    end_task(self._run.ranks, one, tensors, vectors)
            self._run.store.settle()

    def _weighed_routes(
        self,
        moments: BlockMoments,
        run: Sublayer,
        calls: tuple[CallList, CallList],
        expert: tuple[str, Named, Named | None],
        rows: TaskRows,
    ) -> Weighed:
        """How the tokens of a task are weighed that the student's router sends to every member of a mixture, of which
        the student is run as far as its router.

        Args:
            calls: the student's, and what `_run_experts` held of the expert.
            expert: the task, its expert's tensors of the block, and the base's.
        """
        groups, (task, tensors, base) = moments.linears, expert
        acting = self._begin_acting(groups, moments.block, task, tensors, base)
        for call, trace, tokens in zip(*calls, rows.batches, strict=True):
            with self._run.seconds("student forward"), capture_inputs(moments.routers, to_the_end=False) as seen:
                run(call)
            with self._run.seconds("moments"):
                for group, one in zip(groups, acting, strict=True):
                    one.see(*group.expert_inputs(seen, trace.kwargs["inputs"], tokens[group.weighting], tensors))
        with self._run.seconds("moments"):
            return dict(zip(map(str, groups), weigh(acting, self._run.ranks), strict=True))

    def _pass(self, run: Sublayer) -> None:
        """Take the student of every task through a part."""
        for lane in self._walk.lanes[STUDENT].values():
            for position, call in enumerate(lane.calls):
                lane.calls.put(position, run(call))
        self._run.store.settle()


def _target_step(part: Part, call: Call, trace: Call, config: CalibrationConfig) -> Step:
    """What the targets of one batch are made of: the expert's inputs and outputs, the output of the map that writes
    into the stream moved by beta / alpha times the gap there; of it, alpha is taken (Eq. 10)."""
    inputs, outputs = trace.kwargs["inputs"], trace.kwargs["outputs"]
    if config.beta and part.entering and part.writer in outputs:
        gap = inputs[part.entering] - call.hidden_state
        outputs = {**outputs, part.writer: outputs[part.writer] + config.beta / config.alpha * gap}
    return Step(call, call, inputs, outputs)


def _reduce_call(
    step: Step,
    inputs: Collection[str],
    acting: Sequence[tuple[LinearGroup, Acting]],
    tensors: Named,
    tokens: Mapping[str, TokenRows],
) -> Call:
    """What stays of one batch that an expert took through its block; what acts on its tokens has seen them.

    Args:
        inputs: names of modules whose inputs stay.
        tensors: the expert's.
        tokens: which of them count, by weighting.
    """
    for group, one in acting:
        one.see(*group.expert_inputs({}, step.inputs, tokens[group.weighting], tensors))
    given = {name: step.inputs[name] for name in inputs}
    return Call((step.call.hidden_state,), {"inputs": given, "outputs": dict(step.outputs)})


def _parts_of(stage: Stage, block: Block, placed: Mapping[str, Tensor], call: Call) -> list[Part]:
    """How one batch passes through the residual parts of a block.

    Raises:
        InputError: parts that together are not the block.
    """
    modules: dict[str, nn.Module] = {**block.maps, **block.layernorms}
    if stage.norm is not None:
        modules |= block.modules_of(stage.norm)
    found, before = [], call
    for name, run in stage.sublayers(block, placed).items():
        with record_inputs(modules) as given, capture_outputs(block.linears) as put_out:
            after = run(before)
        found.append(_part(name, block, given, put_out, (before.hidden_state, after.hidden_state)))
        before = after
    whole = run_block(stage, block, placed, call)
    missed = [name for name in modules if not any(name in part.given for part in found)]
    if missed or (before.hidden_state - whole.hidden_state).double().norm() > _rounding(whole.hidden_state):
        raise InputError(
            f"{block.name}: its residual parts are not the whole block{': ' if missed else ''}{', '.join(missed)}; "
            "this architecture can be calibrated with the recipe 'paper' alone"
        )
    return found


def _part(
    name: str, block: Block, given: Mapping[str, Tensor], put_out: Mapping[str, Tensor], stream: tuple[Tensor, Tensor]
) -> Part:
    """Args: `stream` is the residual stream before and after the part."""
    before, after = stream
    entering = next((module for module, tensor in given.items() if tensor is before), None)
    last = next(reversed([module for module in given if module in put_out]), None)
    writer = last if last is not None and _adds(put_out[last], before, after) else None
    tokens = {id(tensor): tensor[:1, :1] for tensor in given.values()}
    examples = {module: tokens[id(tensor)] for module, tensor in given.items()}
    return Part(name, examples, entering, writer, _mixture_maps(block))


def _mixture_maps(block: Block) -> dict[str, tuple[str, bool]]:
    """See `Part.mixed`."""
    return {
        f"{name}.{place}.{own}": (name, own == member.leaving)
        for name, mixture in block.mixtures.items()
        for place, member in enumerate(mixture.members)
        for own in (*member.entering, member.leaving)
    }


def _adds(output: Tensor, before: Tensor, after: Tensor) -> bool:
    """Whether a map's output, unchanged, is what a part adds to the stream."""
    if before.shape != after.shape:  # a merger of patches: what comes out is another stream
        return False
    gap = (after.double() - before.double() - output.double()).norm()
    return bool(gap <= _SAME * output.double().norm() + _rounding(after))


def _rounding(state: Tensor) -> Tensor:
    """Norm of what sums in the dtype of a state may be off by."""
    size: Tensor = state.double().norm()
    return 8 * torch.finfo(state.dtype).eps * size

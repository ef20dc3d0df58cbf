"""Run the recipes "refined" and "informed": calibrate a block piece by piece, each piece on the final output of the
pieces before it (docs/theory/recipes.md). They are featcal's own, not the paper's. "informed" has one more term per
linear map (`calibration.prior`).

Algorithm 1 collects the statistics of all modules of a block in one snapshot of the merged block, so an output map is
fitted to inputs that never occur in the deployed model. Here a block is split into its residual parts (attention, then
MLP), a part into its pieces (norm, query, key and value maps, output map), and the statistics of a piece are collected
after all earlier pieces are solved. The map that writes a part's result into the residual stream is fitted to close
`beta` of the gap there.

If a norm follows that map before the stream (the post-norms of Gemma-2 and OLMo-2), the norm's output is added instead,
and a target shifted by the gap would be wrong. So such a map is fitted with beta 0.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence

import torch

from featcal.calibration.block_statistics import BlockStatistics
from featcal.calibration.distributed import end_task
from featcal.calibration.linear_group import LinearGroup
from featcal.calibration.precision import product_dtype
from featcal.calibration.prior import Prior, TaskVectors
from featcal.calibration.residual_parts import ResidualPart, find_parts
from featcal.calibration.store import SolvedTensors, Watch, prefix_errors, solve_block
from featcal.calibration.streams import Streams
from featcal.calibration.token_rows import Named, TokenRows
from featcal.calibration.weighed_tokens import TaskVectorEffect, weigh
from featcal.models.activations import CallList
from featcal.models.adapter import Block, Call, Stage, Sublayer
from featcal.models.capture import capture_inputs
from featcal.models.lane import BlockStep
from featcal.suite.calibration_options import CalibrationConfig
from featcal.system.progress import Timing

Weighed = Mapping[str, Sequence[TokenRows]]
"""The rows of every batch of a task, by group of linear maps, if they differ from those of the stage."""


class Pieces:
    """Calibrate blocks piece by piece.

    Args:
        streams: both before a block when it is calibrated, and after it afterwards.
        watch: called with the complete statistics of every piece before its solve; then with those for `also`.
        also: other options (lam, alpha or beta) for which statistics are collected on the same tokens, without a solve.
    """

    def __init__(
        self, streams: Streams, config: CalibrationConfig, watch: Watch, also: Sequence[CalibrationConfig] = ()
    ) -> None:
        self._streams, self._configs, self._watch = streams, (config, *also), watch
        self._parts: dict[tuple[object, ...], list[ResidualPart]] = {}

    def calibrate(self, stage: Stage, index: int) -> SolvedTensors:
        """Run every expert through a block; then, piece by piece, collect the student's statistics after the solved
        pieces, and solve.

        Raises:
            NumericalError: features are not finite, or a system cannot be solved; the message names the block.
            InputError: a block is not the sum of residual parts, or a module cannot be calibrated.
        """
        run, block = self._streams.run, stage.blocks[index]
        merged, solved = run.merged.read(block.names), SolvedTensors()
        parts = self._find_parts(stage, block)
        pieces = {
            (part.name, names): [_new_statistics(stage, index, part, names, config) for config in self._configs]
            for part in parts
            for names in part.pieces
        }
        counted = _CountedBlock(self._streams, self._configs[0], stage, block)
        try:
            counted.run_experts(parts, [statistics for every in pieces.values() for statistics in every])
            placed = run.compute.place(merged)
            for part in parts:
                for names in part.pieces:
                    every = pieces.pop((part.name, names))  # what is solved is to leave the memory
                    if not every[0].groups:
                        continue
                    later = [statistics for waiting in pieces.values() for statistics in waiting]
                    counted.count(part, every, block.local(placed), later)
                    for statistics in every:
                        self._watch(statistics)
                    found = solve_block(run, every[0], merged)
                    solved |= found
                    placed |= run.compute.place(found.tensors)  # the rest of the block is there already
                counted.pass_student(part, block.local(placed))
        finally:
            counted.clear()
        return solved

    def _find_parts(self, stage: Stage, block: Block) -> list[ResidualPart]:
        """Find the residual parts of a block on an expert's first batch, once for blocks with the same modules.

        Raises:
            InputError: the parts together are not the block.
        """
        # With their classes: a norm may be an Identity in some blocks.
        key = stage.name, *((name, type(module)) for name, module in block.module.named_modules())
        if key not in self._parts:
            lane = next(iter(self._streams.experts.values()))
            placed = self._streams.run.compute.place(lane.tensors(block))
            self._parts[key] = find_parts(stage, block, placed, lane.calls[0])
        return self._parts[key]


def _new_statistics(
    stage: Stage, index: int, part: ResidualPart, names: tuple[str, ...], config: CalibrationConfig
) -> BlockStatistics:
    """Return empty statistics of one piece."""
    moved = [part.writer] if part.writer and part.entering and config.beta else []
    statistics = BlockStatistics(stage, index, config, only=names, moved=moved)
    if statistics.modules:
        statistics.see(part.given)
    return statistics


class _CountedBlock:
    """One block during the collection of its pieces' statistics, with the experts' inputs
    and outputs for the targets.
    """

    def __init__(self, streams: Streams, config: CalibrationConfig, stage: Stage, block: Block) -> None:
        self._streams, self._run, self._config = streams, streams.run, config
        self._stage, self._block = stage, block
        self._entering: set[str] = set()
        """Modules whose input is the residual stream before a part."""
        self._traces: dict[str, CallList] = {}
        """Inputs and outputs of the expert's modules by task and batch, as the named tensors of a call."""
        self._weighed: dict[str, Weighed] = {}
        """Rows with other weights by task, if the options ask for them."""

    def run_experts(self, parts: Sequence[ResidualPart], counting: Sequence[BlockStatistics]) -> None:
        """Run every expert through its block, and store its features for the targets.

        Args:
            counting: the statistics of all pieces.
        """
        self._entering, seconds = {part.entering for part in parts if part.entering}, self._run.seconds
        own = [one for one in counting if one.config is self._config and not one.routing]
        groups = [group for one in own for group in one.linears]
        base = self._read_base() if self._config.weigh_tokens else {}
        for task, expert in self._streams.walk.experts_at(self._block):
            rows, acting = self._streams.rows[task], self._begin_acting(groups, task, expert, base)
            inputs, outputs = self._find_needed(counting, task)
            watched = inputs | {group.names[0] for group in groups if acting}
            steps = self._streams.experts[task].walk(self._stage, self._block, expert, watched, outputs)
            with seconds("expert forward"):
                seen = zip(steps, rows.batches, strict=True)
                acted = list(zip(groups, acting, strict=True)) if acting else []
                traces = (_reduce_step(step, inputs, acted, expert, tokens) for step, tokens in seen)
                self._traces[task] = self._run.store.hold(traces)
            with seconds("moments"):
                self._weighed[task] = dict(zip(map(str, groups), weigh(acting, self._run.ranks), strict=False))
            self._run.store.settle()

    def count(
        self, part: ResidualPart, every: Sequence[BlockStatistics], student: Named, later: Sequence[BlockStatistics]
    ) -> None:
        """Collect the statistics of one piece on all tasks; the student is before the part.

        Args:
            every: statistics of the piece, with the options of the calibration first.
            student: current tensors of its block, by name inside it.
            later: statistics of the remaining pieces.
        """
        statistics, seconds = every[0], self._run.seconds
        run = self._stage.sublayers(self._block, student)[part.name]
        name = next(name for name in part.given if name in statistics.modules)
        # without a router all modules of a piece are given what the first one is given
        watched = statistics.modules if statistics.routing else {name: statistics.modules[name]}
        priors, effort = [self._find_priors(one) for one in every], Timing()
        # Read anew for every piece: a block of all experts, kept until the last piece, would grow with their number.
        # What a member of a mixture is given is made of maps of other pieces.
        needed = None if statistics.routing else statistics.modules
        counts_priors = self._config.mu and not all(priors)
        base = self._read_base(needed) if counts_priors or (statistics.routing and self._config.weigh_tokens) else {}
        for task, expert in self._streams.walk.experts_at(self._block, needed):
            rows, calls, weighed = self._streams.rows[task], self._streams.student[task].calls, self._weighed[task]
            if statistics.routing and self._config.weigh_tokens:
                weighed = self._weigh_routed(statistics, run, task, expert, base)
            for position, (call, trace) in enumerate(zip(calls, self._traces[task], strict=True)):
                # No further than the piece: what stands after it is not solved yet.
                with seconds("student forward"), capture_inputs(watched, to_the_end=False) as seen:
                    run(call)
                with seconds("moments"):
                    given = seen if statistics.routing else dict.fromkeys(statistics.modules, seen[name])
                    for one in every:
                        step = _target_step(part, call, trace, one.config)
                        one.update(rows, position, given, step, expert, weighed)
            with seconds("moments"), prefix_errors(f"{self._run.adapter.name_of(self._block)}, task '{task}'"):
                vectors = self._task_vectors(task, expert, base, effort) if counts_priors else None
                directions = self._streams.directions(task, self._block) if self._config.decisions else None
                for one, found in zip(every, priors, strict=True):
                    end_task(self._run.ranks, one, expert, None if found else vectors, directions)
            self._let_go(task, later)
            self._run.store.settle()
        for one, found in zip(every, priors, strict=True):
            self._settle_priors(one, found, effort)

    def clear(self) -> None:
        """Release the memory and the files of all stored expert features."""
        for traces in self._traces.values():
            traces.clear()

    def _let_go(self, task: str, later: Sequence[BlockStatistics]) -> None:
        """Release the expert features of a task that no later piece needs."""
        if self._run.store.is_limited:  # some of it may lie in files, which would be written anew
            return
        traces, (inputs, outputs) = self._traces[task], self._find_needed(later, task)
        for position, trace in enumerate(traces):
            given, returned = trace.kwargs["inputs"], trace.kwargs["outputs"]
            kept = {name: given[name] for name in inputs & given.keys()}
            traces.put(position, _trace(trace, kept, {name: returned[name] for name in outputs & returned.keys()}))

    def _find_needed(self, counting: Sequence[BlockStatistics], task: str) -> tuple[set[str], set[str]]:
        """Find the modules of a task's expert whose inputs, and whose outputs, these statistics need."""
        asked = [one.expert_modules(self._streams.rows[task]) for one in counting]
        inputs, outputs = ({name for one in asked for name in one[kind]} for kind in (0, 1))
        return inputs | self._entering, outputs

    def pass_student(self, part: ResidualPart, student: Named) -> None:
        """Run the student of every task through a part whose pieces are solved.

        Args:
            student: current tensors of its block, by name inside it.
        """
        with self._run.seconds("student forward"):
            run = self._stage.sublayers(self._block, student)[part.name]
            for lane in self._streams.student.values():
                for position, call in enumerate(lane.calls):
                    lane.calls.put(position, run(call))
            self._run.store.settle()

    def _read_base(self, modules: Collection[str] | None = None) -> Named:
        """Read the base's tensors of some modules of the block, or of all, from which task vectors are computed."""
        names = self._block.names if modules is None else self._block.names_of(modules)
        return self._block.local(self._run.compute.move(self._run.base.read(names)))

    def _task_vectors(self, task: str, expert: Named, base: Named, effort: Timing) -> TaskVectors:
        return TaskVectors(self._block, expert, base, self._streams.experts[task].weights, effort)

    def _find_priors(self, statistics: BlockStatistics) -> list[Prior] | None:
        """Find the priors of a piece that an earlier calibration with the same experts left; None if there are none."""
        room = self._streams.room if self._config.mu else None
        return None if room is None else room.find(self._prior_key(statistics), self._prior_objects())

    def _settle_priors(self, statistics: BlockStatistics, found: list[Prior] | None, effort: Timing) -> None:
        """Give the statistics of a piece the cached priors, or cache its own priors for the next calibration.

        Args:
            effort: the time that the priors took.
        """
        room, key = self._streams.room, self._prior_key(statistics)
        if room is None or not self._config.mu:
            return
        if found:
            room.spare(key, found)
            statistics.take_priors(found)
            return
        with room.keeping(key, self._prior_objects(), effort) as keep:
            for prior in statistics.priors:
                keep(prior)

    def _prior_key(self, statistics: BlockStatistics) -> Hashable:
        """Return the cache key of a piece's priors among those of the same experts: its maps and the dtype."""
        dtype = product_dtype(self._run.compute.dtype, statistics.config)
        return Prior, self._block.name, tuple(group.names for group in statistics.linears), dtype

    def _prior_objects(self) -> list[object]:
        """Return the objects that determine all priors."""
        return [self._run.base, *(lane.weights for lane in self._streams.experts.values())]

    def _begin_acting(
        self, groups: Sequence[LinearGroup], task: str, expert: Named, base: Named
    ) -> list[TaskVectorEffect]:
        """Begin to measure, for every group, how strongly the task's vectors act on tokens;
        do nothing if tokens keep their weights.
        """
        if not self._config.weigh_tokens:
            return []
        vectors = self._task_vectors(task, expert, base, Timing())
        dtype = torch.promote_types(self._run.compute.dtype, torch.float32)
        return [group.begin_acting(vectors, dtype) for group in groups]

    def _weigh_routed(
        self, statistics: BlockStatistics, run: Sublayer, task: str, expert: Named, base: Named
    ) -> Weighed:
        """Weight the tokens of a task that the student's router sends to every expert of a
        mixture; the student runs up to its router.
        """
        groups, seconds = statistics.linears, self._run.seconds
        acting = self._begin_acting(groups, task, expert, base)
        calls, batches = self._streams.student[task].calls, self._streams.rows[task].batches
        for call, trace, tokens in zip(calls, self._traces[task], batches, strict=True):
            with seconds("student forward"), capture_inputs(statistics.routing, to_the_end=False) as seen:
                run(call)
            with seconds("moments"):
                for group, one in zip(groups, acting, strict=True):
                    one.see(*group.expert_inputs(seen, trace.kwargs["inputs"], tokens[group.weighting], expert))
        with seconds("moments"):
            return dict(zip(map(str, groups), weigh(acting, self._run.ranks), strict=True))


def _target_step(part: ResidualPart, call: Call, trace: Call, config: CalibrationConfig) -> BlockStep:
    """Return the expert's inputs and outputs for the targets of one batch, with the output of the map that writes into
    the residual stream shifted by the gap to the expert's stream.
    """
    inputs, outputs = trace.kwargs["inputs"], trace.kwargs["outputs"]
    if config.beta and part.entering and part.writer in outputs:
        gap = inputs[part.entering] - call.hidden_state
        # Divided by alpha, since the target takes alpha of the output (Eq. 10): beta of the gap is left.
        outputs = {**outputs, part.writer: outputs[part.writer] + config.beta / config.alpha * gap}
    return BlockStep(call, call, inputs, outputs)


def _reduce_step(
    step: BlockStep,
    inputs: Collection[str],
    acting: Sequence[tuple[LinearGroup, TaskVectorEffect]],
    expert: Named,
    tokens: Mapping[str, TokenRows],
) -> Call:
    """Apply task vectors to one batch of an expert; return the inputs and outputs to keep.

    Args:
        inputs: names of modules whose inputs are kept.
        expert: its tensors of the block, by name inside it.
        tokens: the tokens with non-zero weight, by weighting.
    """
    for group, one in acting:
        one.see(*group.expert_inputs({}, step.inputs, tokens[group.weighting], expert))
    return _trace(step.call, {name: step.inputs[name] for name in inputs}, dict(step.outputs))


def _trace(call: Call, inputs: Named, outputs: Named) -> Call:
    """Return the inputs and outputs of an expert's modules on one batch, as a call that can be stored."""
    return Call((call.hidden_state,), {"inputs": inputs, "outputs": outputs})

"""Algorithm 1: calibrate the merged model block by block in forward order."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from featcal.calibration.baseline_drift import FinalDrift, Outset
from featcal.calibration.block_statistics import BlockMoments, FirstBlock
from featcal.calibration.config import calibrated_blocks, calibrated_maps
from featcal.calibration.distributed import end_task, shared_rows, solve
from featcal.calibration.refined_recipe import Pieces
from featcal.calibration.rounding import Rounding
from featcal.calibration.store import STUDENT, Solved, Watch, prefix_errors, watch_nothing
from featcal.calibration.token_rows import TaskRows, lane_rows
from featcal.models.adapter import Batch, Block, Call, Stage, walking
from featcal.models.context import Run
from featcal.models.lane import ExpertPass, Lane
from featcal.models.walk import Walk
from featcal.suite.calibration_options import PAPER, CalibrationConfig
from featcal.system.errors import NumericalError
from featcal.system.progress import Seconds

T = TypeVar("T")
Gap = tuple[float, float]
"""Sums over samples and tokens of ||h_cal - h_exp||^2 and of ||h_exp||^2."""


@runtime_checkable
class Blocks(Protocol):
    """Where solved blocks go, and where those of an interrupted run come from."""

    def read_finished(self, block: Block) -> dict[str, Tensor] | None:
        """The tensors of a block that an earlier run solved, by canonical name; None if it did not."""

    def facts(self, block: Block) -> Rounding:
        """What `put` was told of a finished block beside its tensors."""

    def put(self, block: Block, tensors: dict[str, Tensor], facts: Rounding) -> None:
        """Takes a solved block: its tensors by canonical name, in the dtype they are stored in, and what that costs."""


class InMemoryBlocks:
    """Solved blocks, all in memory."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}

    def read_finished(self, block: Block) -> None:
        return None

    def facts(self, block: Block) -> Rounding:
        return {}

    def put(self, block: Block, tensors: dict[str, Tensor], facts: Rounding) -> None:
        self.tensors |= tensors


@dataclass(frozen=True)
class Account:
    """What a calibration met on its way."""

    tokens: Mapping[str, int]
    """By task: tokens of the first stage, padding left out."""
    drift: Mapping[str, Mapping[str, float]]
    """By block and task: ||h_cal - h_exp|| / ||h_exp|| of the calibrated stream, over the tokens of the block's own
    stage (`Stage.own_state`): of a T5 decoder block those of the decoder."""
    final: Mapping[str, FinalDrift]
    """By task, where the merged model ran beside the calibration."""
    starved: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """By block: experts of a mixture that keep the merged weights, since too few tokens came to them
    (`RoutedGroup`), by name inside the block; blocks without any are left out."""
    rounding: Mapping[str, Rounding] = field(default_factory=dict)
    """By block; of those that an interrupted run solved as it was then."""


def calibrate_blocks(
    run: Run,
    experts: Mapping[str, ExpertPass],
    config: CalibrationConfig,
    blocks: Blocks,
    first: FirstBlock | None = None,
    warn: bool = True,
    watch: Watch = watch_nothing,
) -> Account:
    """Algorithm 1 of the paper (Appendix H).

    The student starts as the merged model; every task has a student stream and an expert stream. Then block by block:
    1. Run every expert's own block on its own stream and the student's block on the deployed stream, counting the
       moments of every linear map and norm from this one snapshot (Eqs. 13, 52, 56).
    2. Solve all its modules in closed form (Eqs. 17, 55, 59), in the dtype they are stored in, for `blocks`.
    3. Rerun the student's block, so that the next block sees what the deployed model will see (Eq. 45).
    Of blocks that the options leave out step 3 alone is done. With other recipes than "paper" `Pieces` does all three.

    Args:
        experts: one expert pass per task; their batches are the calibration samples.
        blocks: a block that they have finished is only replayed.
        first: keeps the statistics of the first block that is calibrated from run to run.
        warn: run the merged model beside it on a few samples, to see whether its final drift was lower.
        watch: called with the finished statistics of every block before it is solved.

    Raises:
        NumericalError, InputError: features that are not finite, a system that cannot be solved, or an architecture
            that cannot be run block by block; names the block.
    """
    gaps, starved, rounding = dict[str, dict[str, Gap]](), dict[str, list[str]](), dict[str, Rounding]()
    tokens, chosen = dict[str, int](), calibrated_blocks(run.adapter, config)
    with walking(run.adapter), run.seconds("calibration"):
        walk = Walk(run, "calibrating", experts, {STUDENT: run.merged})
        outset = Outset(run, experts if warn else {})
        pieces = Pieces(run, walk, config, watch) if config.recipe != PAPER else None
        for stage in run.adapter.stages:
            rows = _enter(run, walk, stage, experts, config, outset)
            tokens = tokens or _tokens(walk.experts, experts)
            for index, block in walk.blocks(stage):
                outset.step(stage, block, merged := _read(run, block))
                deployed = blocks.read_finished(block)
                if deployed is not None:
                    _replay(walk, stage, block)
                    deployed = merged | (solved := Solved(_changes(deployed, merged), blocks.facts(block))).tensors
                elif pieces is not None and block.name in chosen:
                    solved = pieces.calibrate(stage, index, rows)
                    blocks.put(block, merged | solved.tensors, solved.rounding)
                else:
                    moments = BlockMoments(stage, index, config, block.name in chosen)
                    moments = _reuse_or_count(run, walk, moments, merged, rows, first, experts)
                    first = None if moments.groups else first
                    watch(moments)
                    solved = solve(run, block, merged, moments)
                    blocks.put(block, deployed := merged | solved.tensors, solved.rounding)
                starved |= _find_starved(stage, block, config, solved.tensors) if block.name in chosen else {}
                rounding[block.name] = solved.rounding
                gaps[block.name] = _deploy(run, walk, stage, block, deployed, experts)
        final = outset.close(walk.experts, walk.lanes[STUDENT])
        walk.finish()
    return replace(_account(run, tokens, gaps, final), starved=starved, rounding=rounding)


def _changes(finished: Mapping[str, Tensor], merged: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of a finished block that are not as merged: the others lie where a run without interruption has them,
    which can show in the last bit of a product."""
    return {name: tensor for name, tensor in finished.items() if not tensor.equal(merged[name])}


def _find_starved(
    stage: Stage, block: Block, config: CalibrationConfig, solved: Collection[str]
) -> dict[str, list[str]]:
    """Experts of a block's mixtures that were to be calibrated and were not solved, by name inside the block, under the
    name of the block if there are any.

    Args:
        solved: names of the tensors that were; where an interrupted run solved them, of those that are not as merged.
    """
    fitted = calibrated_maps(stage, block, config)
    whole = {
        name.rpartition(".")[0]: f"{block.stored_name(name)}.weight" for name in fitted if name not in block.linears
    }
    found = [member for member, tensor in whole.items() if tensor not in solved]
    return {block.name: found} if found else {}


def _account(
    run: Run, tokens: Mapping[str, int], gaps: Mapping[str, Mapping[str, Gap]], final: Mapping[str, FinalDrift]
) -> Account:
    """The account of all tasks, of those that several ranks share from all their parts."""
    found = run.ranks.all_gather((tokens, gaps, run.ranks.select_led(final)))
    tasks = [*dict.fromkeys(task for own, _, _ in found for task in own)]

    def whole(block: str, task: str) -> float:
        own = [gap[block][task] for _, gap, _ in found if task in gap[block]]
        return math.sqrt(sum(gap for gap, _ in own) / sum(scale for _, scale in own))

    return Account(
        {task: sum(own.get(task, 0) for own, _, _ in found) for task in tasks},
        {block: {task: whole(block, task) for task in tasks} for block in gaps},
        {task: one for _, _, own in found for task, one in own.items()},
    )


def _read(run: Run, block: Block) -> dict[str, Tensor]:
    with run.seconds("load"):
        return run.merged.read(block.names)


def _enter(
    run: Run, walk: Walk, stage: Stage, experts: Mapping[str, ExpertPass], config: CalibrationConfig, outset: Outset
) -> Mapping[str, TaskRows]:
    """First calls of a stage on all lanes; which tokens count in it."""
    with run.seconds("first calls"):
        fronts = walk.enter(stage)
        outset.enter(fronts[STUDENT])
    return shared_rows(run.ranks, lane_rows(stage, walk.lanes[STUDENT], experts, config))


def _tokens(lanes: Mapping[str, Lane], experts: Mapping[str, ExpertPass]) -> dict[str, int]:
    def count(call: Call, batch: Batch) -> int:
        mask = batch.get("attention_mask")
        return call.hidden_state.shape[:-1].numel() if mask is None else int(mask.sum())

    return {task: sum(map(count, lane.calls, experts[task].batches)) for task, lane in lanes.items()}


def _reuse_or_count(
    run: Run,
    walk: Walk,
    moments: BlockMoments,
    merged: Mapping[str, Tensor],
    rows: Mapping[str, TaskRows],
    first: FirstBlock | None,
    experts: Mapping[str, ExpertPass],
) -> BlockMoments:
    """The statistics of a block: those of the last run, if `first` has them and they hold, or counted now; none of a
    block in which nothing is calibrated."""
    config, block = moments.config, moments.block
    if not moments.modules:
        _replay(walk, moments.stage, block)
        return moments
    known = None if first is None else first.take(run.merged, experts, config)
    if known is not None:
        _replay(walk, moments.stage, block)
        return known
    count_block(run, walk, [moments], merged, rows)
    if first is not None:
        first.keep(run.merged, experts, config, moments)
    return moments


def _replay(walk: Walk, stage: Stage, block: Block) -> None:
    """Run every expert through a block that needs no counting."""
    for task, tensors in walk.experts_at(block):
        for _ in walk.experts[task].walk(stage, block, tensors):
            pass


def count_block(
    run: Run, walk: Walk, moments: Sequence[BlockMoments], merged: Mapping[str, Tensor], rows: Mapping[str, TaskRows]
) -> None:
    """Run all tasks through a block on both streams and count them, one expert in memory at a time.

    The experts are behind the block then, the student is in front of it. Numerical errors name block and task.

    Args:
        moments: of one block; several differ in alpha alone.
        merged: what the student's block is made of, by canonical name.
    """
    block = moments[0].block
    student = block.local(run.compute.place(merged))
    for task, tensors in walk.experts_at(block):
        lanes = walk.lanes[STUDENT][task], walk.experts[task]
        _count_task(run.seconds, moments, lanes, (student, tensors), rows[task])
        with run.seconds("moments"), prefix_errors(f"{block.name}, task '{task}'"):
            for one in moments:
                end_task(run.ranks, one, tensors)
        run.store.settle()


def _count_task(
    seconds: Seconds,
    moments: Sequence[BlockMoments],
    lanes: tuple[Lane, Lane],
    tensors: tuple[Mapping[str, Tensor], Mapping[str, Tensor]],
    rows: TaskRows,
) -> None:
    """Args: `lanes` and `tensors` are the student's and the expert's."""
    (student, expert), (placed, stored) = lanes, tensors
    first, steps = moments[0], None
    given = student.inputs(first.block, placed, first.modules, whole=not first.is_started)
    for position, inputs in enumerate(_time_each(seconds, "student forward", given)):
        for one in moments:
            one.see(inputs)
        if steps is None:
            asked = first.expert_modules(rows)
            steps = _time_each(seconds, "expert forward", expert.walk(first.stage, first.block, stored, *asked))
        step = next(steps)
        with seconds("moments"):
            for one in moments:
                one.update(rows, position, inputs, step, stored)
    for _ in steps or ():  # runs the walk to its end
        pass


def _time_each(seconds: Seconds, stage: str, things: Iterable[T]) -> Iterator[T]:
    """The same things, with the time that each takes to come counted to a stage."""
    coming = iter(things)
    while True:
        with seconds(stage):
            try:
                thing = next(coming)
            except StopIteration:
                return
        yield thing


def _deploy(
    run: Run,
    walk: Walk,
    stage: Stage,
    block: Block,
    stored: Mapping[str, Tensor] | None,
    experts: Mapping[str, ExpertPass],
) -> dict[str, Gap]:
    """Run every task's deployed stream through the finished block; None for one that all streams are behind already.

    Returns:
        By task how far the calibrated stream is from the expert's, over the stage's own tokens after the block.

    Raises:
        NumericalError: it is not finite.
    """
    run.store.settle()
    deployed = None if stored is None else block.local(run.compute.place(stored))
    found: dict[str, Gap] = {}
    for task, lane in walk.lanes[STUDENT].items():
        drift, scale = (torch.zeros((), dtype=torch.float64, device=run.compute.device) for _ in range(2))
        passed = lane.calls if deployed is None else (step.after for step in lane.walk(stage, block, deployed))
        reached = _time_each(run.seconds, "student forward", passed)
        for call, own, batch in zip(reached, walk.experts[task].calls, experts[task].batches, strict=True):
            target = stage.own_state(own, batch)
            drift += (stage.own_state(call, batch) - target).double().square().sum()
            scale += target.double().square().sum()
        found[task] = float(drift), float(scale)
        if not math.isfinite(share := float(drift / scale)):
            raise NumericalError(
                f"{block.name}, task '{task}': relative drift is {share}: the calibrated features are not finite"
            )
    return found

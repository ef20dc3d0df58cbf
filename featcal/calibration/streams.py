"""Run student and expert side by side through the blocks, on the samples of every task. A *stream* is the features of
one of them. The student's stream passes the calibrated blocks, so that a block is fitted to its inputs in the deployed
model (Eq. 45). The expert runs on its own stream, never on the student's; targets (Eq. 10) mix the inputs of the same
module in both streams.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from featcal.calibration.block_statistics import BlockStatistics
from featcal.calibration.distributed import end_task, shared_rows
from featcal.calibration.store import prefix_errors
from featcal.calibration.token_rows import Named, TaskRows, lane_rows
from featcal.formats.weights import Weights
from featcal.models.adapter import Batch, Block, Call, Stage, TokenOptions
from featcal.models.compute import find_device, widen
from featcal.models.context import Run
from featcal.models.lane import BlockStep, ExpertPass, StageEntrance, WalkCache
from featcal.models.walk import BlockwiseForward
from featcal.system.errors import NumericalError
from featcal.system.progress import Seconds

T = TypeVar("T")
Gap = tuple[float, float]
"""Sums over samples and tokens of ||h_cal - h_exp||^2 and of ||h_exp||^2."""
_STUDENT = "student"


class Streams:
    """Streams of student and expert of every task, for use inside `walking`.

    Args:
        label: name of the walk for progress.
        passes: one expert pass per task; their batches are the samples.
        student: the model under calibration, before its first block.
    """

    def __init__(self, run: Run, label: str, passes: Mapping[str, ExpertPass], student: Weights) -> None:
        self.run, self._passes = run, passes
        self.walk = BlockwiseForward(run, label, passes, {_STUDENT: student})
        self.student, self.experts = self.walk.lanes[_STUDENT], self.walk.experts
        """Lanes of student and expert, by task."""
        self.rows: Mapping[str, TaskRows] = {}
        """Tokens of the stage with non-zero weight, with their weights, by task (`find_rows`)."""

    def directions(self, task: str, block: Block) -> Named:
        """Return, per linear map of the block, the margin gradients of a task's expert
        (`decisions.measure_margin_gradients`)."""
        found = self._passes[task].directions
        own = {name: block.stored_name(name) for name in block.linears}
        return {name: found[stored] for name, stored in own.items() if stored in found}

    @property
    def room(self) -> WalkCache | None:
        """Return the cache for the next walk of the same experts; None if there is none, or
        if this process has only a part of the tasks.
        """
        rooms = {id(one.kept): one.kept for one in self._passes.values()}
        return None if self.run.ranks.several or len(rooms) > 1 else next(iter(rooms.values()))

    def enter(self, stage: Stage) -> StageEntrance:
        """Make the first calls of a stage on all lanes; return the student's `StageEntrance`."""
        return self.walk.enter(stage)[_STUDENT]

    def find_rows(self, stage: Stage, options: TokenOptions) -> None:
        """Find the tokens with non-zero weight of a stage that the lanes have entered;
        masks are the same in all of its blocks.
        """
        self.rows = shared_rows(self.run.ranks, lane_rows(stage, self.student, self._passes, options))

    def count_tokens(self) -> dict[str, int]:
        """Return the number of every task's tokens in this stage without padding; for pictures with a text, those of
        the text."""

        def count(call: Call, batch: Batch) -> int:
            mask = batch.get("attention_mask")
            return call.hidden_state.shape[:-1].numel() if mask is None else int(mask.sum())

        return {task: sum(map(count, lane.calls, self._passes[task].batches)) for task, lane in self.experts.items()}

    def count(self, every: Sequence[BlockStatistics], merged: Mapping[str, Tensor]) -> None:
        """Collect the statistics of one snapshot of a block on all tasks, one expert in memory at a time (Algorithm 1,
        lines 3, 7 and 8).

        Afterwards the experts have passed the block; the student stays before it until the block is calibrated.

        Args:
            every: empty statistics of one block; several may differ in alpha and use the same features.
            merged: tensors of the student's block, by canonical name.

        Raises:
            NumericalError: features are not finite, or no token of a task has weight; the message names block and task.
        """
        run, block = self.run, every[0].block
        student = block.local(run.compute.place(merged))
        for task, expert in self.walk.experts_at(block):
            self._count_task(task, every, student, expert)
            with run.seconds("moments"), prefix_errors(f"{run.adapter.name_of(block)}, task '{task}'"):
                for statistics in every:
                    end_task(run.ranks, statistics, expert)
            run.store.settle()

    def _count_task(self, task: str, every: Sequence[BlockStatistics], student: Named, expert: Named) -> None:
        """Add all batches of a task; `student` and `expert` are the tensors of their blocks by name inside it."""
        first, rows, seconds = every[0], self.rows[task], self.run.seconds
        given = self.student[task].inputs(first.block, student, first.modules, whole=not first.is_started)
        steps: Iterator[BlockStep] | None = None
        for position, x_cal in enumerate(_time_each(seconds, "student forward", given)):
            for statistics in every:
                statistics.see(x_cal)
            if steps is None:  # only now: the student's inputs tell which features of the expert are needed
                walked = self.experts[task].walk(first.stage, first.block, expert, *first.expert_modules(rows))
                steps = _time_each(seconds, "expert forward", walked)
            step = next(steps)
            with seconds("moments"):
                for statistics in every:
                    statistics.update(rows, position, x_cal, step, expert)
        for _ in steps or ():  # no batch is left, but a lane keeps its steps for the next walk only at the end of one
            pass

    def deploy(self, stage: Stage, block: Block, calibrated: Mapping[str, Tensor] | None) -> dict[str, Gap]:
        """Run the student of every task through the calibrated block (Algorithm 1, line 17).

        Args:
            calibrated: stored tensors of the block, by canonical name; None if the student has already passed the
                block.

        Returns:
            The distance of the student from the expert after the block, by task, over the stage's own tokens.

        Raises:
            NumericalError: a distance is not finite; the message names block and task.
        """
        run = self.run
        run.store.settle()
        placed = None if calibrated is None else block.local(run.compute.place(calibrated))
        found: dict[str, Gap] = {}
        for task, lane in self.student.items():
            # Summed on the device: one transfer per task, not one per batch.
            drift, scale = (
                torch.zeros((), dtype=torch.float64, device=find_device(run.compute.device, torch.float64))
                for _ in range(2)
            )
            behind = lane.calls if placed is None else (step.after for step in lane.walk(stage, block, placed))
            reached = _time_each(run.seconds, "student forward", behind)
            batches = self._passes[task].batches
            for call, own, batch in zip(reached, self.experts[task].calls, batches, strict=True):
                target = stage.own_state(own, batch)
                drift += widen(stage.own_state(call, batch) - target).square().sum()
                scale += widen(target).square().sum()
            found[task] = float(drift), float(scale)
            if not math.isfinite(share := float(drift / scale)):
                name = run.adapter.name_of(block)
                raise NumericalError(
                    f"{name}, task '{task}': relative drift is {share}: the calibrated features are not finite"
                )
        return found


def _time_each(seconds: Seconds, stage: str, things: Iterable[T]) -> Iterator[T]:
    """Yield the same items, and measure how long each takes to compute, as a stage of the work."""
    coming = iter(things)
    while True:
        with seconds(stage):
            try:
                thing = next(coming)
            except StopIteration:
                return
        yield thing

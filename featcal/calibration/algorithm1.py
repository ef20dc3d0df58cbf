"""Run Algorithm 1: calibrate the merged model block by block in forward order."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from featcal.calibration.baseline_drift import BaselineDrift, FinalDrift
from featcal.calibration.block_statistics import BlockStatistics, FirstBlock
from featcal.calibration.config import calibrated_blocks, calibrated_maps
from featcal.calibration.refined_recipe import Pieces
from featcal.calibration.rounding import Rounding
from featcal.calibration.store import SolvedTensors, Watch, solve_block, watch_nothing
from featcal.calibration.streams import Gap, Streams
from featcal.models.adapter import Block, Stage, walking
from featcal.models.context import Run
from featcal.models.lane import ExpertPass
from featcal.suite.calibration_options import PAPER, CalibrationConfig


@runtime_checkable
class Blocks(Protocol):
    """Store of solved blocks, including those of an interrupted run."""

    def read_finished(self, block: Block) -> dict[str, Tensor] | None:
        """Return the tensors of a block that an earlier run solved, by canonical name; None if it did not."""

    def facts(self, block: Block) -> Rounding:
        """Return the facts that were passed to `put` with a finished block."""

    def put(self, block: Block, tensors: dict[str, Tensor], facts: Rounding) -> None:
        """Store a solved block: its tensors by canonical name, in their storage dtype, the scales of quantised ones,
        and the rounding error."""


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
    """Report of a calibration run: token counts, remaining drift, MoE experts left unsolved, rounding error."""

    tokens: Mapping[str, int]
    """Token counts by task in the first stage; see `Streams.count_tokens`."""
    drift: Mapping[str, Mapping[str, float]]
    """Relative drift by block and task: ||h_cal - h_exp|| / ||h_exp|| of the calibrated stream, over the tokens of the
    block's own stage (`Stage.own_state`): for a T5 decoder block those of the decoder.
    """
    final: Mapping[str, FinalDrift]
    """Final drift by task; empty unless the merged model ran beside the calibration."""
    starved: Mapping[str, Sequence[str]]
    """Starved experts by block: experts of a mixture that keep the merged weights because they got too few tokens
    (`RoutedGroup`), by name inside the block; blocks without any are left out.
    """
    rounding: Mapping[str, Rounding]
    """Rounding errors by block; for a block that an interrupted run solved, those of that run."""


class ForwardOrder:
    """Algorithm 1 of the paper (Appendix H) on the models of one suite, to be run once.

    Args:
        run: base and merged model, and the resources of the calibration.
        experts: one expert pass per task; their batches are the calibration samples.
        blocks: store of solved blocks; finished blocks are not solved again.
        first: cache for the statistics of the first calibrated block.
        watch: called with the complete statistics of every block, or piece, before its solve.
    """

    def __init__(
        self,
        run: Run,
        experts: Mapping[str, ExpertPass],
        config: CalibrationConfig,
        blocks: Blocks,
        first: FirstBlock | None = None,
        watch: Watch = watch_nothing,
    ) -> None:
        self.run, self.experts, self.config, self.blocks = run, experts, config, blocks
        self.chosen = calibrated_blocks(run.adapter, config)
        with walking(run.adapter):
            self.streams = Streams(run, "calibrating", experts, run.merged)  # line 1: the student is the merged model
        self.pieces = None if config.recipe == PAPER else Pieces(self.streams, config, watch)
        self._baseline = BaselineDrift(run, experts)
        self._first, self._watch = first, watch
        self._tokens: Mapping[str, int] = {}
        self._gaps: dict[str, Mapping[str, Gap]] = {}
        self._starved: dict[str, Sequence[str]] = {}
        self._rounding: dict[str, Rounding] = {}

    def calibrate(self) -> Account:
        """Run Algorithm 1:

            1       the student M_cal starts as the merged model M_mer
            2       for each block in forward order
            3           run the student's block on the student's stream and every expert's own block on its own, and
                        cache the inputs X_cal and X_exp of all modules, from this one snapshot
            4, 5        for each linear map, with W_mer, W_base and the experts' W_i
            6 - 8           X_tgt (Eq. 10), then G_i and C_i (Eq. 13), then the weight of the task omega_i (Eq. 14)
            9               W_anc (Eq. 11), then the weight in closed form (Eq. 17)
            10 - 12         its bias, if it has one (Eq. 55), fitted to the stored weight if that is quantised
            13 - 15     for each LayerNorm scale and shift from its normalised inputs (Eq. 59)
            17          load all solutions into M_cal, at once

        With line 17 the student's block runs again, on its new weights in the dtype they are stored in, so that the
        next block is calibrated on its inputs in the deployed model (Eq. 45). featcal's own recipes calibrate a block
        piece by piece instead (`Pieces`).

        Raises:
            NumericalError: features that are not finite, or a system that cannot be solved; the message names the
                block.
            InputError: an architecture that cannot be run block by block; the message names the block.
        """
        run, streams, blocks = self.run, self.streams, self.blocks
        with walking(run.adapter), run.seconds("calibration"):
            for stage in run.adapter.stages:
                self._enter(stage)
                for index, block in streams.walk.blocks(stage):  # line 2
                    merged, finished = self._read_merged(stage, block), blocks.read_finished(block)
                    # The recipes that work piece by piece take the student through the block as they solve it.
                    student_is_behind = False
                    if finished is not None:  # by the interrupted run that this one resumes
                        streams.walk.pass_experts(stage, block)
                        solved = SolvedTensors.from_finished(finished, merged, blocks.facts(block))
                    elif self.pieces is not None and block.name in self.chosen:
                        solved, student_is_behind = self.pieces.calibrate(stage, index), True
                    else:
                        statistics = self._count(stage, index, merged)  # lines 3 to 8
                        self._watch(statistics)
                        solved = solve_block(run, statistics, merged)  # lines 9 to 15
                    calibrated = merged | solved.tensors
                    if finished is None:
                        blocks.put(block, calibrated | solved.scales, solved.rounding)
                    gaps = streams.deploy(stage, block, None if student_is_behind else calibrated)  # line 17
                    self._note(stage, block, solved, gaps)
            final = self._baseline.measure(streams.experts, streams.student)
            streams.walk.finish()
        return self._account(final)

    def _enter(self, stage: Stage) -> None:
        """Make the first calls of a stage, and find the tokens with non-zero weight."""
        with self.run.seconds("first calls"):
            self._baseline.enter(self.streams.enter(stage))
        self.streams.find_rows(stage, self.config)
        self._tokens = self._tokens or self.streams.count_tokens()

    def _read_merged(self, stage: Stage, block: Block) -> dict[str, Tensor]:
        """Return the merged model's tensors of a block by canonical name, W_mer among them."""
        with self.run.seconds("load"):
            merged = self.run.merged.read(block.names)
        self._baseline.advance(stage, block, merged)
        return merged

    def _count(self, stage: Stage, index: int, merged: Mapping[str, Tensor]) -> BlockStatistics:
        """Collect the statistics of a block from both streams, or reuse those in `first`;
        none for a block in which nothing is calibrated.
        """
        block = stage.blocks[index]
        statistics = BlockStatistics(stage, index, self.config, block.name in self.chosen)
        if not statistics.modules:
            self.streams.walk.pass_experts(stage, block)
            return statistics
        first, self._first = self._first, None  # later blocks depend on what was solved of this one
        kept = None if first is None else first.take(self.run.merged, self.experts, self.config)
        if kept is not None:
            self.streams.walk.pass_experts(stage, block)
            return kept
        self.streams.count([statistics], merged)
        if first is not None:
            first.keep(self.run.merged, self.experts, self.config, statistics)
        return statistics

    def _note(self, stage: Stage, block: Block, solved: SolvedTensors, gaps: Mapping[str, Gap]) -> None:
        """Record the student's distance from the experts after a block, the block's rounding error, and the unsolved
        experts of its mixtures."""
        self._gaps[block.name], self._rounding[block.name] = gaps, solved.rounding
        fitted = calibrated_maps(stage, block, self.config) if block.name in self.chosen else {}
        members = {
            name.rpartition(".")[0]: f"{block.stored_name(name)}.weight"
            for name in fitted
            if name in block.maps and name not in block.linears
        }
        if starved := [member for member, tensor in members.items() if tensor not in solved.tensors]:
            self._starved[block.name] = starved

    def _account(self, final: Mapping[str, FinalDrift]) -> Account:
        """Return the report on all tasks; tasks that several ranks share are combined from all their parts."""
        ranks = self.run.ranks
        found = ranks.all_gather((self._tokens, self._gaps, ranks.select_led(final)))
        tasks = [*dict.fromkeys(task for own, _, _ in found for task in own)]

        def drift(block: str, task: str) -> float:
            # Squares are added over the ranks that share a task, before the root is taken.
            own = [gaps[block][task] for _, gaps, _ in found if task in gaps[block]]
            return math.sqrt(sum(gap for gap, _ in own) / sum(scale for _, scale in own))

        return Account(
            {task: sum(own.get(task, 0) for own, _, _ in found) for task in tasks},
            {block: {task: drift(block, task) for task in tasks} for block in self._gaps},
            {task: one for _, _, own in found for task, one in own.items()},
            self._starved,
            self._rounding,
        )

"""Solve one block with other options while all blocks before it stay, for a slider before the exact run.

The block's weights are exact for the inputs of the last exact run; an exact run in float32 differs from them only by
rounding. New options would also change the blocks before it, and thus its inputs; a preview ignores this, and computes
nothing after the block. So the preview of the first calibrated block is exact, and previews of later blocks are better
the less the options change. Recipes that solve a block piece by piece solve every piece on the output of the pieces
before it, which keep the solutions of the exact run: even in the first block only the first pieces are exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from featcal.calibration.anchor import read_merged_and_base
from featcal.calibration.block_statistics import BlockStatistics, corners
from featcal.calibration.column_rounding import rounder_of
from featcal.calibration.config import resolve_options
from featcal.calibration.linear_group import LinearGroup
from featcal.calibration.refined_recipe import Pieces
from featcal.calibration.store import to_stored
from featcal.calibration.streams import Streams
from featcal.formats.weights import Weights
from featcal.models.adapter import Batch, Block, Call, Stage, walking
from featcal.models.compute import widen
from featcal.models.context import Run
from featcal.models.lane import ExpertPass, run_block
from featcal.suite.calibration_options import NUMBERS, PAPER, CalibrationConfig
from featcal.system.errors import InputError
from featcal.system.formatting import did_you_mean


@dataclass(frozen=True)
class Before:
    """One batch of a task before the block, on the samples that measure drift."""

    call: Call
    """Call of the block in the model of the exact run."""
    target: Tensor
    """The expert's state after it."""
    batch: Batch


@dataclass(frozen=True)
class BlockPreview:
    """Solution of a block with other options."""

    config: CalibrationConfig
    layer: str
    tensors: Mapping[str, Tensor]
    """All tensors of the block, by canonical name, in their storage form."""
    drift: Mapping[str, float]
    """Relative drift after the block, by task: mean over samples of ||h_model - h_expert||
    over the mean of ||h_expert||.
    """


@dataclass(frozen=True)
class Preview:
    """One block of an exact run: its statistics with the options of `corners`, and the states before it of the samples
    that measure drift."""

    config: CalibrationConfig
    """Options of the exact run."""
    layer: str
    run: Run
    stage: Stage
    block: Block
    statistics: Sequence[Sequence[BlockStatistics]]
    """Statistics of the block, or of each of its pieces, with the options of `corners`."""
    sums: Sequence[object]
    """Tensors of the statistics and of the merged block, listed so that the session's cache can compute their size
    (`featcal.session.cache.nbytes`).
    """
    merged: Mapping[str, Tensor]
    """The merged tensors of the block: a merge that is a recipe would be merged again at every solve."""
    before: Mapping[str, Sequence[Before]]
    reached: Mapping[str, float]
    """Relative drift after the block in the exact run, by task."""

    def solve(self, config: CalibrationConfig) -> BlockPreview:
        """Solve the block with other numbers of its recipe, or other biases, by the closed form alone.

        Raises:
            InputError: another option differs, which needs an exact run, or a part does not exist.
            NumericalError: a system that cannot be solved with these options.
        """
        config = resolve_options(config, self.run.adapter, self.before)
        free = (*(name for name in NUMBERS[self.config.recipe] if name != "mu" or self.config.mu), "biases")
        if replace(config, **{name: getattr(self.config, name) for name in free}) != self.config:
            raise InputError(f"a preview can differ from its exact run in {', '.join(free)} alone; make an exact run")
        run, block = self.run, self.block
        with walking(run.adapter):
            merged = dict(self.merged)
            models = read_merged_and_base(run, block, merged, config.rho)
            solved: dict[str, Tensor] = {}
            for counted in self.statistics:
                # Targets are affine in alpha and beta, so those of any values follow from the corners.
                for group in BlockStatistics.combine(counted, config).groups:
                    more = (rounder_of(config),) if isinstance(group, LinearGroup) else ()
                    solved |= group.solve(*models, config, *more)
            tensors = merged | to_stored(block, merged, solved)
            return BlockPreview(config, self.layer, tensors, _drift(run, self.stage, block, tensors, self.before))


def build_preview(
    run: Run,
    config: CalibrationConfig,
    model: Weights,
    layer: str,
    fitted: Mapping[str, ExpertPass],
    measured: Mapping[str, ExpertPass],
) -> Preview:
    """Run the models up to one block of an exact run, and store the inputs of its previews.

    Args:
        config, model: options and result of the exact run.
        layer: name of the block in tables.
        fitted: the calibration samples.
        measured: the samples that measure drift, of every task that options may name.

    Raises:
        InputError: there is no such block, nothing in it is calibrated, or the options name parts that do not exist.
    """
    adapter = run.adapter
    config = resolve_options(config, adapter, measured)
    if config.decisions:
        raise InputError(
            "there is no preview with decisions, which would have to store the directions of every expert; set "
            "decisions to 0"
        )
    names = {layer: name for name, layer in adapter.block_names().items()}
    if layer not in names:
        raise InputError(f"no block '{layer}', only {', '.join(names)}.{did_you_mean(layer, names)}")
    with walking(adapter):
        streams, stage, index = _walk_to(run, fitted, model, names[layer])
        block, chosen = stage.blocks[index], config.blocks is None or layer in config.blocks
        streams.find_rows(stage, config)
        whole = [BlockStatistics(stage, index, one, chosen) for one in corners(config)]
        if not whole[0].modules:
            raise InputError(f"{layer}: these options do not calibrate this block, so there is nothing to preview")
        if config.recipe == PAPER:
            streams.count(whole, run.merged.read(block.names))
            statistics = [whole]
        else:
            statistics = _count_pieces(streams, config, stage, index)
        streams, _, _ = _walk_to(run, measured, model, names[layer])
        before = {
            task: _collect_states(streams, task, stage, block, expert)
            for task, expert in streams.walk.experts_at(block)
        }
        reached = _drift(run, stage, block, model.read(block.names), before)
    merged = run.merged.read(block.names)
    sums = [*merged.values(), *(group.sums for every in statistics for one in every for group in one.groups)]
    return Preview(config, layer, run, stage, block, statistics, sums, merged, before, reached)


def _count_pieces(streams: Streams, config: CalibrationConfig, stage: Stage, index: int) -> list[list[BlockStatistics]]:
    """Calibrate a block as the exact run did, and keep the statistics of its pieces (with
    the end points of alpha and beta, `corners`).
    """
    found: list[BlockStatistics] = []
    also = corners(config)
    Pieces(streams, config, lambda one: found.append(one.with_config(one.config)), also).calibrate(stage, index)
    every = 1 + len(also)
    # Every piece is watched with the options of the run first; these are not corners.
    return [found[start + 1 : start + every] for start in range(0, len(found), every)]


def _drift(
    run: Run, stage: Stage, block: Block, tensors: Mapping[str, Tensor], before: Mapping[str, Sequence[Before]]
) -> dict[str, float]:
    """Return the relative drift by task after a block with these `tensors`, from the stored states before it."""
    found = {}
    placed = block.local(run.compute.place(tensors))
    for task, batches in before.items():
        drift = norm = 0.0
        for one in batches:
            after = stage.state(run_block(stage, block, placed, one.call), one.batch)
            drift += float(widen(after - one.target).flatten(1).norm(dim=1).sum())
            norm += float(widen(one.target).flatten(1).norm(dim=1).sum())
        found[task] = drift / norm
    return found


def _walk_to(run: Run, passes: Mapping[str, ExpertPass], model: Weights, name: str) -> tuple[Streams, Stage, int]:
    """Advance both streams up to a block, named by the prefix of its tensors; return them, its stage and index."""
    streams = Streams(run, "walking to a block", passes, model)
    for stage in run.adapter.stages:
        streams.enter(stage)
        for index, block in streams.walk.blocks(stage):
            if block.name == name:
                return streams, stage, index
            student = block.local(run.compute.place(model.read(block.names)))
            streams.walk.pass_experts(stage, block)
            for lane in streams.student.values():
                lane.pass_block(stage, block, student)
    raise AssertionError(name)


def _collect_states(
    streams: Streams, task: str, stage: Stage, block: Block, expert: Mapping[str, Tensor]
) -> list[Before]:
    """Collect the student's call of the block for every batch of a task, and the expert's output."""
    lane = streams.student[task]
    steps = zip(lane.calls, streams.experts[task].walk(stage, block, expert), lane.batches, strict=True)
    return [Before(call, stage.state(step.after, batch), batch) for call, step, batch in steps]

"""Algorithm 1: calibrate the merged model block by block in forward order."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from featcal.calibration.config import CalibrationConfig
from featcal.calibration.moments import BlockMoments
from featcal.errors import NumericalError
from featcal.models.adapter import Adapter, Batch, Block, Call, Stage
from featcal.models.capture import capture_inputs
from featcal.models.expert_pass import ExpertPass, first_calls
from featcal.models.weights import Compute, Weights
from featcal.progress import Progress, silent

Put = Callable[[Block, dict[str, Tensor]], None]
"""Takes a solved block: its tensors by canonical name, in the dtype they are stored in."""
Finished = Callable[[Block], dict[str, Tensor] | None]
"""Gives the tensors of a block that an earlier run solved, or None."""


def nothing_finished(block: Block) -> None:
    """No block was solved before."""


@torch.no_grad()
def calibrate_blocks(
    adapter: Adapter,
    base: Weights,
    merged: Weights,
    experts: Mapping[str, ExpertPass],
    config: CalibrationConfig,
    compute: Compute,
    put: Put,
    finished: Finished = nothing_finished,
    progress: Progress = silent,
) -> dict[str, dict[str, float]]:
    """Algorithm 1 of the paper (Appendix H).

    1. The student starts as the merged model; every task has a student stream and an expert stream.
    2. For each block in forward order:
       a. run every expert's own block on its own stream and the student's block on the deployed stream,
          counting the moments of every linear map and LayerNorm from this one snapshot (Eqs. 13, 52, 56);
       b. solve all modules of the block in closed form (Eqs. 17, 55, 59);
       c. load them at once, in the dtype they will be stored in, and hand them to `put`;
       d. rerun the student's block, so that the next block sees what the deployed model will see (Eq. 45).

    Args:
        experts: one expert pass per task; their batches are the calibration samples.
        finished: tensors of a block that an earlier run completed, which is then only replayed.

    Returns:
        For each block and task the relative drift ||h_cal - h_exp|| / ||h_exp|| of the calibrated stream.

    Raises:
        NumericalError: features that are not finite, or a system that cannot be solved; names the block.
    """
    residuals: dict[str, dict[str, float]] = {}
    streams: dict[str, list[Call]] = {task: [] for task in experts}
    total = sum(len(stage.blocks) for stage in adapter.stages)
    for stage in adapter.stages:
        outer = compute.place(merged.read(stage.outer))
        for task, expert in experts.items():
            expert.start(stage)
            streams[task] = first_calls(stage, outer, expert.batches, streams[task])
        for index, block in enumerate(stage.blocks):
            progress("calibrating", len(residuals), total)
            stored = merged.read(block.names)
            student = block.local(compute.move(stored))
            before = finished(block)
            moments = BlockMoments(stage, index, config) if before is None else None
            targets = {
                task: _count_task(expert, stage, block, compute.place(student), streams[task], moments)
                for task, expert in experts.items()
            }
            if moments is not None:
                new = _solve(moments, block, student, block.local(compute.move(base.read(block.names))))
                stored |= {name: _stored(name, tensor, stored[name]) for name, tensor in new.items()}
                put(block, stored)
            deployed = block.local(compute.place(before or stored))
            for task in experts:
                streams[task] = [stage.advance(call, block.run(deployed, call)) for call in streams[task]]
            residuals[block.name] = {
                task: _relative_drift(stage, streams[task], expert.batches, targets[task])
                for task, expert in experts.items()
            }
    progress("calibrating", total, total)
    return residuals


def _count_task(
    expert: ExpertPass,
    stage: Stage,
    block: Block,
    student: Mapping[str, Tensor],
    stream: Sequence[Call],
    moments: BlockMoments | None,
) -> list[Tensor]:
    """Run one task through a block on both streams, count it, and return the expert's states after the block."""
    tensors = expert.tensors(block)
    after = []
    for call, batch, trace in zip(stream, expert.batches, expert.walk(stage, block, tensors), strict=True):
        after.append(stage.state(trace.after, batch))
        if moments is not None:
            with capture_inputs(block.module, moments.norm) as inputs:
                block.run(student, call)
            moments.update(call, batch, inputs, trace.outputs, tensors)
    if moments is not None:
        moments.end_task(tensors)
    return after


def _solve(
    moments: BlockMoments, block: Block, merged: Mapping[str, Tensor], base: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    try:
        return block.canonical(moments.solve(merged, base))
    except NumericalError as error:
        raise NumericalError(f"{block.name}: {error}") from error


def _stored(name: str, solved: Tensor, old: Tensor) -> Tensor:
    """The solution in the dtype and place of the tensor it replaces; NumericalError if it does not fit."""
    new = solved.to(old)
    if not bool(torch.isfinite(new).all()):
        raise NumericalError(f"{name}: the solution does not fit {old.dtype}; raise lam or store the model wider")
    return new


def _relative_drift(stage: Stage, stream: Sequence[Call], batches: Sequence[Batch], expert: Sequence[Tensor]) -> float:
    """||h_cal - h_exp|| / ||h_exp|| over all samples and tokens of a task; NumericalError if not finite."""
    drift = sum(
        float((stage.state(call, batch) - own).double().square().sum())
        for call, batch, own in zip(stream, batches, expert, strict=True)
    )
    scale = sum(float(own.double().square().sum()) for own in expert)
    value = float((drift / scale) ** 0.5)
    if not math.isfinite(value):
        raise NumericalError(f"relative drift is {value}: the calibrated features are not finite")
    return value

"""Algorithm 1: calibrate the merged model block by block in forward order."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from featcal.calibration.config import CalibrationConfig
from featcal.calibration.moments import BlockMoments
from featcal.errors import NumericalError
from featcal.models.activations import ActivationStore, CallList
from featcal.models.adapter import Adapter, Block, Stage
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
    store: ActivationStore | None = None,
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
        store: holds the student's stream between blocks; in memory without one.

    Returns:
        For each block and task the relative drift ||h_cal - h_exp|| / ||h_exp|| of the calibrated stream.

    Raises:
        NumericalError: features that are not finite, or a system that cannot be solved; names the block.
    """
    residuals: dict[str, dict[str, float]] = {}
    streams: dict[str, CallList] = {}
    store = store or ActivationStore()
    total = sum(len(stage.blocks) for stage in adapter.stages)
    for stage in adapter.stages:
        outer = compute.place(merged.read(stage.outer))
        for task, expert in experts.items():
            expert.start(stage)
            upstream = streams.get(task)
            calls = first_calls(stage, outer, expert.batches, upstream)
            streams[task] = store.hold(calls) if upstream is None else store.replace(upstream, calls)
        for index, block in enumerate(stage.blocks):
            progress("calibrating", len(residuals), total)
            stored = merged.read(block.names)
            student = block.local(compute.move(stored))
            before = finished(block)
            moments = BlockMoments(stage, index, config) if before is None else None
            running = compute.place(student)
            for task, expert in experts.items():
                _count_task(expert, stage, block, running, streams[task], moments)
            if moments is not None:
                new = _solve(moments, block, student, block.local(compute.move(base.read(block.names))))
                stored |= {name: _stored(name, tensor, stored[name]) for name, tensor in new.items()}
                put(block, stored)
            deployed = block.local(compute.place(before or stored))
            residuals[block.name] = {
                task: _advance_task(expert, stage, block, deployed, streams[task]) for task, expert in experts.items()
            }
    progress("calibrating", total, total)
    return residuals


def _count_task(
    expert: ExpertPass,
    stage: Stage,
    block: Block,
    student: Mapping[str, Tensor],
    stream: CallList,
    moments: BlockMoments | None,
) -> None:
    """Run one task through a block on both streams and count it."""
    tensors = expert.tensors(block)
    for call, batch, trace in zip(stream, expert.batches, expert.walk(stage, block, tensors), strict=True):
        if moments is not None:
            with capture_inputs(block.module, moments.norm, to_the_end=not moments.started) as inputs:
                block.run(student, call)
            moments.update(call, batch, inputs, trace.outputs, tensors, expert.tokens)
    if moments is not None:
        moments.end_task(tensors)


def _advance_task(
    expert: ExpertPass, stage: Stage, block: Block, deployed: Mapping[str, Tensor], stream: CallList
) -> float:
    """Run one task's deployed stream through the finished block.

    Returns:
        ||h_cal - h_exp|| / ||h_exp|| over all samples and tokens after the block.

    Raises:
        NumericalError: it is not finite.
    """
    drift = scale = 0.0
    for position, (call, batch, own) in enumerate(zip(stream, expert.batches, expert.calls(), strict=True)):
        after = stage.advance(call, block.run(deployed, call))
        stream[position] = after
        target = stage.state(own, batch)
        drift += float((stage.state(after, batch) - target).double().square().sum())
        scale += float(target.double().square().sum())
    value = float((drift / scale) ** 0.5)
    if not math.isfinite(value):
        raise NumericalError(f"{block.name}: relative drift is {value}: the calibrated features are not finite")
    return value


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

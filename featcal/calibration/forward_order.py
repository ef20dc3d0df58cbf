"""Algorithm 1: calibrate the merged model block by block in forward order."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import zip_longest

import torch
from torch import Tensor

from featcal.calibration.config import CalibrationConfig
from featcal.calibration.moments import BlockMoments, FirstBlock
from featcal.calibration.outset import Outset
from featcal.calibration.token_rows import TaskRows, task_rows
from featcal.errors import NumericalError
from featcal.formats.weights import Weights
from featcal.models.activations import ActivationStore, CallList
from featcal.models.adapter import Adapter, Block, Stage
from featcal.models.capture import capture_inputs
from featcal.models.compute import Compute
from featcal.models.expert_pass import BlockTrace, Entrance, ExpertPass
from featcal.progress import Progress, Seconds, silent

Put = Callable[[Block, dict[str, Tensor]], None]
"""Takes a solved block: its tensors by canonical name, in the dtype they are stored in."""
Finished = Callable[[Block], dict[str, Tensor] | None]
"""Gives the tensors of a block that an earlier run solved, or None."""


def nothing_finished(block: Block) -> None:
    """No block was solved before."""


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
    seconds: Seconds | None = None,
    first: FirstBlock | None = None,
    outset: Outset | None = None,
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
        seconds: where to add up seconds by stage: "first calls", "load", "student forward", "expert forward",
            "moments", "solve", "merged forward".
        first: keeps the statistics of the first block from run to run.
        outset: the merged model's own stream, to be walked beside the calibration.

    Returns:
        For each block and task the relative drift ||h_cal - h_exp|| / ||h_exp|| of the calibrated stream, over the
        tokens of the block's own stage (`Stage.own_state`): of a T5 decoder block those of the decoder.

    Raises:
        NumericalError: features that are not finite, or a system that cannot be solved; names the block.
    """
    residuals: dict[str, dict[str, float]] = {}
    streams: dict[str, CallList] = {}
    rows: dict[str, TaskRows] = {}
    store, seconds = store or ActivationStore(), Seconds() if seconds is None else seconds
    total = sum(len(stage.blocks) for stage in adapter.stages)
    for stage in adapter.stages:
        with seconds("first calls"):
            entrance = Entrance(stage, merged.read(stage.outer), compute)
            _enter(entrance, experts, streams, store)
            if outset is not None:
                outset.enter(stage, entrance.placed)
            for task, expert in experts.items():
                rows[task] = task_rows(stage, streams[task], expert.batches, config)
                expert.spend(stage)
        for index, block in enumerate(stage.blocks):
            progress("calibrating", len(residuals), total)
            stored = finished(block)
            if outset is not None or stored is None:
                with seconds("load"):
                    as_merged = merged.read(block.names)
            if outset is not None:
                with seconds("merged forward"):
                    outset.step(stage, block, as_merged)
            if stored is None:
                stored = as_merged
                keeper = first if not residuals else None
                moments = keeper.take(merged, experts, config) if keeper is not None else None
                if moments is None:
                    moments = BlockMoments(stage, index, config)
                    _count(moments, compute, stored, experts, streams, rows, store, seconds)
                    if keeper is not None:
                        keeper.keep(merged, experts, config, moments)
                else:
                    _walk_experts(stage, block, experts)
                with seconds("solve"):
                    stored |= _solve(moments, block, compute, stored, base)
                put(block, stored)
            else:
                _walk_experts(stage, block, experts)
            store.settle()
            deployed = block.local(compute.place(stored))
            with seconds("student forward"):
                residuals[block.name] = {
                    task: _advance(expert, stage, block, deployed, streams[task]) for task, expert in experts.items()
                }
    if outset is not None:
        outset.close(streams)
    progress("calibrating", total, total)
    return residuals


def _enter(
    entrance: Entrance,
    experts: Mapping[str, ExpertPass],
    streams: dict[str, CallList],
    store: ActivationStore,
) -> None:
    """First calls of a stage on both streams of every task; they replace the calls after the stage before."""
    for task, expert in experts.items():
        expert.start(entrance.stage)
        upstream = streams.get(task)
        calls = expert.enter(entrance, upstream)
        streams[task] = store.hold(calls) if upstream is None else store.replace(upstream, calls)


def _walk_experts(stage: Stage, block: Block, experts: Mapping[str, ExpertPass]) -> None:
    """Run every expert through a block that needs no counting."""
    for expert in experts.values():
        for _ in expert.walk(stage, block, expert.tensors(block)):
            pass


def _count(
    moments: BlockMoments,
    compute: Compute,
    stored: Mapping[str, Tensor],
    experts: Mapping[str, ExpertPass],
    streams: Mapping[str, CallList],
    rows: Mapping[str, TaskRows],
    store: ActivationStore,
    seconds: Seconds,
) -> None:
    """Run all tasks through a block on both streams and count them, one expert in memory at a time."""
    student = moments.block.local(compute.place(stored))
    for task, tensors in _read_ahead(experts, moments.block, store.budget is None, seconds):
        expert = experts[task]
        _count_task(moments, student, expert, tensors, streams[task], rows[task], seconds)
        with seconds("moments"):
            moments.end_task(tensors)
        store.settle()


def _read_ahead(
    experts: Mapping[str, ExpertPass], block: Block, ahead: bool, seconds: Seconds
) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Every expert's tensors of a block; with `ahead` the next ones are read while the last are computed with."""
    with ThreadPoolExecutor(1) as reader:
        reading: Future[dict[str, Tensor]] | None = None
        for task, following in zip_longest(experts, list(experts)[1:]):
            with seconds("load"):
                tensors = experts[task].tensors(block) if reading is None else reading.result()
            reading = reader.submit(experts[following].tensors, block) if ahead and following else None
            yield task, tensors
            del tensors


def _count_task(
    moments: BlockMoments,
    student: Mapping[str, Tensor],
    expert: ExpertPass,
    tensors: Mapping[str, Tensor],
    stream: CallList,
    rows: TaskRows,
    seconds: Seconds,
) -> None:
    walk: Iterator[BlockTrace] | None = None
    for position, call in enumerate(stream):
        with seconds("student forward"), capture_inputs(moments.modules, not moments.started) as inputs:
            moments.block.run(student, call)
        moments.see(inputs)
        walk = walk or expert.walk(moments.stage, moments.block, tensors, *moments.asked_of_expert(rows))
        with seconds("expert forward"):
            trace = next(walk)
        with seconds("moments"):
            moments.update(rows, position, inputs, trace, tensors)
    for _ in walk or ():  # runs the walk to its end
        pass


def _advance(expert: ExpertPass, stage: Stage, block: Block, deployed: Mapping[str, Tensor], stream: CallList) -> float:
    """Run one task's deployed stream through the finished block.

    Returns:
        ||h_cal - h_exp|| / ||h_exp|| over all samples and the stage's own tokens after the block.

    Raises:
        NumericalError: it is not finite.
    """
    drift, scale = (torch.zeros((), dtype=torch.float64, device=expert.compute.device) for _ in range(2))
    for position, (call, batch, own) in enumerate(zip(stream, expert.batches, expert.calls(), strict=True)):
        after = stage.advance(call, block.run(deployed, call))
        stream[position] = after
        target = stage.own_state(own, batch)
        drift += (stage.own_state(after, batch) - target).double().square().sum()
        scale += target.double().square().sum()
    value = float((drift / scale) ** 0.5)
    if not math.isfinite(value):
        raise NumericalError(f"{block.name}: relative drift is {value}: the calibrated features are not finite")
    return value


def _solve(
    moments: BlockMoments, block: Block, compute: Compute, stored: Mapping[str, Tensor], base: Weights
) -> dict[str, Tensor]:
    """Every calibrated tensor of a block by canonical name, in the dtype it is stored in."""
    merged, own = (block.local(compute.move(tensors)) for tensors in (stored, base.read(block.names)))
    try:
        solved = block.canonical(moments.solve(merged, own))
    except NumericalError as error:
        raise NumericalError(f"{block.name}: {error}") from error
    return {name: _stored(name, tensor, stored[name]) for name, tensor in solved.items()}


def _stored(name: str, solved: Tensor, old: Tensor) -> Tensor:
    """The solution in the dtype and place of the tensor it replaces; NumericalError if it does not fit."""
    new = solved.to(old)
    if not bool(torch.isfinite(new).all()):
        raise NumericalError(f"{name}: the solution does not fit {old.dtype}; raise lam or store the model wider")
    return new

"""Measure the merged model's final drift on a few samples, to warn if calibration raises it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from featcal.models.adapter import Batch, Block, Stage
from featcal.models.compute import widen
from featcal.models.context import Run
from featcal.models.lane import ExpertPass, ModelStream, StageEntrance
from featcal.system.spread import even_places

SAMPLES = 8
"""Number of calibration samples per task for this measurement, spread over its middle batch, because texts are sorted
by length and pictures by class. They cost one forward pass."""
ROUNDING = 1e-4
"""Smallest rise of the relative drift that causes a warning."""


@dataclass(frozen=True)
class FinalDrift:
    """||h_model - h_expert|| / ||h_expert|| of the final features before the projection, of one task."""

    samples: int
    merged: float
    calibrated: float


class BaselineDrift:
    """The merged model on a few samples of every task, run block by block along with the calibration.

    Args:
        experts: by task.
    """

    def __init__(self, run: Run, experts: Mapping[str, ExpertPass]) -> None:
        self._run = run
        self._places = {task: (len(one.batches) - 1) // 2 for task, one in experts.items()}
        """Index of the batch that gives a task's samples."""
        self._lanes = {
            task: ModelStream(run.merged, [few_samples(one.batches[self._places[task]])], run.compute, run.store)
            for task, one in experts.items()
        }

    def enter(self, front: StageEntrance) -> None:
        """Make the first calls of a stage."""
        for lane in self._lanes.values():
            for _ in lane.enter(front):
                pass
            lane.batches = [{n: t for n, t in batch.items() if n not in front.stage.spent} for batch in lane.batches]

    def advance(self, stage: Stage, block: Block, stored: Mapping[str, Tensor]) -> None:
        """Advance the merged model through a block; `stored` are its tensors by canonical name."""
        tensors = block.local(self._run.compute.place(stored))
        with self._run.seconds("merged forward"):
            for lane in self._lanes.values():
                lane.pass_block(stage, block, tensors)

    def measure(
        self, experts: Mapping[str, ModelStream], calibrated: Mapping[str, ModelStream]
    ) -> dict[str, FinalDrift]:
        """Compare the final features of the merged and the calibrated model with those of the experts, by task.

        Args:
            experts, calibrated: lanes by task, after the last block.
        """
        adapter, place = self._run.adapter, self._run.compute.place
        closing, found = place(self._run.merged.read(adapter.closing)), {}
        for task, lane in self._lanes.items():
            own = place(experts[task].weights.read(adapter.closing))
            which = self._places[task]
            batch, theirs = experts[task].batches[which], (experts[task].calls[which], calibrated[task].calls[which])
            target, reached = (
                widen(_few(adapter.final(tensors, calls, batch)))
                for tensors, calls in zip((own, closing), theirs, strict=True)
            )
            before = widen(adapter.final(closing, lane.calls[0], lane.batches[0]))
            apart = [float((features - target).norm() / target.norm()) for features in (before, reached)]
            found[task] = FinalDrift(len(target), *apart)
        return found


def few_samples(batch: Batch) -> dict[str, Tensor]:
    """Return at most `SAMPLES` of a batch."""
    return {name: _few(tensor) for name, tensor in batch.items()}


def _few(tensor: Tensor) -> Tensor:
    return tensor[even_places(len(tensor), SAMPLES)]


def warnings_of(drift: Mapping[str, FinalDrift]) -> list[str]:
    """Return one sentence per task whose final drift the calibration raised."""
    return [
        f"task '{task}': calibration raised the final relative drift from {one.merged:.4g} to {one.calibrated:.4g} "
        f"({one.samples} of its calibration samples); try another lam or rho, or more samples"
        for task, one in drift.items()
        if one.calibrated > one.merged + ROUNDING
    ]

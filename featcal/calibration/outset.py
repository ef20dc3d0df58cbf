"""What a calibration set out from: the final drift of the merged model, measured beside it on a few samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from featcal.formats.weights import Weights
from featcal.models.activations import ActivationStore, CallList
from featcal.models.adapter import Adapter, Batch, Block, Stage
from featcal.models.compute import Compute
from featcal.models.expert_pass import ExpertPass

SAMPLES = 8
"""Per task, the first of its calibration samples: one forward of the merged model on these is all that it costs."""
ROUNDING = 1e-4
"""A rise of the relative drift below this is not worth a word."""


@dataclass(frozen=True)
class FinalDrift:
    """||h_model - h_expert|| / ||h_expert|| of the final features before the projection, of one task."""

    samples: int
    merged: float
    calibrated: float


class Outset:
    """The merged model's own stream on the first samples of every task, walked while the blocks are calibrated."""

    def __init__(
        self,
        adapter: Adapter,
        merged: Weights,
        experts: Mapping[str, ExpertPass],
        compute: Compute,
        store: ActivationStore,
    ) -> None:
        self._adapter, self._merged, self._experts = adapter, merged, experts
        self._compute, self._store = compute, store
        self._batches = {task: first_samples(expert.batches[0]) for task, expert in experts.items()}
        self._calls: dict[str, CallList] = {}
        self.drift: dict[str, FinalDrift] = {}
        """By task, once the calibration is done."""

    def enter(self, stage: Stage, outer: Mapping[str, Tensor]) -> None:
        """First calls of a stage; `outer` are the merged model's tensors in front of it, placed."""
        for task, batch in self._batches.items():
            upstream = self._calls.get(task)
            call = stage.first_call(outer, batch, None if upstream is None else upstream[0])
            self._calls[task] = self._store.replace(upstream or [], [call])
            self._batches[task] = {name: t for name, t in batch.items() if name not in stage.spent}

    def step(self, stage: Stage, block: Block, stored: Mapping[str, Tensor]) -> None:
        """Through a block of the merged model, `stored` its tensors by canonical name."""
        tensors = block.local(self._compute.place(stored))
        for calls in self._calls.values():
            calls[0] = stage.advance(calls[0], block.run(tensors, calls[0]))

    def close(self, calibrated: Mapping[str, CallList]) -> None:
        """Compare final features; `calibrated` are the calls after the last block of the calibrated model."""
        read, final = self._adapter.closing, self._adapter.final
        closing = self._compute.place(self._merged.read(read))
        for task, expert in self._experts.items():
            own = self._compute.place(expert.weights.read(read))
            first, batch = next(iter(expert.calls())), expert.batches[0]
            target = final(own, first, batch)[:SAMPLES].double()
            reached = final(closing, calibrated[task][0], batch)[:SAMPLES].double()
            before = final(closing, self._calls[task][0], self._batches[task]).double()
            apart = [float((features - target).norm() / target.norm()) for features in (before, reached)]
            self.drift[task] = FinalDrift(len(target), *apart)


def first_samples(batch: Batch) -> dict[str, Tensor]:
    """The first `SAMPLES` of a batch."""
    return {name: tensor[:SAMPLES] for name, tensor in batch.items()}


def warnings_of(drift: Mapping[str, FinalDrift]) -> list[str]:
    """One sentence per task whose final drift the calibration raised."""
    return [
        f"task '{task}': calibration raised the final relative drift from {one.merged:.4g} to {one.calibrated:.4g} "
        f"({one.samples} of its calibration samples); try another lam or rho, or more samples"
        for task, one in drift.items()
        if one.calibrated > one.merged + ROUNDING
    ]

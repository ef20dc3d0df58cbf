"""Final features of a model, from the same walk over blocks that drift and calibration use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from featcal.formats.weights import Weights
from featcal.models.adapter import Adapter, Batch, Stage, walking
from featcal.models.compute import Compute
from featcal.models.lane import ExpertPass, Lane
from featcal.models.run import Run
from featcal.models.walk import Walk


def final_features(
    adapter: Adapter, model: Weights, head: Mapping[str, Tensor], batches: Sequence[Batch], compute: Compute
) -> Float[Tensor, "n k"]:
    """Final features `[n, k]` of all batches, on the compute device; one block is in memory at a time."""
    with walking(adapter):
        lane = _walked(adapter, adapter.stages, model, batches, compute)
        closing = compute.place(model.read(adapter.closing)) | dict(head)
        return torch.cat([adapter.final(closing, call, batch) for call, batch in zip(lane.calls, batches, strict=True)])


def pooled_features(
    adapter: Adapter, model: Weights, batches: Sequence[Batch], compute: Compute
) -> Float[Tensor, "n d"]:
    """State after the last block of the first stage (T5: its encoder), mean over all tokens but padding, `[n, d]`."""
    stage = adapter.stages[0]
    pooled = []
    with walking(adapter):
        lane = _walked(adapter, [stage], model, batches, compute)
        for call, batch in zip(lane.calls, batches, strict=True):
            state = stage.state(call, batch)
            mask = batch.get("attention_mask")
            tokens = state.shape[1] if mask is None else mask.sum(1, keepdim=True)
            pooled.append(state.sum(1) / tokens)
    return torch.cat(pooled)


def _walked(
    adapter: Adapter, stages: Sequence[Stage], model: Weights, batches: Sequence[Batch], compute: Compute
) -> Lane:
    """The model's lane behind the last block of some stages."""
    alone = {"": ExpertPass("", model, list(batches), (), compute)}
    walk = Walk(Run(adapter, model, model, {}, compute), "features", alone, {})
    for stage in stages:
        walk.enter(stage)
        for _, block in walk.blocks(stage):
            for task, tensors in walk.experts_at(block):
                for _ in walk.experts[task].walk(stage, block, tensors):
                    pass
    return walk.experts[""]

"""Final features of a model, from the same walk over blocks that drift and calibration use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from featcal.formats.weights import Weights
from featcal.models.adapter import Adapter, Batch, Call, Stage, walking
from featcal.models.compute import Compute
from featcal.models.expert_pass import first_calls


def final_features(
    adapter: Adapter, model: Weights, head: Mapping[str, Tensor], batches: Sequence[Batch], compute: Compute
) -> Float[Tensor, "n k"]:
    """Final features `[n, k]` of all batches, on the compute device; one block is in memory at a time."""
    calls: list[Call] | None = None
    with walking(adapter):
        for stage in adapter.stages:
            calls = _through(stage, model, batches, calls, compute)
        closing = compute.place(model.read(adapter.closing)) | dict(head)
        assert calls is not None
        return torch.cat([adapter.final(closing, call, batch) for call, batch in zip(calls, batches, strict=True)])


def pooled_features(
    adapter: Adapter, model: Weights, batches: Sequence[Batch], compute: Compute
) -> Float[Tensor, "n d"]:
    """State after the last block of the first stage (T5: its encoder), mean over all tokens but padding, `[n, d]`."""
    stage = adapter.stages[0]
    pooled = []
    with walking(adapter):
        for call, batch in zip(_through(stage, model, batches, None, compute), batches, strict=True):
            state = stage.state(call, batch)
            mask = batch.get("attention_mask")
            tokens = state.shape[1] if mask is None else mask.sum(1, keepdim=True)
            pooled.append(state.sum(1) / tokens)
    return torch.cat(pooled)


def _through(
    stage: Stage, model: Weights, batches: Sequence[Batch], upstream: list[Call] | None, compute: Compute
) -> list[Call]:
    """The calls after the last block of a stage, one per batch."""
    calls = list(first_calls(stage, compute.place(model.read(stage.outer)), batches, upstream))
    for block in stage.blocks:
        tensors = block.local(compute.place(model.read(block.names)))
        calls = [stage.advance(call, block.run(tensors, call)) for call in calls]
    return calls

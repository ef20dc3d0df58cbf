"""Final features of a model, from the same walk over blocks that drift and calibration use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from featcal.models.adapter import Adapter, Batch, Call
from featcal.models.expert_pass import first_calls
from featcal.models.weights import Compute, Weights


@torch.no_grad()
def final_features(
    adapter: Adapter, model: Weights, head: Mapping[str, Tensor], batches: Sequence[Batch], compute: Compute
) -> Float[Tensor, "n k"]:
    """Final features `[n, k]` of all batches, on the compute device; one block is in memory at a time."""
    calls: list[Call] = []
    for stage in adapter.stages:
        calls = first_calls(stage, compute.place(model.read(stage.outer)), batches, calls)
        for block in stage.blocks:
            tensors = block.local(compute.place(model.read(block.names)))
            calls = [stage.advance(call, block.run(tensors, call)) for call in calls]
    closing = compute.place(model.read(adapter.closing)) | dict(head)
    return torch.cat([adapter.final(closing, call, batch) for call, batch in zip(calls, batches, strict=True)])

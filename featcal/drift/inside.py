"""Measure the local mismatch inside a block: of every linear map separately, on the inputs of the expert's own map."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from featcal.calibration.token_rows import TokenRows, lane_rows
from featcal.drift.accumulator import concat_batches
from featcal.drift.streams import BlockTensors
from featcal.formats.weights import Weights
from featcal.models.adapter import Batch, Block, Stage, walking
from featcal.models.compute import find_device, widen
from featcal.models.context import Run
from featcal.models.lane import BlockStep, ExpertPass
from featcal.models.model import task_weights
from featcal.models.walk import BlockwiseForward


@dataclass(frozen=True)
class MapMismatch:
    """One linear map of a block on one task; one number per sample, with norms over all tokens except padding."""

    layer: str
    """Name of the block in tables."""
    map: str
    """Name of the linear map inside the block."""
    mismatch: Float[Tensor, " n"]
    """||(W_model - W_expert) x + b_model - b_expert||, where x is the input of the expert's map on its own features."""
    expert_norm: Float[Tensor, " n"]
    """||W_expert x + b_expert||."""
    changed: float | None
    """Share of the map in the squared change of the block's linear maps by calibration, compared with the model before
    it; the shares of a block sum to 1. None if no map of the block changed.
    """

    def to_json(self) -> dict[str, Any]:
        """Return the row of the public document; norms are means over samples."""
        mismatch, norm = float(self.mismatch.mean()), float(self.expert_norm.mean())
        # A map without bias after a norm that is zero gives nothing, in every model.
        relative = mismatch / norm if norm else None
        return {
            "layer": self.layer,
            "map": self.map,
            "mismatch": mismatch,
            "relative_mismatch": relative,
            "expert_norm": norm,
            "changed": self.changed,
        }


@dataclass(frozen=True)
class _EveryToken:
    """A weighting of tokens in which all tokens except padding have weight 1."""

    patch_weight: float = 1.0
    completion_only: bool = False
    image_weight: float = 1.0


def map_mismatches(
    run: Run, model: Weights, experts: Mapping[str, ExpertPass], before: Weights | None
) -> dict[str, list[MapMismatch]]:
    """Return, by task, the mismatch of every linear map that all tokens pass, blocks in forward order.

    Each block runs once per task, on the expert's features alone. Maps of a mixture's experts are left out, because
    every model's router sends them other tokens.

    Args:
        before: the model with which weights are compared for `changed`; None leaves it out.
    """
    shares = {} if before is None else {one.name: change_shares(one, before, model) for one in run.adapter.blocks()}
    found: dict[str, list[MapMismatch]] = {task: [] for task in experts}
    with walking(run.adapter):
        walk, held = BlockwiseForward(run, "measuring linear maps", experts, {}), BlockTensors(run)
        for stage in run.adapter.stages:
            walk.enter(stage)
            rows = lane_rows(stage, walk.experts, experts, _EveryToken())
            for index, block in walk.blocks(stage):
                for task, stored in walk.experts_at(block):
                    own = held.read_placed(block, task_weights(model, task))
                    steps = walk.experts[task].walk(stage, block, stored, tuple(block.linears), tuple(block.linears))
                    norms: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in block.linears}
                    for step, batch, counted in zip(steps, experts[task].batches, rows[task].batches, strict=True):
                        for name, pair in _batch_norms(stage, index, own, step, batch, counted):
                            norms[name].append(pair)
                    layer, changed = run.adapter.name_of(block), shares.get(block.name, {})
                    for name, pairs in norms.items():
                        mismatch, norm = concat_batches(pairs)
                        found[task].append(MapMismatch(layer, name, mismatch, norm, changed.get(name)))
        walk.finish()
    return found


def change_shares(block: Block, start: Weights, model: Weights) -> dict[str, float]:
    """Return every linear map's share in the squared change of weights and biases; empty if nothing changed."""
    before, after = (block.local(one.read(block.names)) for one in (start, model))
    squares = {
        name: sum(
            float((widen(after[tensor]) - widen(before[tensor])).square().sum())
            for tensor in (f"{name}.weight", f"{name}.bias")
            if tensor in after
        )
        for name in block.linears
    }
    total = sum(squares.values())
    return {name: square / total for name, square in squares.items()} if total else {}


def _batch_norms(
    stage: Stage, index: int, own: Mapping[str, Tensor], step: BlockStep, batch: Batch, counted: Mapping[str, TokenRows]
) -> Iterator[tuple[str, tuple[Tensor, Tensor]]]:
    """Yield the name of every linear map with mismatch and expert norm, `[batch]` each.

    Args:
        own: the model's tensors of the block, placed.
        counted: the tokens except padding, by weighting.
    """
    block, samples = stage.blocks[index], len(stage.state(step.call, batch))
    for name, expert in step.outputs.items():
        apart = block.run_part(own, name, step.inputs[name]) - expert
        counts = (
            counted[stage.weighting(index, name)]
            .spread(expert[..., 0].numel())
            .to(find_device(expert.device, torch.float64))
            > 0
        )

        def norm(output: Tensor, counts: Tensor = counts) -> Tensor:
            squares = torch.where(counts, widen(output).square().sum(-1).flatten(), 0)
            if step.call.hidden_state.ndim == 2:  # a row of pictures, one after the other, each of its own length
                squares = stage.state(step.call.with_state(squares[:, None]), batch)
            return squares.reshape(samples, -1).sum(1).sqrt()

        yield name, (norm(apart), norm(expert))

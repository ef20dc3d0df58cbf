"""Compute features of a model by the same walk over blocks that drift and calibration use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from featcal.formats.weights import Weights
from featcal.models.adapter import LAST_LAYER, Adapter, Batch, Call, Stage, walking
from featcal.models.compute import Compute
from featcal.models.context import Run
from featcal.models.lane import ExpertPass, WalkCache
from featcal.models.model import map_features
from featcal.models.walk import BlockwiseForward


def final_features(
    adapter: Adapter,
    model: Weights,
    head: Mapping[str, Tensor],
    batches: Sequence[Batch],
    compute: Compute,
    kept: WalkCache | None = None,
    name: str = "",
) -> Float[Tensor, "n k"]:
    """Return final features `[n, k]` of all batches, on the compute device; one block is in memory at a time.

    Args:
        kept: remembers which batches were compared with the library's own forward.
        name: of these batches in `kept`; not the name of a task for which the model has a map.
    """
    alone = ExpertPass(name, model, list(batches), (), compute, kept)
    return expert_features(Run(adapter, model, model, head, compute), {name: alone})[name]


def expert_features(run: Run, experts: Mapping[str, ExpertPass]) -> dict[str, Float[Tensor, "n k"]]:
    """Return the final features of every task's expert on its samples, through the expert's map if it has one, on the
    compute device; one block is in memory at a time."""
    with walking(run.adapter):
        walk = BlockwiseForward(run, "features", experts, {})
        # A stage that feeds nothing (a text tower) does not reach the final features.
        for _ in _layers(run.adapter, walk, [stage for stage in run.adapter.stages if stage.feeds]):
            pass
        closed = {
            task: _batch_features(run.adapter, one, run.head, walk.experts[task].calls) for task, one in experts.items()
        }
        return {task: map_features(experts[task].weights, task, torch.cat([*parts])) for task, parts in closed.items()}


def layer_features(run: Run, one: ExpertPass) -> dict[str, Float[Tensor, "n d"]]:
    """Return a model's features after every layer on the samples of one task, by layer in forward order, on the CPU.

    After embeddings and after each block they are the state `[n, d]` of the class token if the architecture has one,
    else the mean over the stage's own tokens without padding. The last layer gives the final features `[n, k]`, through
    the model's map for the task if it has one.

    Args:
        one: the samples with any model; results that are cached for it are not computed again.
    """
    adapter, found = run.adapter, {}
    with walking(adapter):
        walk = BlockwiseForward(run, "features of every layer", {one.task: one}, {})
        calls = walk.experts[one.task].calls
        for layer, stage in _layers(adapter, walk, adapter.stages):
            pooled = [_pool_tokens(adapter, stage, *both) for both in zip(calls, one.batches, strict=True)]
            found[layer] = torch.cat(pooled).cpu()
        closed = [
            map_features(one.weights, one.task, features) for features in _batch_features(adapter, one, run.head, calls)
        ]
        found[LAST_LAYER] = torch.cat(closed).cpu()
        walk.finish()
    return found


def depth_features(run: Run, one: ExpertPass) -> dict[str, Float[Tensor, "n k"]]:
    """Return the final features that a model would have if it ended after each block of its last stage, by block in
    forward order, on the CPU; those after the last block are the model's own.

    Args:
        one: as in `layer_features`.
    """
    adapter, found = run.adapter, {}
    *_, last = adapter.stages
    with walking(adapter):
        walk = BlockwiseForward(run, "decisions through depth", {one.task: one}, {})
        calls = walk.experts[one.task].calls
        for layer, stage in _layers(adapter, walk, adapter.stages):
            if stage is last and layer != adapter.first_layer(stage):
                ended = _batch_features(adapter, one, run.head, calls)
                found[layer] = torch.cat([map_features(one.weights, one.task, part) for part in ended]).cpu()
        walk.finish()
    return found


def _layers(adapter: Adapter, walk: BlockwiseForward, stages: Iterable[Stage]) -> Iterator[tuple[str, Stage]]:
    """Yield the name of every layer of some stages as soon as the walk's experts have
    passed it; consume it to the end.
    """
    names = adapter.block_names()
    for stage in stages:
        walk.enter(stage)
        yield adapter.first_layer(stage), stage
        for _, block in walk.blocks(stage):
            walk.pass_experts(stage, block)
            yield names[block.name], stage


def _batch_features(
    adapter: Adapter, one: ExpertPass, head: Mapping[str, Tensor], calls: Iterable[Call]
) -> Iterator[Tensor]:
    """Return the final features of every batch from the calls after the last block."""
    closing = one.compute.place(one.weights.read(adapter.closing)) | dict(head)
    return (adapter.final(closing, call, batch) for call, batch in zip(calls, one.batches, strict=True))


def _pool_tokens(adapter: Adapter, stage: Stage, call: Call, batch: Batch) -> Float[Tensor, "b d"]:
    """Return the class token's state, or else the mean over all tokens but padding."""
    state = stage.own_state(call, batch)
    if adapter.class_token_at(stage):
        return state[:, 0]
    # A state of ones with its padding zeroed counts the tokens, whatever the architecture's mask is.
    return state.sum(1) / stage.own_state(call.with_state(torch.ones_like(call.hidden_state)), batch).sum(1)

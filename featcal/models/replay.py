"""Check whether a library's forward can be replayed block by block, from one captured call
and the outputs of blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from featcal.models.adapter import Adapter, Batch, Block, Call, Stage
from featcal.models.standing_in import same_beside, standing_in
from featcal.system.errors import InputError


@torch.no_grad()
def check_replay(adapter: Adapter, device: torch.device) -> None:
    """Compare the calls that `Stage.advance` makes with those of the library's own forward, on the adapter's probe.

    For blocks with arguments of their own (`Call.apart`), which are captured again for every batch, values are
    compared; for all other blocks each tensor must be the same object as in the replayed call.

    Raises:
        InputError: the library calls a block in another way; the message names the first such block.
    """
    # Objects and not values: a mask of a block's own has equal values as long as the probe is shorter than its window.
    _check(adapter, _padded_probe(adapter, device), lambda ours, theirs: ours is theirs)


@torch.no_grad()
def check_first_batch(adapter: Adapter, batch: Batch) -> None:
    """Compare the calls on samples of a run, the longest and the shortest of its first batch, where equal values are
    enough.

    Blocks are the library's own modules, so equal calls of all of them mean that the replayed states, the last one
    included, are those of the library's own forward. A probe does not show what a library does only with long texts,
    such as the mask of a window.

    Args:
        batch: the first of the run.

    Raises:
        InputError: the library calls a block in another way; the message names the first such block.
    """
    mask = batch.get("attention_mask")
    lengths = torch.arange(2 if len(next(iter(batch.values()))) > 1 else 1) if mask is None else mask.sum(1)
    rows = torch.stack([lengths.argmax(), lengths.argmin()])
    _check(adapter, {name: tensor[rows.to(tensor.device)] for name, tensor in batch.items()}, torch.equal)


def _check(adapter: Adapter, inputs: Batch, same: Callable[[Tensor, Tensor], bool]) -> None:
    """Compare replayed calls with those of the library's forward on `inputs`, without reading weights or computing
    blocks. Stand-ins for the blocks record how they are called, and return constants of the same form as the first
    block's output.
    """
    upstream, device, shapes = None, next(iter(inputs.values())).device, adapter.shapes()
    for stage in adapter.stages:
        outer = {name: _constant(shapes[name], device) for name in stage.outer}
        first, calls, output = _library_calls(stage, outer, inputs, upstream, device)
        carried = replace(calls[0], apart=first.apart)
        for block, theirs in zip(stage.blocks[1:], calls[1:], strict=True):
            carried = stage.advance(carried, output)
            alike = torch.equal if block.name in first.apart else same
            same_state = same(carried.hidden_state, theirs.hidden_state)
            if not (same_state and same_beside(carried.block_call(block.name), theirs, alike)):
                raise InputError(
                    f"{adapter.name_of(block)}: {adapter.library} calls this block with other arguments than the "
                    "blocks before it, such as a mask or positions of its own; featcal cannot run this architecture "
                    "block by block"
                )
        if stage is not adapter.stages[-1]:  # not after the last one, whose last block may give states of another form
            upstream = stage.advance(
                carried, imitate_output(stage.blocks[-1], carried.block_call(stage.blocks[-1].name), device)
            )


def _library_calls(
    stage: Stage, outer: Mapping[str, Tensor], inputs: Batch, upstream: Call | None, device: torch.device
) -> tuple[Call, list[Call], Any]:
    """Return the stage's first call, every block's call in one forward, and the output of the first block."""
    first, *rest = stage.blocks
    call = stage.first_call(outer, inputs, upstream)
    output = imitate_output(first, call, device)
    if not rest:
        return call, [call], output
    to_the_last = copy(stage)  # its first call is that of its first block, before which the others stand in
    to_the_last.blocks = stage.blocks[-1:]
    with standing_in(stage.blocks[:-1], output) as seen:
        last = to_the_last.first_call(outer, inputs, upstream)
    return call, [*seen, last], output


def imitate_output(block: Block, call: Call, device: torch.device) -> Any:
    """Return constants of the same form as a block's output, found without computing the block."""

    def to_meta(leaf: Any) -> Any:
        return leaf.to("meta") if isinstance(leaf, Tensor) else leaf

    def constant(leaf: Any) -> Any:
        return _constant(leaf.shape, device) if isinstance(leaf, Tensor) else leaf

    leaves, layout = tree_flatten((call.args, dict(call.kwargs)))
    form = device, layout, [(leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    # A call of the form of the block's last one returns the same form.
    known, returned = _last_returned.get(block.module, (None, None))
    if known != form:
        args, kwargs = tree_map(to_meta, (call.args, dict(call.kwargs)))
        parameters = {name: to_meta(parameter) for name, parameter in block.module.named_parameters()}
        returned = tree_map(constant, block.run(parameters, Call(args, kwargs)))
        _last_returned[block.module] = form, returned
    return returned


def _padded_probe(adapter: Adapter, device: torch.device) -> dict[str, Tensor]:
    """Return the adapter's probe with padding, without which libraries leave masks out."""
    inputs = {name: tensor.clone().to(device) for name, tensor in adapter.probe().items()}
    if "attention_mask" in inputs:
        inputs["attention_mask"][-1, -2:] = 0
    return inputs


def _constant(shape: Sequence[int], device: torch.device) -> Tensor:
    """Return a tensor that takes no memory, whatever its size."""
    return torch.full((), 0.01, device=device).expand(tuple(shape))


_last_returned: WeakKeyDictionary[nn.Module, tuple[Any, Any]] = WeakKeyDictionary()
"""Block's module → the form of its last call, and its output."""

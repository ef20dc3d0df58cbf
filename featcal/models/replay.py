"""Whether a library's forward can be replayed block by block: from one captured call and what blocks return."""

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
    """Hold the calls that `Stage.advance` makes against those of the library's own forward, on the adapter's probe.

    Each tensor that a block is given must be the very object of the replayed call: a mask of its own for some blocks
    has equal values as long as the probe is shorter than its window. Of blocks that the first call knows to be called
    apart (`Call.apart`), and whose own arguments are captured anew for every batch, values are compared.

    Raises:
        InputError: naming the first block that the library calls otherwise.
    """
    _check(adapter, _padded_probe(adapter, device), lambda ours, theirs: ours is theirs)


@torch.no_grad()
def check_first_batch(adapter: Adapter, batch: Batch) -> None:
    """The same on samples of a run, its longest and its shortest: tensors of equal values are equal here.

    Blocks are the library's own modules, so equal calls of all of them mean that the replayed states, the last one
    included, are those of the library's own forward. What a library makes of long texts alone, such as a window's
    mask, a probe does not show.

    Args:
        batch: the first of the run.

    Raises:
        InputError: naming the first block that the library calls otherwise.
    """
    mask = batch.get("attention_mask")
    lengths = torch.arange(2 if len(next(iter(batch.values()))) > 1 else 1) if mask is None else mask.sum(1)
    rows = torch.stack([lengths.argmax(), lengths.argmin()])
    _check(adapter, {name: tensor[rows.to(tensor.device)] for name, tensor in batch.items()}, torch.equal)


def _check(adapter: Adapter, inputs: Batch, same: Callable[[Tensor, Tensor], bool]) -> None:
    """The forward runs on `inputs` with stand-ins for the blocks, which note how they are called and return constants
    in the form of what the first block returns, so no weights are read and no block is computed."""
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
                    f"{block.name}: {adapter.library} calls this block with other arguments than the blocks before it, "
                    "such as a mask or positions of its own; featcal cannot run this architecture block by block"
                )
        if stage is not adapter.stages[-1]:  # its last block may give states of another form
            upstream = stage.advance(
                carried, _imitate_output(stage.blocks[-1], carried.block_call(stage.blocks[-1].name), device)
            )


def _library_calls(
    stage: Stage, outer: Mapping[str, Tensor], inputs: Batch, upstream: Call | None, device: torch.device
) -> tuple[Call, list[Call], Any]:
    """The stage's first call, how one forward of the library calls every block, and what the first one returns."""
    first, *rest = stage.blocks
    call = stage.first_call(outer, inputs, upstream)
    output = _imitate_output(first, call, device)
    if not rest:
        return call, [call], output
    to_the_last = copy(stage)  # its first call is that of its first block, before which the others stand in
    to_the_last.blocks = stage.blocks[-1:]
    with standing_in(stage.blocks[:-1], output) as seen:
        last = to_the_last.first_call(outer, inputs, upstream)
    return call, [*seen, last], output


def _imitate_output(block: Block, call: Call, device: torch.device) -> Any:
    """Constants in the form of what a block returns, which is found out without computing it; a call of the form of
    the block's last one has the same."""

    def to_meta(leaf: Any) -> Any:
        return leaf.to("meta") if isinstance(leaf, Tensor) else leaf

    def constant(leaf: Any) -> Any:
        return _constant(leaf.shape, device) if isinstance(leaf, Tensor) else leaf

    leaves, layout = tree_flatten((call.args, dict(call.kwargs)))
    form = device, layout, [(leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    known, returned = _last_returned.get(block.module, (None, None))
    if known != form:
        args, kwargs = tree_map(to_meta, (call.args, dict(call.kwargs)))
        parameters = {name: to_meta(parameter) for name, parameter in block.module.named_parameters()}
        returned = tree_map(constant, block.run(parameters, Call(args, kwargs)))
        _last_returned[block.module] = form, returned
    return returned


def _padded_probe(adapter: Adapter, device: torch.device) -> dict[str, Tensor]:
    """The adapter's probe with padding, without which libraries leave masks away."""
    inputs = {name: tensor.clone().to(device) for name, tensor in adapter.probe().items()}
    if "attention_mask" in inputs:
        inputs["attention_mask"][-1, -2:] = 0
    return inputs


def _constant(shape: Sequence[int], device: torch.device) -> Tensor:
    """A tensor that takes no memory whatever its size."""
    return torch.full((), 0.01, device=device).expand(tuple(shape))


_last_returned: WeakKeyDictionary[nn.Module, tuple[Any, Any]] = WeakKeyDictionary()
"""Block's module → the form of its last call and what it returned."""

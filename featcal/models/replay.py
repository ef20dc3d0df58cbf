"""Whether a library's forward can be replayed block by block: from one captured call and what blocks return."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from featcal.errors import InputError
from featcal.models.adapter import Adapter, Batch, Block, Call, Stage


@torch.no_grad()
def check_replay(adapter: Adapter, device: torch.device) -> None:
    """Hold the calls that `Stage.advance` makes against those of the library's own forward.

    The forward runs on the adapter's probe with stand-ins for the blocks, which note how they are called and return
    constants in the form of what the first block returns, so no weights are read and no block is computed. Each tensor
    that a block is given must be the very object of the replayed call: a mask of its own for some blocks has equal
    values as long as the probe is shorter than its window.

    Raises:
        InputError: naming the first block that the library calls otherwise, such as one with a sliding window among
            blocks without.
    """
    inputs, upstream = _padded_probe(adapter, device), None
    for stage in adapter.stages:
        outer = {name: _constant(adapter.shapes()[name], device) for name in stage.outer}
        calls, output = _library_calls(stage, outer, inputs, upstream, device)
        for block, before, theirs in zip(stage.blocks[1:], calls, calls[1:], strict=False):
            if not _same(stage.advance(before, output), theirs):
                raise InputError(
                    f"{block.name}: {adapter.library} calls this block with other arguments than the blocks before it, "
                    "such as a mask or positions of its own; featcal cannot run this architecture block by block"
                )
        upstream = stage.advance(calls[-1], output)


def _library_calls(
    stage: Stage, outer: Mapping[str, Tensor], inputs: Batch, upstream: Call | None, device: torch.device
) -> tuple[list[Call], Any]:
    """How one forward of the library calls every block of a stage, and what the first block returns."""
    first, *rest = stage.blocks
    call = stage.first_call(outer, inputs, upstream)
    output = _returned(first, call, device)
    if not rest:
        return [call], output
    to_the_last = copy(stage)  # its first call is that of its first block, before which the others stand in
    to_the_last.blocks = stage.blocks[-1:]
    with _standing_in(stage.blocks[:-1], output) as seen:
        last = to_the_last.first_call(outer, inputs, upstream)
    return [*seen, last], output


def _returned(block: Block, call: Call, device: torch.device) -> Any:
    """Constants in the form of what a block returns, which is found out without computing it."""

    def on_meta(leaf: Any) -> Any:
        return leaf.to("meta") if isinstance(leaf, Tensor) else leaf

    def constant(leaf: Any) -> Any:
        return _constant(leaf.shape, device) if isinstance(leaf, Tensor) else leaf

    args, kwargs = tree_map(on_meta, (call.args, dict(call.kwargs)))
    parameters = {name: on_meta(parameter) for name, parameter in block.module.named_parameters()}
    return tree_map(constant, block.run(parameters, Call(args, kwargs)))


@contextmanager
def _standing_in(blocks: Sequence[Block], output: Any) -> Iterator[list[Call]]:
    """Inside the `with`, blocks compute nothing: they note their calls, in order, and return `output`."""
    seen: list[Call] = []

    def stand_in(*args: Any, **kwargs: Any) -> Any:
        seen.append(Call(args, kwargs))
        return output

    forward: Callable[..., Any] = stand_in
    for block in blocks:
        block.module.forward = forward
    try:
        yield seen
    finally:
        for block in blocks:
            del block.module.forward


def _same(ours: Call, theirs: Call) -> bool:
    """Whether two calls pass the same tensors, as objects, and equal values otherwise."""
    (one, layout), (other, their_layout) = (tree_flatten((call.args, dict(call.kwargs))) for call in (ours, theirs))
    if layout != their_layout:
        return False
    return all(
        a is b if isinstance(a, Tensor) or isinstance(b, Tensor) else a == b for a, b in zip(one, other, strict=True)
    )


def _padded_probe(adapter: Adapter, device: torch.device) -> dict[str, Tensor]:
    """The adapter's probe with padding, without which libraries leave masks away."""
    inputs = {name: tensor.clone().to(device) for name, tensor in adapter.probe().items()}
    if "attention_mask" in inputs:
        inputs["attention_mask"][-1, -2:] = 0
    return inputs


def _constant(shape: Sequence[int], device: torch.device) -> Tensor:
    """A tensor that takes no memory whatever its size."""
    return torch.full((), 0.01, device=device).expand(tuple(shape))

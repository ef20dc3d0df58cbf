"""Record how the library's own forward calls every block, without computing any of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from featcal.models.adapter import Block, Call, capture_call

NOTHING, FIRST = object(), object()
"""Outputs of stand-ins that return the state that they got: by itself, or in a tuple."""


@contextmanager
def standing_in(blocks: Sequence[Block], output: Any = NOTHING) -> Iterator[list[Call]]:
    """Let blocks inside the `with` compute nothing: they record their calls, in order, and return `output`, by
    default the state that they got.
    """
    seen: list[Call] = []

    def stand_in(*args: Any, **kwargs: Any) -> Any:
        seen.append(Call(args, kwargs))
        return args[0] if output is NOTHING else args[:1] if output is FIRST else output

    forward: Callable[..., Any] = stand_in
    for block in blocks:
        # An attribute of the instance hides the method of the class; deleting it restores the method.
        block.module.forward = forward
    try:
        yield seen
    finally:
        for block in blocks:
            del block.module.forward


def capture_calls(
    model: nn.Module, blocks: Sequence[Block], tensors: Mapping[str, Tensor], in_tuple: bool = False, /, **inputs: Any
) -> Call:
    """Return the calls by which `model`'s own forward calls its blocks: that of the first one and, in `Call.apart`,
    those of blocks that get other arguments besides their state, such as the mask of a window. These arguments must not
    depend on states; `replay` checks that against the library.

    Args:
        model, tensors, inputs: as for `capture_call`.
        in_tuple: whether blocks return the state as the first entry of a tuple.
    """
    *before, last = blocks
    with standing_in(before, FIRST if in_tuple else NOTHING) as seen:
        call = capture_call(model, last.module, tensors, **inputs)
    calls = [*seen, call]
    apart = {
        block.name: (call.args[1:], call.kwargs)
        for block, call in zip(blocks, calls, strict=True)
        if not same_beside(calls[0], call, lambda ours, theirs: ours is theirs)
    }
    return Call(calls[0].args, calls[0].kwargs, apart)


def same_beside(ours: Call, theirs: Call, same: Callable[[Tensor, Tensor], bool]) -> bool:
    """Say whether two calls pass the same tensors and equal other values, apart from their states."""
    found = (tree_flatten((call.args[1:], dict(call.kwargs))) for call in (ours, theirs))
    (one, layout), (other, their_layout) = found
    if layout != their_layout:
        return False

    def is_same(a: Any, b: Any) -> bool:
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            return same(a, b)
        return a is b or (not (isinstance(a, Tensor) or isinstance(b, Tensor)) and bool(a == b))

    return all(map(is_same, one, other))

"""Record the inputs and outputs of the modules of a block, without changing the block."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


class _SeenAll(Exception):
    """The exception that the hook on the last module raises; the only exception that is caught there."""


@contextmanager
def record_inputs(modules: Mapping[str, nn.Module], enough: int | None = None) -> Iterator[dict[str, Tensor]]:
    """Yield a dict that fills, inside the `with`, with the input of each of the `modules` that runs, by name and in the
    order of the calls.

    Modules that receive the same tensor hold the same object, so shared inputs are found by identity.

    Args:
        enough: number of inputs after which the body of the `with` ends early.

    Raises:
        RuntimeError: a module is called twice, or not with one positional tensor.
    """
    seen: dict[str, Tensor] = {}

    def remember(name: str) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...]) -> None:
            if name in seen:
                raise RuntimeError(f"'{name}' is called twice in one block; its statistics would mix two inputs")
            if len(args) != 1:
                raise RuntimeError(f"'{name}' is called with {len(args)} positional inputs, expected one tensor")
            seen[name] = args[0]
            if len(seen) == enough:
                raise _SeenAll

        return hook

    handles = [module.register_forward_pre_hook(remember(name)) for name, module in modules.items()]
    try:
        yield seen
    except _SeenAll:
        pass
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def capture_inputs(modules: Mapping[str, nn.Module], to_the_end: bool = True) -> Iterator[dict[str, Tensor]]:
    """Record the input of every one of the `modules` inside the `with`, and require that each was called.

    Args:
        to_the_end: False ends the body of the `with` at the last input. This saves the last product of the block, but
            does not notice a module that is called again afterwards.

    Raises:
        RuntimeError: also at exit, if a module was not called: its statistics would be incomplete.
    """
    with record_inputs(modules, None if to_the_end else len(modules)) as seen:
        yield seen
    missed = [name for name in modules if name not in seen]
    if missed:
        raise RuntimeError(f"never called in the block's forward: {', '.join(missed)}")


@contextmanager
def capture_outputs(modules: Mapping[str, nn.Module]) -> Iterator[dict[str, Tensor]]:
    """Yield a dict that fills, inside the `with`, with the output (bias included) of each
    of the `modules` that runs, by name.
    """
    seen: dict[str, Tensor] = {}

    def remember(name: str) -> Any:
        def hook(_: nn.Module, __: Any, output: Tensor) -> None:
            seen[name] = output

        return hook

    handles = [module.register_forward_hook(remember(name)) for name, module in modules.items()]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()

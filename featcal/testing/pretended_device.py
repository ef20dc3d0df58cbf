"""Pretend to have an accelerator: tensors on it are computed by the CPU, and what passes the bus is counted.

Where nobody has the card, this shows that no line of the code mixes devices, asks the device for a dtype that it has
not, or copies more than it must. Results are the CPU's; times say nothing.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._device import DeviceContext, _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

_ops: Any = torch.ops.aten
_stack: Any = _get_current_function_mode_stack
_CPU = torch.device("cpu")
_READS = {
    _ops._local_scalar_dense.default, _ops.equal.default, _ops.is_nonzero.default, torch.nonzero, Tensor.nonzero,
    Tensor.item, Tensor.tolist, Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__,
}  # fmt: skip
"""Operations whose result the processor waits for."""
_COPIES = {Tensor.copy_, _ops.copy_.default}
_INDEXED = {Tensor.__getitem__, Tensor.__setitem__, _ops.index.Tensor, _ops.index_put_.default}
_WRITES = {Tensor.__setitem__, _ops.index_put_.default}
"""Operations whose third argument is what is written, which has to be there already."""
_BOTH_PLACES = _COPIES | _INDEXED | {_ops._to_copy.default}
"""Operations that take tensors of the processor beside those of the device: as what is copied, or as indices."""
_GUARDED = (
    _READS | _COPIES | _INDEXED | {
        Tensor.contiguous, torch.matmul, Tensor.matmul, Tensor.__matmul__,
        torch.nn.functional.scaled_dot_product_attention,
    }
)  # fmt: skip
"""Functions of Python in which torch asks the driver for its device, or chooses a kernel by it, before any operation is
seen."""

_ANSWERS = {"get_device_name": "pretended", "mem_get_info": (2**33, 2**33)}


@dataclass
class Bus:
    """Counts of what passed between processor and device."""

    up: int = 0
    """Bytes copied to the device."""
    down: int = 0
    """Bytes copied from it."""
    waits: Counter[str] = field(default_factory=Counter)
    """Times that the processor asked the device for a number, by operation."""


class _OnDevice(Tensor):
    """A tensor that says it lies on the device; `held` has its numbers."""

    held: Tensor
    place: PretendedDevice

    @staticmethod
    def __new__(cls, held: Tensor, place: PretendedDevice) -> _OnDevice:
        made: _OnDevice = Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype,
            device=place.device,
        )  # fmt: skip
        made.held, made.place = held, place
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        place = next(one.place for one in tree_leaves((args, kwargs)) if isinstance(one, _OnDevice))
        return place.run(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"on {self.place.device}: {self.held!r}"


class PretendedDevice:
    """A device that torch has no card for, inside the `with` and in the pools of threads that are asked there.

    Args:
        name: as torch names it, such as "cuda:0" or "mps".
        lacks: dtypes that the device does not have.
    """

    def __init__(self, name: str, lacks: Sequence[torch.dtype] = ()) -> None:
        self.device, self._lacks, self.bus = torch.device(name), frozenset(lacks), Bus()
        self.allocated = self.peak = 0
        """Bytes that tensors take there: now, and the most since `restart_peak`."""
        self._tensors = Counter[int]()
        self._entered = ExitStack()

    def __enter__(self) -> PretendedDevice:
        submit = ThreadPoolExecutor.submit

        def ask(pool: ThreadPoolExecutor, task: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
            def run() -> Any:
                with self._modes():
                    return task(*args, **kwargs)

            return submit(pool, run)

        self._entered.enter_context(patch.object(ThreadPoolExecutor, "submit", ask))
        for name, answer in _ANSWERS.items():
            self._entered.enter_context(patch.object(torch.cuda, name, lambda *_, answer=answer: answer))
        self._entered.enter_context(patch.object(torch.cuda, "memory_allocated", lambda *_: self.allocated))
        self._entered.enter_context(self._modes())
        return self

    def __exit__(self, *error: Any) -> None:
        self._entered.close()

    def restart_peak(self) -> int:
        """Begin to look for the peak anew; return the bytes that are taken now."""
        self.peak = self.allocated
        return self.allocated

    @contextmanager
    def _modes(self) -> Iterator[None]:
        # What is made in Python is seen by the first, as torch asks the driver right after it; what torch itself makes
        # beside a tensor, such as a number of its dtype, by the second.
        with _Factories(self), _Calls(self):
            yield

    def call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Apply a function of torch's Python."""
        if func in (Tensor.pin_memory, Tensor.is_pinned):
            return args[0] if func is Tensor.pin_memory else False
        if func is Tensor.untyped_storage and isinstance(args[0], _OnDevice):
            return args[0].held.untyped_storage()
        if func in _device_constructors():
            return self._construct(func, args, kwargs)
        if func is Tensor.to:
            return self._move(*args, **kwargs)
        if func in _GUARDED and any(isinstance(one, _OnDevice) for one in args):
            return self.run(func, args, kwargs)
        return func(*args, **kwargs)

    def _construct(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        asked = kwargs.get("device")
        if asked is None:
            # A `with torch.device(...)` outside is below this one, and torch asks it last.
            asked = next((one.device for one in _stack() if isinstance(one, DeviceContext)), None)
        if asked is None or torch.device(asked).type != self.device.type:
            return func(*args, **kwargs)
        with torch.device("cpu"):
            made = func(*args, **{**kwargs, "device": _CPU})
        return self.wrap(made)

    def _move(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return what `tensor.to(...)` does."""
        target = tensor.device
        for one in (*args, *kwargs.values()):
            if isinstance(one, Tensor | str | torch.device):
                target = one.device if isinstance(one, Tensor) else torch.device(one)
        up, down = ((one.type == self.device.type) for one in (target, tensor.device))

        def lower(one: Any) -> Any:
            if isinstance(one, _OnDevice):
                return one.held
            return _CPU if up and isinstance(one, str | torch.device) else one

        made: Tensor = lower(tensor).to(*map(lower, args), **{name: lower(one) for name, one in kwargs.items()})
        if isinstance(tensor, _OnDevice) and up:
            return tensor if made is tensor.held else self.wrap(made)
        if not up and not down:
            return made
        self.bus.up += up * made.nbytes
        self.bus.down += down * made.nbytes
        return self.wrap(made.clone()) if up else made.clone()

    def run(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Apply an operation to what tensors hold."""
        target = torch.device(kwargs["device"]) if kwargs.get("device") is not None else self.device
        known: dict[int, _OnDevice] = {}

        def lower(one: Tensor) -> Tensor:
            if isinstance(one, _OnDevice):
                known[id(one.held)] = one
                return one.held
            if one.ndim and func not in _BOTH_PLACES and not one.is_meta:
                raise RuntimeError(f"{func}: tensors on {self.device} and {one.device}, at least two devices")
            return one

        if func in _WRITES and isinstance(args[2], Tensor) and not isinstance(args[2], _OnDevice) and args[2].ndim:
            raise RuntimeError(f"{func}: values on {args[2].device} are written into a tensor on {self.device}")
        given = tree_map_only(Tensor, lower, (args, dict(kwargs)))
        if target.type == self.device.type and "device" in given[1]:
            given[1]["device"] = _CPU
        if func in _READS:
            self.bus.waits[str(func)] += 1
        found = func(*given[0], **given[1])
        if func is _ops._to_copy.default and target.type == "cpu":
            self.bus.down += found.nbytes
        if func in _COPIES:
            if not isinstance(args[0], _OnDevice):
                self.bus.down += args[0].nbytes
                return args[0]
            if not isinstance(args[1], _OnDevice):
                self.bus.up += args[1].nbytes
        if target.type == "cpu":
            return found
        return tree_map_only(Tensor, lambda one: known.get(id(one)) if id(one) in known else self.wrap(one), found)

    def wrap(self, held: Any) -> Any:
        if held.is_meta:
            return held
        if held.dtype in self._lacks:
            raise TypeError(f"{self.device.type} has no {held.dtype}")
        made = _OnDevice(held, self)
        storage = held.untyped_storage()
        weakref.finalize(made, self._release, storage.data_ptr(), storage.nbytes())
        self._tensors[storage.data_ptr()] += 1
        if self._tensors[storage.data_ptr()] == 1:
            self.allocated += storage.nbytes()
            self.peak = max(self.peak, self.allocated)
        return made

    def _release(self, storage: int, size: int) -> None:
        """Count one tensor less of a storage, which is free with the last of them."""
        self._tensors[storage] -= 1
        if not self._tensors[storage]:
            del self._tensors[storage]
            self.allocated -= size


class _Calls(TorchFunctionMode):
    def __init__(self, place: PretendedDevice) -> None:
        super().__init__()
        self._place = place

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._place.call(func, args, dict(kwargs or {}))


class _Factories(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, place: PretendedDevice) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._place = place

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        asked = (kwargs or {}).get("device")
        if asked is not None and torch.device(asked).type == self._place.device.type:
            return self._place.run(func, args, kwargs)
        return func(*args, **(kwargs or {}))

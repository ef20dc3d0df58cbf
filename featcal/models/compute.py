"""Choose device, dtype and kernels of all computations of features."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import ContextDecorator, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from featcal.system.environment import is_intel
from featcal.system.errors import InputError

backends: Any = torch.backends  # torch does not declare what its modules hold


@dataclass(frozen=True)
class Compute:
    """Device and dtype in which features are computed: `exact` is float32, `fast` is bfloat16."""

    device: torch.device
    dtype: torch.dtype

    def move(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors on the device in their own dtype, for the solve, which must not lose precision."""
        if self.device.type != "cuda":
            return {name: tensor.to(self.device) for name, tensor in tensors.items()}
        # Through pinned memory, so that nobody waits for the copy.
        return {name: tensor.pin_memory().to(self.device, non_blocking=True) for name, tensor in tensors.items()}

    def place(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors on the device, floating ones in the compute dtype, for the forward."""
        return {
            name: tensor.to(self.device, self.dtype if tensor.is_floating_point() else None)
            for name, tensor in tensors.items()
        }


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor in a dtype, on its device, or on the CPU if the device lacks that dtype."""
    return tensor.to(find_device(tensor.device, dtype), dtype)


def widen(tensor: Tensor) -> Tensor:
    """Return a tensor in float64, on its device, or on the CPU if the device has no float64."""
    return cast(tensor, torch.float64)


def find_device(device: torch.device, dtype: torch.dtype) -> torch.device:
    """Return the device, or the CPU if the device lacks the dtype."""
    return torch.device("cpu") if dtype is torch.float64 and dtype is not widest_float(device) else device


def has_own_memory(device: torch.device) -> bool:
    """Say whether a device has memory separate from the processor's; a Mac's GPU has not."""
    return device.type not in ("cpu", "mps")


def require_float64(device: torch.device, what: str) -> None:
    """Check that a device has float64, for computations that cannot move to the CPU.

    Raises:
        InputError: the device has no float64.
    """
    if widest_float(device) is not torch.float64:
        raise InputError(f"{what} needs float64, which {device} does not have; use --device cpu")


def widest_float(device: torch.device) -> torch.dtype:
    """Return float64, or float32 where the device has no float64."""
    return torch.float32 if device.type in _WITHOUT_FLOAT64 else torch.float64


_WITHOUT_FLOAT64 = frozenset({"mps"})
"""Kinds of devices without float64: features and products are float32 there, and the CPU
does float64 sums and solves.
"""

DTYPES = {"exact": torch.float32, "fast": torch.bfloat16}
"""Compute dtypes by the names of `suite.calibration_options.PRECISIONS`."""


def compute_for(device: str, precision: str = "exact") -> Compute:
    """Return the `Compute` for the public options `device` and `precision`.

    Args:
        device: "auto" (CUDA if there is one), "cpu", any CUDA device such as "cuda" or "cuda:1", or "mps": a Mac's,
            where sums and solves in float64 are the CPU's.
        precision: "exact" or "fast".

    Raises:
        InputError: the precision is unknown, or this machine has no such device.
    """
    if precision not in DTYPES:
        raise InputError(f"precision is one of {', '.join(DTYPES)}, not '{precision}'")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.device(device)
        # `torch.device` accepts any name; only an allocation shows whether the device is there.
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"device '{device}' is not available on this machine; use --device cpu") from error
    return Compute(chosen, DTYPES[precision])


@contextmanager
def use_threads(count: int | None) -> Iterator[None]:
    """Use this number of threads for products inside the `with`, in this thread; None changes nothing."""
    before = torch.get_num_threads()
    # Threads cut sums into parts, which moves their last bits.
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


Setting = tuple[Any, str]
"""An object of `torch.backends` that has a precision, and the precision."""


class _Computing(ContextDecorator):
    """Settings of the whole process: the first thread to enter makes them, the last one to leave restores them.

    No setting belongs to a thread, so any thread may be the last.
    """

    def __init__(self) -> None:
        self._lock, self._inside = threading.Lock(), 0
        self._before: list[Setting] = []

    def __enter__(self) -> None:
        with self._lock:
            if self._inside == 0:
                _keep_float32(self._before)
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                _put_back(self._before)


computing = _Computing()
"""Context in which float32 products are computed in full float32 on every device, by the fastest kernels that do so.

On CUDA, TF32 is off whatever the process has set. On the CPU, torch's setting for oneDNN's products is "bf16": it hands
float32 products to oneDNN, which rounds to bfloat16 on processors with matrix tiles alone and elsewhere has AVX-512
kernels, twice as fast as MKL's on AMD. Where it would round, no reduced precision that the process has set is in force,
nor on Intel's processors, which MKL is made for: on some of them oneDNN takes up to 2.7 times as long.

Only torch's newer settings (`fp32_precision`) are read and written, so that it does not matter which ones the process
itself uses. Meanwhile torch's older functions, such as `torch.get_float32_matmul_precision`, may refuse to answer.
"""

_FULL = ("none", "ieee")


def _keep_float32(before: list[Setting]) -> None:
    """Make the settings of `computing`, and append to `before` what restores the old ones; set nothing on an error."""
    cudnn, cublas, onednn = backends.cudnn, backends.cuda.matmul, backends.mkldnn
    try:
        # That of all operations on CUDA first: torch's own default for convolutions gives way to it, and could not be
        # named again had it been replaced. oneDNN has none that could be set: torch's sets that of all backends.
        if any(one.fp32_precision not in _FULL for one in (cudnn.conv, cublas)):
            _replace(before, cudnn, backends, "ieee")
        # Only what the process has set for an operation itself is replaced there.
        for one, above in ((cudnn.conv, cudnn), (cublas, cudnn), (onednn.conv, onednn), (onednn.matmul, onednn)):
            if one.fp32_precision not in _FULL:
                _replace(before, one, above, "ieee")
        if _takes_onednn():
            _replace(before, onednn.matmul, onednn, "bf16")
    except BaseException:
        _put_back(before)
        raise


def _replace(before: list[Setting], setting: Any, above: Any, precision: str) -> None:
    """Set one precision and append the old one to `before`."""
    # A precision that is in force above, too, is taken to come from there: "none" restores that.
    before.append((setting, "none" if setting.fp32_precision == above.fp32_precision else setting.fp32_precision))
    setting.fp32_precision = precision


def _put_back(before: list[Setting]) -> None:
    while before:
        setting, precision = before[-1]
        setting.fp32_precision = precision
        before.pop()  # only now: an interrupt in between loses nothing


@cache
def _takes_onednn() -> bool:
    """Say whether oneDNN should compute float32 products. It should not where MKL runs on an Intel processor; elsewhere
    it should if products under the setting "bf16" keep bits that bfloat16 would lose.
    """
    if not backends.mkldnn.is_available() or (backends.mkl.is_available() and is_intel()):
        return False
    value = 1 + 2.0**-12
    a = torch.full((256, 256), value)
    before: list[Setting] = []
    _replace(before, backends.mkldnn.matmul, backends.mkldnn, "bf16")
    try:
        product = a @ a
    finally:
        _put_back(before)
    return bool((product / (256 * value**2) - 1).abs().max() < 1e-6)

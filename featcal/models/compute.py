"""Where features are computed, in which dtype, and with which kernels."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from featcal.errors import InputError
from featcal.progress import keep_memory

_mkldnn: Any = torch.backends.mkldnn  # its settings are made when it is imported


@dataclass(frozen=True)
class Compute:
    """Where and in which dtype features are computed: `exact` is float32, `fast` is bfloat16."""

    device: torch.device
    dtype: torch.dtype

    def move(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors on the device in their own dtype: for the solve, which loses nothing."""
        return {name: tensor.to(self.device) for name, tensor in tensors.items()}

    def place(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors on the device, floating ones in the compute dtype: for the forward."""
        return {
            name: tensor.to(self.device, self.dtype if tensor.is_floating_point() else None)
            for name, tensor in tensors.items()
        }


PRECISIONS = {"exact": torch.float32, "fast": torch.bfloat16}


def compute_for(device: str = "auto", precision: str = "exact") -> Compute:
    """`Compute` for the public options.

    Args:
        device: "auto" (CUDA where there is one), "cpu", or any CUDA device such as "cuda" or "cuda:1".
        precision: "exact" or "fast".

    Raises:
        InputError: unknown precision, or a device that this machine does not have.
    """
    if precision not in PRECISIONS:
        raise InputError(f"precision is one of {', '.join(PRECISIONS)}, not '{precision}'")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.device(device)
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"device '{device}' is not to be had on this machine; use --device cpu") from error
    return Compute(chosen, PRECISIONS[precision])


@contextmanager
def computing() -> Iterator[None]:
    """Inside the `with`, float32 matrix products are float32 on every device, by the fastest kernels that are, and
    freed memory is kept for the next features.

    On CUDA, TF32 is off whatever the process has set. On the CPU, torch's setting for oneDNN's products is "bf16":
    it hands float32 products to oneDNN, which rounds to bfloat16 on processors with matrix tiles alone and elsewhere
    has AVX-512 kernels, twice as fast as MKL's on AMD. Where it would round, the setting stays as it is.
    """
    keep_memory()
    settings = [(torch.backends.cuda.matmul, "ieee")]
    if _onednn_keeps_float32():
        settings.append((_mkldnn.matmul, "bf16"))
    with _lock:  # several threads may be inside: the first one sets, the last one puts back
        if not _inside:
            _before[:] = [(backend, backend.fp32_precision) for backend, _ in settings]
            for backend, precision in settings:
                backend.fp32_precision = precision
        _inside.append(None)
    try:
        yield
    finally:
        with _lock:
            _inside.pop()
            if not _inside:
                for backend, precision in _before:
                    backend.fp32_precision = precision


_lock = threading.Lock()
_inside: list[None] = []
_before: list[tuple[Any, str]] = []


@cache
def _onednn_keeps_float32() -> bool:
    """Whether products under the setting "bf16" are exact where bfloat16 would not be."""
    if not _mkldnn.is_available():
        return False
    value = 1 + 2.0**-12
    a = torch.full((64, 64), value)
    before = _mkldnn.matmul.fp32_precision
    _mkldnn.matmul.fp32_precision = "bf16"
    try:
        product = a @ a
    finally:
        _mkldnn.matmul.fp32_precision = before
    return bool((product / (64 * value**2) - 1).abs().max() < 1e-6)

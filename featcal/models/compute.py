"""Where features are computed, in which dtype, and with which kernels."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ContextDecorator, ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from featcal.errors import InputError

_mkldnn: Any = torch.backends.mkldnn  # its settings are made when it is imported


@dataclass(frozen=True)
class Compute:
    """Where and in which dtype features are computed: `exact` is float32, `fast` is bfloat16."""

    device: torch.device
    dtype: torch.dtype

    def move(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors on the device in their own dtype: for the solve, which loses nothing.

        They reach CUDA through pinned memory, so that nobody waits for the copy.
        """
        if self.device.type != "cuda":
            return {name: tensor.to(self.device) for name, tensor in tensors.items()}
        return {name: tensor.pin_memory().to(self.device, non_blocking=True) for name, tensor in tensors.items()}

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


class _ForAll(ContextDecorator):
    """A setting of the whole process: the first thread to enter makes it, the last one to leave puts it back."""

    def __init__(self, setting: Callable[[], AbstractContextManager[Any]]) -> None:
        self._setting = setting
        self._lock, self._inside, self._made = threading.Lock(), 0, ExitStack()

    def __enter__(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._made.enter_context(self._setting())
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                self._made.close()


@contextmanager
def _float32_products() -> Iterator[None]:
    settings = [(torch.backends.cuda.matmul, "ieee")]
    if _onednn_keeps_float32():
        settings.append((_mkldnn.matmul, "bf16"))
    before = [backend.fp32_precision for backend, _ in settings]
    for backend, precision in settings:
        backend.fp32_precision = precision
    try:
        yield
    finally:
        for (backend, _), precision in zip(settings, before, strict=True):
            backend.fp32_precision = precision


computing = _ForAll(_float32_products)
"""Inside the `with`, float32 matrix products are float32 on every device, by the fastest kernels that are.

On CUDA, TF32 is off whatever the process has set. On the CPU, torch's setting for oneDNN's products is "bf16": it hands
float32 products to oneDNN, which rounds to bfloat16 on processors with matrix tiles alone and elsewhere has AVX-512
kernels, twice as fast as MKL's on AMD. Where it would round, the setting stays as it is.
"""
plain_attention = _ForAll(lambda: sdpa_kernel(SDPBackend.MATH))
"""Inside the `with`, attention is two products and a softmax: the fused kernels have no forward-mode derivative."""


@cache
def _onednn_keeps_float32() -> bool:
    """Whether products under the setting "bf16" are exact where bfloat16 would not be."""
    if not _mkldnn.is_available():
        return False
    value = 1 + 2.0**-12
    a = torch.full((256, 256), value)
    before = _mkldnn.matmul.fp32_precision
    _mkldnn.matmul.fp32_precision = "bf16"
    try:
        product = a @ a
    finally:
        _mkldnn.matmul.fp32_precision = before
    return bool((product / (256 * value**2) - 1).abs().max() < 1e-6)

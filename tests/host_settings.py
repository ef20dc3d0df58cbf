"""A host process that calls featcal: what becomes of its memory allocator, and of the precisions it has set for torch.

Every combination of those runs in a fork of its own: what torch starts with cannot be set again once it was changed.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from itertools import product
from typing import Any

import torch

from featcal import CalibrationConfig, calibrate, load_suite, measure_drift, open_family
from featcal.models.compute import computing
from featcal.models.features import final_features
from featcal.progress import keep_memory
from featcal.suite import Suite

C: Any = torch._C
B: Any = torch.backends
OLD: dict[str, Callable[[], Any]] = {
    "nothing old": lambda: None,
    "high": lambda: torch.set_float32_matmul_precision("high"),
    "medium": lambda: torch.set_float32_matmul_precision("medium"),
    "cuda allow_tf32": lambda: setattr(B.cuda.matmul, "allow_tf32", True),
    "cudnn no tf32": lambda: setattr(B.cudnn, "allow_tf32", False),
}
NEW: dict[str, Callable[[], Any]] = {
    "nothing new": lambda: None,
    "ieee": lambda: setattr(B, "fp32_precision", "ieee"),
    "tf32": lambda: setattr(B, "fp32_precision", "tf32"),
    "bf16": lambda: setattr(B, "fp32_precision", "bf16"),
    "cudnn ieee": lambda: setattr(B.cudnn, "fp32_precision", "ieee"),
    "conv tf32": lambda: setattr(B.cudnn.conv, "fp32_precision", "tf32"),
    "cuda matmul tf32": lambda: setattr(B.cuda.matmul, "fp32_precision", "tf32"),
    "mkldnn matmul ieee": lambda: setattr(B.mkldnn.matmul, "fp32_precision", "ieee"),
    "mkldnn bf16": lambda: C._set_fp32_precision_setter("mkldnn", "all", "bf16"),
}


def settings() -> dict[str, Any]:
    """Everything that a host can read, old and new; what torch refuses to answer is part of it."""
    readers: dict[str, Callable[[], Any]] = {
        f"{backend} {operation}": lambda b=backend, o=operation: C._get_fp32_precision_getter(b, o)  # type: ignore[misc]
        for backend, operation in [("generic", "all"), *product(("cuda", "mkldnn"), ("all", "conv", "rnn", "matmul"))]
    }
    readers |= {
        "matmul precision": torch.get_float32_matmul_precision,
        "cublas": C._get_cublas_allow_tf32,
        "cudnn": C._get_cudnn_allow_tf32,
        "onednn": C._get_onednn_allow_tf32,
    }
    found: dict[str, Any] = {}
    for name, read in readers.items():
        try:
            found[name] = read()
        except RuntimeError:
            found[name] = "refused"
    return found


def precision(suite: Suite) -> str | None:
    """Run every combination and say which ones failed."""
    if not hasattr(os, "fork"):
        return None
    family = open_family(suite, device="cpu").resident()
    inputs = family.samples(next(iter(suite.tasks)), "calibration", 4, 0).inputs

    def features() -> torch.Tensor:
        return final_features(family.adapter, family.merged, family.head(), [inputs], family.compute)

    expected = features()

    def check(first: Callable[[], Any], second: Callable[[], Any]) -> None:
        first()
        second()
        before = settings()
        assert torch.equal(features(), expected), "other features"
        assert settings() == before, f"left {settings()} instead of {before}"
        with computing:
            inside = {name: value for name, value in settings().items() if name.endswith(("conv", "matmul"))}
        reduced = {n: p for n, p in inside.items() if p not in ("none", "ieee") and n != "mkldnn matmul"}
        assert not reduced, f"reduced precision inside: {reduced}"
        B.fp32_precision = "none"  # what the host inherits it must still inherit
        B.fp32_precision = "ieee"
        later = settings()
        with computing:
            pass
        assert settings() == later, "a later change of the host was not kept"

    failed = []
    for old, new in product(OLD, NEW):
        for names, calls in (((old, new), (OLD[old], NEW[new])), ((new, old), (NEW[new], OLD[old]))):
            if "nothing" not in names[0]:
                failed.append(_in_a_fork(check, calls, ", ".join(names)))
    return "".join(failed)


def _in_a_fork(check: Callable[..., None], calls: tuple[Callable[[], Any], ...], names: str) -> str:
    """What a check says in a process of its own; nothing where it holds."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            check(*calls)
        except BaseException:
            os.write(writer, f"{names} {traceback.format_exc(limit=1)}".encode())
        os._exit(0)
    os.close(writer)
    _, status = os.waitpid(child, 0)
    with os.fdopen(reader) as said:
        return said.read() + (f"{names} ended with status {status}\n" if status else "")


def allocator(suite: Suite) -> str | None:
    """Whether large blocks are still given back to the system after library calls (glibc alone)."""
    fields = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    info = type("Info", (ctypes.Structure,), {"_fields_": [(name, ctypes.c_size_t) for name in fields]})
    libc: Any = ctypes.CDLL(None) if sys.platform == "linux" else None
    if not hasattr(libc, "mallinfo2"):
        return None
    libc.malloc.restype, libc.mallinfo2.restype = ctypes.c_void_p, info

    def mapped() -> bool:
        before = libc.mallinfo2().hblks
        libc.malloc(ctypes.c_size_t(2**27))
        return bool(libc.mallinfo2().hblks > before)

    if not mapped():
        return "large blocks are not mapped to begin with"
    result = calibrate(suite, CalibrationConfig(samples=4), device="cpu")
    measure_drift(suite, result, samples=4, device="cpu")
    if not mapped():
        return "the library changed how the process gives memory back"
    keep_memory()
    return "this test would see no change" if mapped() else ""


def main(file: str) -> None:
    """Print what went wrong, by what was looked at."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    suite = load_suite(file)
    print(json.dumps({"allocator": allocator(suite), "precision": precision(suite)}))


if __name__ == "__main__":
    main(sys.argv[1])

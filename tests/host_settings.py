"""A host process that has made torch's precision settings before it calls featcal; prints what went wrong, if anything.

Every combination runs in a fork of its own: what torch starts with cannot be set again once it was changed.
"""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Callable
from itertools import product
from typing import Any

import torch

from featcal import load_suite, open_family
from featcal.models.compute import computing
from featcal.models.features import final_features

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


def main(suite: str) -> None:
    """Run every combination and print those that fail."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    family = open_family(load_suite(suite), device="cpu").resident()
    inputs = family.samples(next(iter(family.suite.tasks)), "calibration", 4, 0).inputs

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

    for old, new in product(OLD, NEW):
        for names, calls in (((old, new), (OLD[old], NEW[new])), ((new, old), (NEW[new], OLD[old]))):
            if "nothing" in names[0]:
                continue
            child = os.fork()
            if child == 0:
                try:
                    check(*calls)
                except BaseException:
                    print(", ".join(names), traceback.format_exc(limit=1), flush=True)
                os._exit(0)
            _, status = os.waitpid(child, 0)
            if status:
                print(", ".join(names), f"ended with status {status}")


if __name__ == "__main__":
    main(sys.argv[1])

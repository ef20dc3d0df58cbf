"""Measure what `torch.compile` of a block would save: ``python benchmarks/compiled.py [--samples 32]``.

One block of CLIP ViT-B/32 runs forward as it is and compiled (inductor, one fixed shape), in float32 and bfloat16, in
turn; medians. A calibration runs it `12 * 8 * 3` times (blocks, tasks, and one forward of the expert with two of the
student), so that the seconds to be saved stand beside those of the compilation, from an empty cache and from a full
one. Hooks are left out, which a calibration reads inputs of linear maps with and a compiled graph breaks at: it is an
upper bound of the gain.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import families
import measure
import torch
from torch import Tensor, nn

FORWARDS = 12 * 8 * 3


def make_block(dtype: torch.dtype) -> nn.Module:
    """Make one block with random weights."""
    from transformers import CLIPVisionConfig
    from transformers.models.clip.modeling_clip import CLIPEncoderLayer

    torch.manual_seed(0)
    shape = families.B32
    config = CLIPVisionConfig(
        hidden_size=shape.width, intermediate_size=4 * shape.width, num_attention_heads=shape.width // 64
    )
    config._attn_implementation = "sdpa"
    block: nn.Module = CLIPEncoderLayer(config).eval().to(dtype)
    return block


def take_seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


@torch.no_grad()
def measure_dtype(dtype: torch.dtype, samples: int, rounds: int) -> dict[str, float]:
    """Return seconds of a forward as it is and compiled, and of the compilation with its first forward."""
    block, shape = make_block(dtype), families.B32
    state = torch.randn(samples, shape.tokens, shape.width).to(dtype)

    def run(one: Callable[..., Tensor]) -> Tensor:
        return one(state, attention_mask=None)

    compiled = torch.compile(block, dynamic=False)
    first = take_seconds(lambda: run(compiled))
    for one in (block, compiled):
        run(one)
    times = [(take_seconds(lambda: run(block)), take_seconds(lambda: run(compiled))) for _ in range(rounds)]
    plain, fused = (statistics.median(one) for one in zip(*times, strict=True))
    return {"plain": plain, "compiled": fused, "first": first}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=32, help="pictures of a batch")
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="measure this one in this process")
    options = parser.parse_args()
    if options.dtype:
        measure.show(measure_dtype(getattr(torch, options.dtype), options.samples, options.rounds))
        return
    for dtype in ("float32", "bfloat16"):
        with tempfile.TemporaryDirectory() as cache:
            for state in ("empty", "full"):
                words = [sys.executable, __file__, "--dtype", dtype, "--samples", str(options.samples)]
                words += ["--rounds", str(options.rounds)]
                print(f"{dtype}, {state} cache:", flush=True)
                subprocess.run(words, check=True, env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache})
    measure.show({"forwards": FORWARDS, "machine": measure.machine()})


if __name__ == "__main__":
    main()

"""Floating-point operations of a calibration, counted from shapes, against what matrix products reach here."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from families import PADDING, ClipShape, LlamaShape

if TYPE_CHECKING:
    import torch

SIDE = {"cpu": 3072, "cuda": 8192}
"""Side of the largest square products that are timed."""


@dataclass(frozen=True)
class Flops:
    """Multiplications and additions by part."""

    expert_forward: float
    student_forward: float
    moments: float
    solve: float
    prior: float = 0.0
    """Products of the prior; 0 but for the recipe "informed"."""

    @property
    def total(self) -> float:
        return sum(asdict(self).values())


def clip_flops(shape: ClipShape, tasks: int, samples: int, *, informed: bool = False) -> Flops:
    """Count the matrix products of Algorithm 1 on pictures for a vision tower, as `count_flops` does.

    Args:
        informed: with those of the prior; maps that share an input then have a system each.
    """
    found = count_flops(shape, tasks, samples, shape.tokens)
    if not informed:
        return found
    maps = shape.blocks * shape.maps
    return replace(found, solve=sum(solve(d, m) for d, m in maps), prior=sum(prior(tasks, d, m) for d, m in maps))


def llama_flops(shape: LlamaShape, tasks: int, samples: int, length: int) -> Flops:
    """Count the matrix products of Algorithm 1 on rows of `length` tokens of a Llama suite, as `count_flops` does."""
    return count_flops(shape, tasks, samples, length, 1 - PADDING)


def count_flops(shape: ClipShape | LlamaShape, tasks: int, samples: int, length: int, seen: float = 1.0) -> Flops:
    """Count the matrix products of Algorithm 1 alone: no norms, softmax or elementwise work.

    The expert runs every block once. The student runs it twice, the first time without its last product. A Gram
    matrix is counted as the symmetric product it is, per distinct input.

    Args:
        length: tokens of a sample.
        seen: share of the tokens that count for the Gram matrices; the others are padding.
    """
    rows, counted = samples * length, round(samples * length * seen)
    groups = every_group(shape)
    block = 2 * rows * sum(d * m for d, m in shape.groups(False)) + 4 * rows * length * shape.width
    last_product, stem = 2 * rows * shape.hidden * shape.width, samples * shape.stem
    return Flops(
        expert_forward=tasks * (stem + shape.blocks * block),
        student_forward=tasks * (stem + shape.blocks * (2 * block - last_product)),
        moments=tasks * sum(moments(counted, d, m) for d, m in groups),
        solve=sum(solve(d, m) for d, m in groups),
    )


def ideal_seconds(flops: Flops, peaks: Mapping[str, float], precision: str, lam: float) -> float:
    """Seconds if every part ran at the measured peak (operations per second by dtype) of its dtype."""
    import torch

    from featcal.calibration.precision import product_dtype, solve_dtype
    from featcal.models.compute import DTYPES
    from featcal.suite.calibration_options import CalibrationConfig

    features = DTYPES[precision]
    products = product_dtype(features, CalibrationConfig(lam=lam))
    dtypes = {"moments": products, "solve": solve_dtype(products), "prior": torch.float32}
    return math.fsum(
        count / peaks[str(dtypes.get(part, features)).removeprefix("torch.")] for part, count in asdict(flops).items()
    )


def gemm_peaks(device: str) -> dict[str, float]:
    """Operations per second of square products, by dtype: the best of six, with the kernels that featcal takes."""
    import torch

    largest = SIDE[device.partition(":")[0]]
    found = {}
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        side = largest // 8
        # A processor without bfloat16 products would take a minute for one of the largest.
        while (seconds := _seconds_of_product(side, dtype, device)) < 0.5 and side < largest:
            side *= 2
        best = min(seconds, *(_seconds_of_product(side, dtype, device) for _ in range(5)))
        found[str(dtype).removeprefix("torch.")] = 2 * side**3 / best
    return found


def _seconds_of_product(side: int, dtype: torch.dtype, device: str) -> float:
    """Time one product of two square matrices."""
    import torch

    from featcal.models.compute import computing

    a, b = (torch.randn(side, side, device=device, dtype=torch.float32).to(dtype) for _ in range(2))
    _wait(device)
    started = time.perf_counter()
    with computing:
        a @ b
    _wait(device)
    return time.perf_counter() - started


def every_group(shape: ClipShape | LlamaShape) -> list[tuple[int, int]]:
    """Return (inputs, outputs) of linear maps that share a Gram matrix, of all blocks."""
    return [group for index in range(shape.blocks) for group in shape.groups(index == shape.blocks - 1)]


def moments(rows: int, d: int, m: int) -> int:
    """Count the Gram matrix, and the cheapest of the three routes to the targets (`LinearGroup.route`)."""
    return rows * d * (d + 1) + 2 * d * min(d * (rows + m), m * (rows + d), 2 * rows * m)


def prior(tasks: int, d: int, m: int) -> int:
    """Count K_i and tau_i K_i of every task, by the smaller side of the map, and W_0 times the sum of all K_i."""
    small = min(d, m)
    turned = m * d * (m + 1) if m < d else 0  # tau tau^T, which takes the place of K_i in the product
    return tasks * (m * d * (d + 1) + turned + 2 * small * m * d) + 2 * m * d**2


def solve(d: int, m: int) -> float:
    """Count a Cholesky factor and two triangular solves."""
    return d**3 / 3 + 2 * d**2 * m


def _wait(device: str) -> None:
    import torch

    if device.startswith("cuda"):
        torch.cuda.synchronize(device)

"""What storing a solution costs: how far rounding to the checkpoint's half precision moves what calibration moved.

The closed forms are solved in float64 and written in the dtype of the tensors that they replace. Where that is float16
or bfloat16, what calibration adds to a weight can be as small as the steps between numbers there, and rounding takes
some of it back: ||stored - solved||_F / ||solved - merged||_F says how much.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from featcal.system.formatting import percent

Rounding = Mapping[str, tuple[float, float]]
"""By dtype ("bfloat16", "float16"): sums over solved tensors of ||solved - merged||_F^2 and of ||stored - solved||_F^2,
in float64. Empty where nothing that was solved is stored in half precision. As JSON it keeps every bit."""
CHUNK = 2**20
"""Numbers of a tensor that are in memory in float64 together."""


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype as people and files call it, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def rounding(merged: Mapping[str, Tensor], solved: Mapping[str, Tensor], stored: Mapping[str, Tensor]) -> Rounding:
    """The sums of some tensors, chunk by chunk where they were solved.

    Args:
        merged: what the solutions replace; may hold more.
        solved: in the precision of the solve.
        stored: the same in the dtype of `merged`.
    """
    return sum_parts(
        _measure_rounding(merged[n], tensor, stored[n]) for n, tensor in solved.items() if _is_half(stored[n].dtype)
    )


def _is_half(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize == 2


def _measure_rounding(merged: Tensor, solved: Tensor, stored: Tensor) -> Rounding:
    moved, lost = (torch.zeros((), dtype=torch.float64, device=solved.device) for _ in range(2))
    chunks = zip(*(torch.split(tensor.flatten(), CHUNK) for tensor in (merged, solved, stored)), strict=True)
    for before, between, after in chunks:
        exact = between.double()
        moved += (exact - before.to(exact)).square().sum()
        lost += (after.to(exact) - exact).square().sum()
    return {dtype_name(stored.dtype): (float(moved), float(lost))}


def sum_parts(parts: Iterable[Rounding]) -> Rounding:
    """The sums of all parts together."""
    total = dict[str, tuple[float, float]]()
    for part in parts:
        for dtype, (moved, lost) in part.items():
            before = total.get(dtype, (0.0, 0.0))
            total[dtype] = before[0] + moved, before[1] + lost
    return total


@dataclass(frozen=True)
class Storing:
    """What storing a calibrated model costs, as its record has it."""

    dtype: str
    """What is rounded to; of several joined by " and "."""
    share: float
    """||stored - solved||_F / ||solved - merged||_F over all tensors that were solved and are stored in `dtype`."""
    block: str
    """Name of the block where that is largest."""
    worst: float
    """Its share."""

    def describe(self, layer: str) -> str:
        """One sentence; `layer` is what people call the block.

        >>> Storing("bfloat16", 0.031, "layers.5", 0.04).describe("block 5")
        'rounding to bfloat16 moves the weights by 3.1 % of what calibration moved them (worst: block 5, 4.0 %)'
        """
        return (
            f"rounding to {self.dtype} moves the weights by {_percent(self.share)} of what calibration moved them "
            f"(worst: {layer}, {_percent(self.worst)})"
        )


def summarise_storing(blocks: Mapping[str, Rounding]) -> Storing | None:
    """The account of all blocks by name; None where nothing that was solved is stored in half precision."""
    total = sum_parts(blocks.values())
    if not total:
        return None
    shares = {block: _share(sums) for block, sums in blocks.items() if sums}
    worst = max(shares, key=lambda block: shares[block])
    return Storing(" and ".join(sorted(total)), _share(total), worst, shares[worst])


def _share(sums: Rounding) -> float:
    """0 where nothing moved: then nothing is rounded either, since merged weights are their own rounding."""
    moved, lost = (math.fsum(one) for one in zip(*sums.values(), strict=True))
    return math.sqrt(lost / moved) if moved else 0.0


def _percent(share: float) -> str:
    """With one decimal, and of what that would make 0.0 the first digit that counts."""
    return f"{percent(share)} %" if share >= 0.001 or not share else f"{100 * share:.1g} %"

"""Measure the rounding error of storing a solution in half precision, relative to the change by calibration.

The closed forms are solved in float64 and written in the dtype of the tensors that they replace. In float16 or bfloat16
the change of a weight can be as small as the spacing of numbers, and rounding undoes a part of it: ||stored -
solved||_F / ||solved - merged||_F measures that part.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from featcal.models.compute import find_device, widen
from featcal.system.formatting import percent

Rounding = Mapping[str, tuple[float, float]]
"""Rounding errors by dtype ("bfloat16", "float16"): sums over solved tensors of ||solved - merged||_F^2 and of
||stored - solved||_F^2, in float64. Empty if no solved tensor is stored in half precision. JSON keeps all bits.
"""
CHUNK = 2**20
"""Number of a tensor's values that are converted to float64 together."""


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in files and messages, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def rounding(merged: Mapping[str, Tensor], solved: Mapping[str, Tensor], stored: Mapping[str, Tensor]) -> Rounding:
    """Compute the sums of `Rounding` for some tensors, chunk by chunk on the device of the solve.

    Args:
        merged: the replaced tensors; may hold more.
        solved: solutions in the dtype of the solve.
        stored: these solutions in the dtype of `merged`.
    """
    return sum_parts(
        _measure_rounding(merged[n], tensor, stored[n]) for n, tensor in solved.items() if _is_half(stored[n].dtype)
    )


def _is_half(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize == 2


def _measure_rounding(merged: Tensor, solved: Tensor, stored: Tensor) -> Rounding:
    moved, lost = (
        torch.zeros((), dtype=torch.float64, device=find_device(solved.device, torch.float64)) for _ in range(2)
    )
    chunks = zip(*(torch.split(tensor.flatten(), CHUNK) for tensor in (merged, solved, stored)), strict=True)
    for before, between, after in chunks:
        exact = widen(between)
        moved += (exact - before.to(exact)).square().sum()
        lost += (after.to(exact) - exact).square().sum()
    return {dtype_name(stored.dtype): (float(moved), float(lost))}


def sum_parts(parts: Iterable[Rounding]) -> Rounding:
    """Add up the sums of all parts."""
    total = dict[str, tuple[float, float]]()
    for part in parts:
        for dtype, (moved, lost) in part.items():
            before = total.get(dtype, (0.0, 0.0))
            total[dtype] = before[0] + moved, before[1] + lost
    return total


@dataclass(frozen=True)
class QuantizationError:
    """Rounding error of a stored calibrated model, for its record."""

    dtype: str
    """Dtype of the rounding; several are joined by " and "."""
    share: float
    """||stored - solved||_F / ||solved - merged||_F over all tensors that were solved and are stored in `dtype`."""
    block: str
    """Name of the block with the largest share."""
    worst: float
    """Largest share of a block."""

    def describe(self, layer: str) -> str:
        """Return one sentence; `layer` is the block's name in tables.

        >>> QuantizationError("bfloat16", 0.031, "layers.5", 0.04).describe("block 5")
        'rounding to bfloat16 moves the weights by 3.1 % of what calibration moved them (worst: block 5, 4.0 %)'
        """
        return (
            f"rounding to {self.dtype} moves the weights by {_percent(self.share)} of what calibration moved them "
            f"(worst: {layer}, {_percent(self.worst)})"
        )


def summarise_storing(blocks: Mapping[str, Rounding]) -> QuantizationError | None:
    """Summarise the rounding error of all blocks; None if no solved tensor is stored in half precision."""
    total = sum_parts(blocks.values())
    if not total:
        return None
    shares = {block: _share(sums) for block, sums in blocks.items() if sums}
    worst = max(shares, key=lambda block: shares[block])
    return QuantizationError(" and ".join(sorted(total)), _share(total), worst, shares[worst])


def _share(sums: Rounding) -> float:
    """Return the share of the change that rounding undoes; 0 if nothing changed."""
    moved, lost = (math.fsum(one) for one in zip(*sums.values(), strict=True))
    # Where nothing moved nothing is rounded either: merged weights are their own rounding.
    return math.sqrt(lost / moved) if moved else 0.0


def _percent(share: float) -> str:
    """Return a share in % with one decimal, or with one digit if that would be 0.0."""
    return f"{percent(share)} %" if share >= 0.001 or not share else f"{100 * share:.1g} %"

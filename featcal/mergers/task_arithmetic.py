"""Task Arithmetic: theta = theta_0 + s * sum_i (theta_i - theta_0)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

DEFAULT_SCALE = 0.3


def merge(base: Tensor, experts: Sequence[Tensor], scale: float | None = None) -> Tensor:
    """Base plus `scale` (0.3 when None) times the sum of the task vectors.

    With scale 0 it is the base, with 1/N Simple Averaging, with one expert and scale 1 that expert.
    """
    total = sum((expert - base for expert in experts), start=base.new_zeros(base.shape))
    return base + (DEFAULT_SCALE if scale is None else scale) * total

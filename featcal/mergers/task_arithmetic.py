"""Task Arithmetic: theta = theta_0 + s * sum_i w_i (theta_i - theta_0)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

DEFAULT_SCALE = 0.3


def merge(
    base: Tensor,
    experts: Iterable[Tensor],
    scale: float | None = None,
    weights: Sequence[float] | None = None,
    normalize: bool = False,
) -> Tensor:
    """Base plus `scale` (0.3 when None) times the task vectors, summed by their `weights` (all 1 when None).

    With `normalize` the sum is divided by the sum of the weights. The experts are read one at a time, in order.
    With scale 0 it is the base, with 1/N Simple Averaging, with one expert and scale 1 that expert.
    """
    total, mass = torch.zeros_like(base), 0.0
    for i, expert in enumerate(experts):
        weight = 1.0 if weights is None else weights[i]
        total.add_(expert - base, alpha=weight)
        mass += weight
    return base + (DEFAULT_SCALE if scale is None else scale) * (total / mass if normalize else total)

"""Weighted average of the experts (model soups): theta = sum_i w_i theta_i / sum_i w_i; the base is not part of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def merge(
    base: Tensor, experts: Iterable[Tensor], weights: Sequence[float] | None = None, normalize: bool = True
) -> Tensor:
    """Sum of the experts' tensors by their `weights` (all 1 when None), over the sum of the weights if `normalize`.

    The experts are read one at a time, in order. Of `base` only shape and dtype count.
    """
    total, mass = torch.zeros_like(base), 0.0
    for i, expert in enumerate(experts):
        weight = 1.0 if weights is None else weights[i]
        total.add_(expert, alpha=weight)
        mass += weight
    return total / mass if normalize else total

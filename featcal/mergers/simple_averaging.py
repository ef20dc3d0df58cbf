"""Simple Averaging: theta = (1/N) sum_i theta_i; the base is not part of it."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from featcal.mergers import linear


def merge(base: Tensor, experts: Iterable[Tensor]) -> Tensor:
    """Mean of the experts' tensors, read one at a time. Of `base` only shape and dtype count."""
    return linear.merge(base, experts)

"""Simple Averaging: theta = (1/N) sum_i theta_i; the base is not part of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def merge(base: Tensor, experts: Sequence[Tensor], scale: float | None = None) -> Tensor:
    """Mean of the experts' tensors; `base` and `scale` are not used."""
    return torch.stack([*experts]).mean(0)

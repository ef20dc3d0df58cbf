"""Model Breadcrumbs: of every tensor of a task vector the smallest and the largest entries are masked, and Task
Arithmetic adds what is left (Davari, Belilovsky, Model Breadcrumbs, arXiv 2312.06795, Sec. 3).

Masks are layer-wise, as the paper has them: one per expert and tensor, by percentiles of the magnitudes. The scale is
tuned in the paper; here it is Task Arithmetic's where none is given.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from featcal.suite.recipe import DEFAULT_BETA, DEFAULT_GAMMA

DEFAULT_SCALE = 0.3


def merge(
    base: Tensor,
    experts: Iterable[Tensor],
    scale: float | None = None,
    beta: float | None = None,
    gamma: float | None = None,
    sizes: Sequence[int] | None = None,
) -> Tensor:
    """Base plus `scale` (alpha, 0.3 when None) times the sum of masked task vectors, read one at a time, in order.

    Args:
        beta, gamma: percentiles between which magnitudes stay, 0 <= beta < gamma <= 1; 0.9 and 0.99 when None.
        sizes: numbers of entries of consecutive parts that are masked each on its own; the whole when None.
    """
    total = torch.zeros_like(base)
    low, high = DEFAULT_BETA if beta is None else beta, DEFAULT_GAMMA if gamma is None else gamma
    for expert in experts:
        change = (expert - base).flatten()
        parts = torch.split(change, list(sizes or [change.numel()]))
        total += torch.cat([mask(part, low, high) for part in parts]).view_as(base)
    return base + (DEFAULT_SCALE if scale is None else scale) * total


def mask(part: Tensor, beta: float, gamma: float) -> Tensor:
    """`[entries]` with the floor(beta n) smallest of n magnitudes set to 0, and those behind the floor(gamma n)-th.

    One entry at least stays, and of equal magnitudes at an edge all do.

    >>> mask(torch.tensor([1.0, -9.0, 2.0, -3.0]), 0.25, 0.75).tolist()
    [0.0, 0.0, 2.0, -3.0]
    """
    size, sizes = part.numel(), part.abs()
    first = min(int(beta * size), size - 1)
    last = max(int(gamma * size), first + 1)
    smallest, largest = sizes.kthvalue(first + 1).values, sizes.kthvalue(last).values
    return part.masked_fill((sizes < smallest) | (sizes > largest), 0)

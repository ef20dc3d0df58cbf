"""Merge by Model Breadcrumbs: set the smallest and the largest entries of every tensor of a task vector to 0, and add
the rest by Task Arithmetic (Davari, Belilovsky, Model Breadcrumbs, arXiv 2312.06795, Sec. 3).

Masks are layer-wise as in the paper: each tensor of each expert has its own, by percentiles of the magnitudes. The
paper tunes the scale; here its default is that of Task Arithmetic.
"""

from __future__ import annotations

import torch
from torch import Tensor

from featcal.mergers.common.merger import Tensors, add_up, merger
from featcal.suite.options import option
from featcal.system.errors import InputError


def _require_order(beta: float, gamma: float) -> None:
    if beta >= gamma:
        raise InputError(f"nothing lies between 'beta' ({beta:g}) and 'gamma' ({gamma:g}); beta must be the smaller")


@merger(
    "breadcrumbs",
    "Model Breadcrumbs: the smallest and the largest entries of every tensor set to 0, then Task Arithmetic",
    paper="2312.06795",
    check=_require_order,
)
def breadcrumbs(
    given: Tensors,
    *,
    scale: float = option(0.3, "factor (alpha) of the sum of masked task vectors"),
    beta: float = option(0.9, "share of a tensor's entries, the smallest, that is masked", least=0, most=1),
    gamma: float = option(0.99, "share of a tensor's entries above which the largest are masked", least=0, most=1),
) -> Tensor:
    masked = (torch.cat([mask(part, beta, gamma) for part in given.split(vector)]) for vector in given.vectors())
    return given.base + scale * add_up(given.base, masked)


def mask(part: Tensor, beta: float, gamma: float) -> Tensor:
    """Set the floor(beta n) smallest of n magnitudes to 0, and those after the floor(gamma n)-th; `[entries]`.

    At least one entry stays; of several equal magnitudes at a limit, all stay.

    >>> mask(torch.tensor([1.0, -9.0, 2.0, -3.0]), 0.25, 0.75).tolist()
    [0.0, 0.0, 2.0, -3.0]
    """
    size, sizes = part.numel(), part.abs()
    first = min(int(beta * size), size - 1)
    # In a tensor of few entries both ranks may fall together; one entry is kept.
    last = max(int(gamma * size), first + 1)
    smallest, largest = sizes.kthvalue(first + 1).values, sizes.kthvalue(last).values
    return part.masked_fill((sizes < smallest) | (sizes > largest), 0)

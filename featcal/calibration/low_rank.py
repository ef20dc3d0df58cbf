"""Truncate a change of a linear map to a low rank, in the metric of the map's inputs.

With D the change `[m, d]` and H = G + l I `[d, d]`, G the second moments of the map's inputs and l > 0,

    tr((D - B A) H (D - B A)^T)

is least over all products of rank r for B = U_r and A = U_r^T D, with U S V^T the singular value decomposition of D L
and H = L L^T (Eckart and Young, for D L): the squares of the other singular values are left out. B S V^T L^-1 is the
same product; written as U U^T D it needs no inverse, so directions that hardly occur in inputs cannot amplify errors.
Every L gives the same U; that of Cholesky is the cheapest.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from featcal.system.errors import InputError, NumericalError


@dataclass(frozen=True)
class Limits:
    """The bounds of the rank of a product.

    Raises:
        InputError: neither limit is given, or one is out of range.
    """

    rank: int | None = None
    """Largest rank, >= 1; None for that of the map."""
    energy: float | None = None
    """Share in (0, 1] of the change's effect on the inputs, in squares, to keep by the smallest sufficient rank; None
    for as much as `rank` allows."""

    def __post_init__(self) -> None:
        if self.rank is None and self.energy is None:
            raise InputError("give the size of the adapter: a rank, or the energy that it keeps, or both")
        if self.rank is not None and self.rank < 1:
            raise InputError(f"rank is at least 1, not {self.rank}")
        if self.energy is not None and not 0 < self.energy <= 1:
            raise InputError(f"energy is a share above 0 and at most 1, not {self.energy:g}")

    def choose(self, energies: Float[Tensor, " k"]) -> int:
        """Return the rank for these squares of singular values, in descending order."""
        most = len(energies) if self.rank is None else min(self.rank, len(energies))
        if self.energy is None or self.energy == 1:
            return most
        kept = energies.cumsum(0) / energies.sum()
        # The last entry may be rounded to less than 1, so it is not asked.
        return min(most, int((kept[:-1] < self.energy).sum()) + 1)


@dataclass(frozen=True)
class Truncation:
    """The best product of a given rank for one change, and the loss."""

    up: Float[Tensor, "m r"]
    """B, with orthonormal columns."""
    down: Float[Tensor, "r d"]
    """A."""
    left_out: float
    """Loss: effect of the truncated rest on the inputs, tr((D - B A) H (D - B A)^T)."""
    total: float
    """Effect of the whole change on the inputs, tr(D H D^T)."""


def truncate(change: Float[Tensor, "m d"], metric: Float[Tensor, "d d"], limits: Limits) -> Truncation:
    """Return the product of low rank that is nearest to a change in the metric; with full rank it equals the change.

    Args:
        change: not 0.
        metric: H, symmetric and positive definite; its lower triangle is read.

    Raises:
        NumericalError: the metric is not positive definite, or a value is not finite.

    >>> found = truncate(torch.tensor([[3.0, 0.0], [0.0, 1.0]]), torch.diag(torch.tensor([1.0, 100.0])), Limits(rank=1))
    >>> (found.up @ found.down).tolist(), found.left_out, found.total  # the small change meets the larger inputs
    ([[0.0, 0.0], [0.0, 1.0]], 9.0, 109.0)
    """
    # `_ex` reports failure as a number, so that the error can say what to do.
    root, info = torch.linalg.cholesky_ex(metric)
    if int(info) != 0 or not bool(torch.isfinite(root.diagonal().sum() + change.sum())):
        raise NumericalError("the second moments of its inputs are not positive definite; calibrate with a larger lam")
    left: Tensor
    left, values, _ = torch.linalg.svd(change @ root, full_matrices=False)
    energies = values.square()
    rank = limits.choose(energies)
    up = left[:, :rank]
    return Truncation(up, up.mT @ change, float(energies[rank:].sum()), float(energies.sum()))

"""Compute singular vectors for mergers, without singular values that are 0 up to rounding:
at most max(m, d) * eps times the largest.
"""

from __future__ import annotations

import torch
from torch import Tensor


def largest_singular(matrix: Tensor, most: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Return U `[m, k]`, S `[k]` and V^T `[k, d]` of a matrix `[m, d]`: its largest singular values, at most `most` of
    them and no more than its rank."""
    u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    # Vectors of a singular value of 0 are arbitrary; `[:1].sum()` is 0 of a matrix without entries.
    rank = int((s > max(matrix.shape) * torch.finfo(s.dtype).eps * s[:1].sum()).sum())
    k = rank if most is None else min(rank, most)
    return u[:, :k], s[:k], vh[:k]


def orthonormal(matrix: Tensor) -> Tensor:
    """Return P Q^T for a matrix P S Q^T: the nearest matrix with orthonormal columns (or
    rows, if there are fewer rows).
    """
    p, _, qh = largest_singular(matrix)
    return p @ qh

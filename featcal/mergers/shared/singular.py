"""Singular vectors as mergers of matrices use them. Where a singular value is 0 its vectors are arbitrary, so they are
left out: zero up to rounding, that is at most max(m, d) * eps of the largest."""

from __future__ import annotations

import torch
from torch import Tensor


def top(matrix: Tensor, most: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """U `[m, k]`, S `[k]` and V^T `[k, d]` of a matrix `[m, d]`: its largest singular values, at most `most` of them
    and no more than its rank."""
    u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    rank = int((s > max(matrix.shape) * torch.finfo(s.dtype).eps * s[:1].sum()).sum())
    k = rank if most is None else min(rank, most)
    return u[:, :k], s[:k], vh[:k]


def orthonormal(matrix: Tensor) -> Tensor:
    """P Q^T of matrix = P S Q^T: of all matrices with orthonormal columns (or rows, if there are fewer) the nearest."""
    p, _, qh = top(matrix)
    return p @ qh

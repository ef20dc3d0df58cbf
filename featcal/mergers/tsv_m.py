"""TSV-Merge: the strongest singular components of every task matrix, made orthogonal to those of the other tasks
(Gargiulo, Crisostomi, Bucarelli, Scardapane, Silvestri, Rodola, Task Singular Vectors, arXiv 2412.00081).

Of r = min(m, d) components every one of N tasks keeps its r / N largest; U and V of all tasks side by side are each
replaced by the nearest orthonormal matrix (orthogonal Procrustes, equal to whitening). What is no matrix is averaged.
alpha is 1 in the paper.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from featcal.mergers.singular import orthonormal, top


def merge(changes: Sequence[Tensor]) -> Tensor:
    """The merged task matrix `[m, d]` of task matrices of that shape; at least one component of every task is kept.

    As long as no directions of two tasks coincide, its singular values are those that were kept.
    """
    kept = max(1, min(changes[0].shape) // len(changes))
    u, s, vh = zip(*(top(change, kept) for change in changes), strict=True)
    return orthonormal(torch.cat(u, 1)) * torch.cat(s) @ orthonormal(torch.cat(vh))

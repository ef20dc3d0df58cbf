"""Merge by TSV-Merge: take the strongest singular components of every task matrix, orthogonal to those of other tasks
(Gargiulo, Crisostomi, Bucarelli, Scardapane, Silvestri, Rodola, Task Singular Vectors, arXiv 2412.00081).

Of r = min(m, d) components every one of N tasks keeps its r / N largest; U and V of all tasks side by side are each
replaced by the nearest orthonormal matrix (orthogonal Procrustes, equal to whitening). Other tensors are averaged.
alpha is 1 in the paper.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from featcal.mergers.common.merger import merger
from featcal.mergers.common.singular import largest_singular, orthonormal
from featcal.suite.options import option


@merger(
    "tsv-m",
    "TSV-Merge: the strongest singular components of every task matrix, made orthogonal",
    paper="2412.00081",
    matrices=True,
)
def tsv_m(
    changes: Sequence[Tensor], *, scale: float = option(1.0, "factor (alpha) of the merged task matrix")
) -> Tensor:
    """Return the merged task matrix; every task keeps at least one component. If no directions of two tasks
    coincide, its singular values are those that were kept, times the scale.
    """
    kept = max(1, min(changes[0].shape) // len(changes))
    u, s, vh = zip(*(largest_singular(change, kept) for change in changes), strict=True)
    return scale * (orthonormal(torch.cat(u, 1)) * torch.cat(s) @ orthonormal(torch.cat(vh)))

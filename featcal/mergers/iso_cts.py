"""Merge by Iso-CTS: Iso-C in which directions of single tasks replace the weakest directions of the sum (Marczak,
Magistri, Cygert, Twardowski, Bagdanov, van de Weijer, No Task Left Behind, arXiv 2502.04959).

The strongest directions of the summed task matrices are the common space; every task adds its strongest directions
outside of that space. All directions are made orthonormal, and all singular values are set to their mean. Other tensors
are averaged. Scale and experts as in Iso-C.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from featcal.mergers.common.merger import merger
from featcal.mergers.common.singular import largest_singular, orthonormal
from featcal.suite.options import option


@merger(
    "iso-cts",
    "Iso-C with directions of single tasks in place of the weakest common ones",
    paper="2502.04959",
    matrices=True,
)
def iso_cts(
    changes: Sequence[Tensor],
    *,
    scale: float = option(1.0, "factor (alpha) of the merged task matrix"),
    common: float = option(0.8, "share of a matrix's directions that are common to all tasks", least=0, most=1),
) -> Tensor:
    """Merge task matrices; `common`, the share of common directions, is rounded so that all
    tasks add equally many others.
    """
    shared, each = _directions(min(changes[0].shape), len(changes), common)
    u, s, vh = (list(one) for one in zip(largest_singular(sum(changes[1:], changes[0]), shared), strict=True))
    for change in changes:
        # The common space is projected out first, so a task adds only what it has outside of it.
        own = largest_singular(change - u[0] @ (u[0].T @ change), each)
        for held, found in zip((u, s, vh), own, strict=True):
            held.append(found)
    values = torch.cat(s)
    # Directions of different tasks still overlap: orthonormal only after all stand side by side.
    return scale * (values.sum() / max(1, len(values)) * (orthonormal(torch.cat(u, 1)) @ orthonormal(torch.cat(vh))))


def _directions(rank: int, tasks: int, common: float) -> tuple[int, int]:
    """Return the numbers of common directions and of each task's own directions; they add up to `rank`.

    >>> _directions(768, 8, 0.8)
    (616, 19)
    """
    each = min(round((rank - int(rank * common)) / tasks), rank // tasks)
    return rank - each * tasks, each

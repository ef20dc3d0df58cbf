"""TIES: task vectors are trimmed to their largest entries, a sign is elected for every entry, and what agrees with it
is averaged (Yadav, Tam, Choshen, Raffel, Bansal, TIES-Merging, arXiv 2306.01708, Sec. 4, Algorithm 1).

The largest entries are those of the *whole* task vector, over all tensors that are merged. Where the cut lies is found
before anything is merged, in passes over every expert that hold a part of it at a time (`trimming`). mergekit's `ties`
trims tensor by tensor and is another method, `ties_per_tensor`.

At two places, which concern single entries, the paper's code differs from its algorithm and from this one: it keeps one
entry more, and where the trimmed values of an entry cancel to exactly 0 it takes the sign that most entries have, while
here, as sgn(0) = 0 says, such an entry stays the base's. Equal magnitudes at the cut are all kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from featcal.mergers.election import votes

DEFAULT_DENSITY = 0.2
DEFAULT_SCALE = 1.0


def merge(base: Tensor, vectors: Iterable[Tensor], thresholds: Sequence[float], scale: float | None = None) -> Tensor:
    """Base plus `scale` (lambda, 1 when None) times the elected task vector.

    The elected sign of an entry is that of the sum of its trimmed values; the elected value is the mean of those that
    have it.

    Args:
        vectors: task vectors, taken one at a time, in order.
        thresholds: smallest magnitude that is kept of each; see `kept`.
    """
    trimmed = (trim(vector, threshold) for vector, threshold in zip(vectors, thresholds, strict=True))
    plus, minus, plus_count, minus_count = votes(base, trimmed)
    total = plus + minus
    elected = torch.where(total > 0, plus / plus_count.clamp(min=1), minus / minus_count.clamp(min=1))
    return base + (DEFAULT_SCALE if scale is None else scale) * elected.masked_fill(total == 0, 0)


def trim(vector: Tensor, threshold: float) -> Tensor:
    """`vector` with the entries of magnitude below `threshold` set to 0."""
    return vector.masked_fill(vector.abs() < threshold, 0)


def kept(entries: int, density: float) -> int:
    """How many of a task vector's entries stay: `density` of them, rounded down, and at least one."""
    return max(1, int(density * entries))

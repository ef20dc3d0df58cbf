"""TIES trimmed tensor by tensor, as mergekit's `ties` is: task vectors are trimmed to their largest entries, a sign is
elected for every entry, and what agrees with it is averaged.

Two rules differ from the published method (`ties`, Yadav et al., arXiv 2306.01708): the largest entries are those of
each *tensor*, where the paper trims the task vector of the whole model at once, and the experts have weights. Numbers
in papers' tables come from whole-vector trimming, and are not to be compared with this one's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from featcal.mergers.election import votes
from featcal.mergers.ties import kept_count

DEFAULT_DENSITY = 0.2
DEFAULT_SCALE = 1.0
_SMALLEST_MASS = 1e-8
"""Where weights of both signs cancel below this, the sum is not divided."""


def merge(
    base: Tensor,
    experts: Iterable[Tensor],
    scale: float | None = None,
    weights: Sequence[float] | None = None,
    densities: Sequence[float] | None = None,
    normalize: bool = True,
    sizes: Sequence[int] | None = None,
) -> Tensor:
    """Base plus `scale` (1 when None) times the elected task vector.

    The sign of an entry is that of sum_i w_i tau_i, plus where the sum is 0; the elected value is the sum of the
    w_i tau_i of that sign, over the sum of their w_i if `normalize`.

    Args:
        base, experts: one tensor each; the experts are read one at a time, in order.
        weights: one per expert; all 1 when None.
        densities: share of entries kept, one per expert, in (0, 1]; all 0.2 when None.
        sizes: numbers of entries of consecutive parts that are trimmed each on its own; the whole when None.
    """
    trimmed = (
        trim(expert - base, DEFAULT_DENSITY if densities is None else densities[i], sizes)
        for i, expert in enumerate(experts)
    )
    plus, minus, plus_mass, minus_mass = votes(base, trimmed, weights)
    elected = plus + minus >= 0
    merged = torch.where(elected, plus, minus)
    if normalize:
        mass = torch.where(elected, plus_mass, minus_mass)
        merged = merged / mass.masked_fill(mass.abs() < _SMALLEST_MASS, 1)
    return base + (DEFAULT_SCALE if scale is None else scale) * merged


def trim(vector: Tensor, density: float, sizes: Sequence[int] | None = None) -> Tensor:
    """`vector` with all but its largest entries by magnitude set to 0.

    As many entries stay as `ties.kept_count` says. Where entries at the edge are equal, as they often are
    between models in half precision, `torch.topk` decides: it does in mergekit too.

    >>> trim(torch.tensor([1.0, -3.0, 0.5, 2.0]), 0.5).tolist()
    [0.0, -3.0, 0.0, 2.0]
    """
    trimmed = torch.zeros_like(vector, memory_format=torch.contiguous_format)
    split = list(sizes or [vector.numel()])
    for part, target in zip(torch.split(vector.flatten(), split), torch.split(trimmed.view(-1), split), strict=True):
        largest = part.abs().topk(kept_count(len(part), density), sorted=False).indices
        target[largest] = part[largest]
    return trimmed

"""Merge by TIES as mergekit's `ties` does: trim task vectors tensor by tensor to their largest entries, elect a sign
for every entry, and average the values of that sign. Two rules differ from the published method (`ties`, Yadav et al.,
arXiv 2306.01708): the largest entries are those of each *tensor*, where the paper trims the task vector of the whole
model at once, and the experts have weights. The numbers in papers come from whole-vector trimming; do not compare them
with this method's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from featcal.mergers.common.election import votes
from featcal.mergers.common.merger import Tensors, merger
from featcal.mergers.ties import kept_count
from featcal.suite.options import option

_SMALLEST_MASS = 1e-8
"""Smallest sum of weights that is divided by; below it, since the signs of the weights cancel, nothing is divided."""


@merger(
    "ties-per-tensor", "mergekit's `ties`: trimmed tensor by tensor, with weights", paper="2306.01708", mergekit="ties"
)
def ties_per_tensor(
    given: Tensors,
    *,
    scale: float = option(1.0, "factor of the elected task vector"),
    weights: Mapping[str, float] | None = option(None, "weight of every task's vector", by_task=True),
    density: float | Mapping[str, float] = option(
        0.2, "share of a tensor's entries that is kept", above=0, most=1, by_task=True
    ),
    normalize: bool = option(True, "divide every entry by the weights of the experts that agree there"),
) -> Tensor:
    """Return base plus scale times the elected task vector: the sign of an entry is that of sum_i w_i tau_i, positive
    where the sum is 0; its value is the sum of the w_i tau_i of that sign, divided by the sum of those w_i with
    `normalize`.
    """
    sizes, densities = list(given.parts.values()), given.values_per_expert(density)
    trimmed = (trim_tensor(vector, kept, sizes) for vector, kept in zip(given.vectors(), densities, strict=True))
    plus, minus, plus_mass, minus_mass = votes(given.base, trimmed, given.values_per_expert(weights))
    # mergekit elects plus where the sum is 0; the published TIES leaves such an entry the base's.
    elected = plus + minus >= 0
    merged = torch.where(elected, plus, minus)
    if normalize:
        mass = torch.where(elected, plus_mass, minus_mass)
        merged = merged / mass.masked_fill(mass.abs() < _SMALLEST_MASS, 1)
    return given.base + scale * merged


def trim_tensor(vector: Tensor, density: float, sizes: Sequence[int] | None = None) -> Tensor:
    """Set all but the largest entries by magnitude to 0; as many stay as `ties.kept_count` says.

    >>> trim_tensor(torch.tensor([1.0, -3.0, 0.5, 2.0]), 0.5).tolist()
    [0.0, -3.0, 0.0, 2.0]
    """
    trimmed = torch.zeros_like(vector, memory_format=torch.contiguous_format)
    split = list(sizes or [vector.numel()])
    for part, target in zip(torch.split(vector.flatten(), split), torch.split(trimmed.view(-1), split), strict=True):
        size, kept = part.abs().float(), kept_count(len(part), density)
        values, largest = size.topk(kept, sorted=False)
        # Equal magnitudes at the edge are frequent in half precision: mergekit keeps those that sorting has first.
        if int((size >= values.min()).sum()) > kept:
            largest = size.argsort(descending=True)[:kept]
        target[largest] = part[largest]
    return trimmed

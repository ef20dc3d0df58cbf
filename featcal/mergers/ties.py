"""Merge by TIES: trim task vectors to their largest entries, elect a sign for every entry, and average the values of
that sign (Yadav, Tam, Choshen, Raffel, Bansal, TIES-Merging, arXiv 2306.01708, Sec. 4, Algorithm 1).

The largest entries are those of the *whole* task vector, over all tensors that are merged. The threshold is computed
before any tensor is merged, in passes over every expert that load a part of it at a time (`largest`). mergekit's `ties`
trims tensor by tensor and is another method, `ties_per_tensor`.

The paper's code differs from its algorithm, and from this file, in two details that concern single entries. It keeps
one entry more. And where the trimmed values of an entry cancel to exactly 0, it takes the sign that most entries have;
here such an entry stays the base's, since sgn(0) = 0. Of several equal magnitudes at the threshold, all are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from featcal.mergers.common.election import votes
from featcal.mergers.common.merger import Merger, Tensors, Whole
from featcal.suite.methods import register_method
from featcal.suite.options import option

_DIGIT = 21
"""Bits of a magnitude that one pass determines: three passes cover the 63 bits in float64,
and 2**21 counts take 16 MiB.
"""


@register_method(
    "ties",
    "TIES as published: whole task vectors trimmed, signs elected, mean of the values with that sign",
    paper="2306.01708",
    note="ties trims whole task vectors, as published; trimmed tensor by tensor, as mergekit does it, it is "
    "ties-per-tensor",
)
@dataclass(frozen=True)
class Ties(Merger):
    entrywise: ClassVar[bool] = True

    scale: float = option(1.0, "factor (lambda) of the elected task vector")
    density: float | Mapping[str, float] = option(
        0.2, "share of a task vector's entries that is kept", above=0, most=1, by_task=True
    )

    def prepare(self, whole: Whole) -> list[float]:
        """Return, for every whole task vector, the smallest magnitude that is kept, in three passes over the models."""
        densities = [self.density[t] if isinstance(self.density, Mapping) else self.density for t in whole.tasks]
        return [
            largest(partial(self._parts, whole, task), kept_count(whole.entries, density))
            for task, density in zip(whole.tasks, densities, strict=True)
        ]

    def _parts(self, whole: Whole, task: str) -> Iterator[Tensor]:
        return (vector for vector, _ in whole.vector(task))

    def merge(self, given: Tensors) -> Tensor:
        return given.base + self.scale * elect(given.base, given.vectors(), given.prepared)


def elect(like: Tensor, vectors: Iterable[Tensor], thresholds: Sequence[float]) -> Tensor:
    """Return the elected task vector: the sign of an entry is that of the sum of the trimmed values, and its size is
    the mean of the values that have this sign.

    Args:
        like: a tensor whose shape and dtype are used.
        vectors: task vectors, taken one at a time, in order.
        thresholds: smallest magnitude that is kept of each; see `kept_count`.
    """
    trimmed = (trim_below(vector, threshold) for vector, threshold in zip(vectors, thresholds, strict=True))
    plus, minus, plus_count, minus_count = votes(like, trimmed)
    # Algorithm 1, step 2: the sign of the sum; step 3: the mean of the entries that have it.
    total = plus + minus
    elected = torch.where(total > 0, plus / plus_count.clamp(min=1), minus / minus_count.clamp(min=1))
    # sgn(0) = 0: where trimmed values cancel, the entry stays the base's.
    return elected.masked_fill(total == 0, 0)


def trim_below(vector: Tensor, threshold: float) -> Tensor:
    """Set the entries of magnitude below `threshold` to 0."""
    return vector.masked_fill(vector.abs() < threshold, 0)


def kept_count(entries: int, density: float) -> int:
    """Return how many entries of a task vector stay: `density` of them, rounded down, and at least one."""
    return max(1, int(density * entries))


def largest(parts: Callable[[], Iterable[Tensor]], k: int) -> float:
    """Return the k-th largest magnitude, exactly, of a vector that is never in memory as a whole; 1 <= k <= entries.

    Every pass counts one digit of the bits of those magnitudes that agree with the digits found so far; the next digit
    is where the count from above reaches `k`.

    Args:
        parts: returns an iterator over the vector's parts, in float64; called three times.

    >>> largest(lambda: [torch.tensor([0.5, -3.0]).double(), torch.tensor([2.0]).double()], 2)
    2.0
    """
    found = 0
    for shift in range(63 - _DIGIT, -1, -_DIGIT):
        counts = torch.zeros(2**_DIGIT, dtype=torch.int64)
        for part in parts():
            # Without a sign, floating-point numbers are ordered as their bits are, read as a whole number.
            bits = part.abs().view(torch.int64)
            inside = bits[bits >> (shift + _DIGIT) == found]
            counts += torch.bincount((inside >> shift) & (2**_DIGIT - 1), minlength=2**_DIGIT).cpu()
        from_above = counts.flip(0).cumsum(0)
        place = int(torch.searchsorted(from_above, k))
        # Those above the digit are settled: what is left is the rank among those that have it.
        k -= int(from_above[place - 1]) if place else 0
        found = found << _DIGIT | 2**_DIGIT - 1 - place
    return torch.tensor(found).view(torch.float64).item()

"""The k-th largest magnitude of a vector that is never in memory as a whole: exact, by refining a histogram of bits."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

_DIGIT = 21
"""Bits that a pass settles: three of them are the 63 of a magnitude in float64, and 2**21 counts take 16 MiB."""


def largest(parts: Callable[[], Iterable[Tensor]], k: int) -> float:
    """The k-th largest magnitude, with 1 <= k <= entries; at least `k` entries are not smaller.

    Magnitudes in float64 are ordered as their bits are, read as a whole number: a pass counts one digit of those that
    agree with the digits found so far, and the next digit is where the count from above reaches `k`.

    Args:
        parts: gives the vector's parts anew, in float64; called three times.

    >>> largest(lambda: [torch.tensor([0.5, -3.0]).double(), torch.tensor([2.0]).double()], 2)
    2.0
    """
    found = 0
    for shift in range(63 - _DIGIT, -1, -_DIGIT):
        counts = torch.zeros(2**_DIGIT, dtype=torch.int64)
        for part in parts():
            bits = part.abs().view(torch.int64)
            inside = bits[bits >> (shift + _DIGIT) == found]
            counts += torch.bincount((inside >> shift) & (2**_DIGIT - 1), minlength=2**_DIGIT)
        from_above = counts.flip(0).cumsum(0)
        place = int(torch.searchsorted(from_above, k))
        k -= int(from_above[place - 1]) if place else 0
        found = found << _DIGIT | 2**_DIGIT - 1 - place
    return torch.tensor(found).view(torch.float64).item()

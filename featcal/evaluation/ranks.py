"""Correlate values by their ranks (Spearman), over all samples or over many bootstrap draws at once."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def centred_ranks(values: Array, times: NDArray[np.int64]) -> Array:
    """Return `[draws, n]` ranks of the samples' values, with tied ranks averaged, where sample i was drawn `times[.,
    i]` times; the mean over a draw is 0."""
    _, group = np.unique(values, return_inverse=True)
    order = np.argsort(group, kind="stable")
    sizes = np.add.reduceat(times[:, order], np.flatnonzero(np.diff(group[order], prepend=-1)), axis=1)
    middle = np.cumsum(sizes, axis=1) - sizes / 2
    centred: Array = middle[:, group] - times.shape[1] / 2
    return centred


def correlate(left: Array, right: Array, times: NDArray[np.int64]) -> Array:
    """Return `[draws]` correlations of centred values `[draws, n]`, with sample i drawn `times[., i]` times; 0 if all
    values of a draw are equal."""
    spread = (times * left**2).sum(1) * (times * right**2).sum(1)
    together = (times * left * right).sum(1)
    found: Array = np.divide(together, np.sqrt(spread), out=np.zeros(len(times)), where=spread > 0)
    return found


def rank_correlation(a: Array, b: Array) -> float:
    """Return Spearman's correlation of two arrays `[n]`, with tied ranks averaged; 0 if all values of one are equal."""
    once = np.ones((1, len(a)), dtype=np.int64)
    return float(correlate(centred_ranks(a, once), centred_ranks(b, once), once)[0])

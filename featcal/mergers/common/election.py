"""Sum task vectors separately for positive and negative entries, from which TIES elects a sign and takes the mean."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Votes(NamedTuple):
    """Sums of the positive and of the negative values, entry by entry, and the weights of each."""

    plus: Tensor
    minus: Tensor
    plus_mass: Tensor
    minus_mass: Tensor


def votes(like: Tensor, vectors: Iterable[Tensor], weights: Sequence[float] | None = None) -> Votes:
    """Sum the positive and the negative entries of task vectors, each vector times its weight (1 if `weights` is None),
    one vector at a time and in order. Only the shape and dtype of `like` are used. Entries that are 0 count for neither
    sign.
    """
    plus, minus, plus_mass, minus_mass = (torch.zeros_like(like) for _ in range(4))
    for i, vector in enumerate(vectors):
        weight = 1.0 if weights is None else weights[i]
        weighted = vector * weight
        plus += weighted.clamp(min=0)
        minus += weighted.clamp(max=0)
        # The sign of the weighted entry: a negative weight turns the vote.
        plus_mass.add_(weighted > 0, alpha=weight)
        minus_mass.add_(weighted < 0, alpha=weight)
    return Votes(plus, minus, plus_mass, minus_mass)

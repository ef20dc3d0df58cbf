"""Merge by Simple Averaging: theta = (1/N) sum_i theta_i, without the base."""

from __future__ import annotations

from torch import Tensor

from featcal.mergers.common.merger import Tensors, merger, weighted_sum


@merger("simple-averaging", "mean of the experts (model soups)", paper="2203.05482", entrywise=True)
def simple_averaging(given: Tensors) -> Tensor:
    return weighted_sum(given.base, given.experts, given.values_per_expert(1.0), normalize=True)

"""Take the weighted mean of the experts (model soups): theta = sum_i w_i theta_i / sum_i w_i, without the base."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from featcal.mergers.common.merger import Tensors, merger, require_divisor, weighted_sum
from featcal.suite.options import option


@merger(
    "linear",
    "weighted sum or mean of the experts",
    paper="2203.05482",
    mergekit="linear",
    entrywise=True,
    check=require_divisor,
)
def linear(
    given: Tensors,
    *,
    weights: Mapping[str, float] | None = option(None, "weight of every task's expert", by_task=True),
    normalize: bool = option(True, "divide by the sum of the weights"),
) -> Tensor:
    return weighted_sum(given.base, given.experts, given.values_per_expert(weights), normalize)

"""Take the weighted mean of the experts (model soups): theta = sum_i w_i theta_i / sum_i w_i; the base is not part of
it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from featcal.mergers.common.merger import Merger, Tensors, require_divisor, weighted_sum
from featcal.suite.methods import register_method
from featcal.suite.options import option


@register_method("linear", "weighted sum or mean of the experts", paper="2203.05482", mergekit="linear")
@dataclass(frozen=True)
class Linear(Merger):
    weights: Mapping[str, float] | None = option(None, "weight of every task's expert", by_task=True)
    normalize: bool = option(True, "divide by the sum of the weights")

    def __post_init__(self) -> None:
        super().__post_init__()
        require_divisor(self.weights, self.normalize)

    def merge(self, given: Tensors) -> Tensor:
        return weighted_sum(given.base, given.experts, given.values_per_expert(self.weights), self.normalize)

"""Merge by Task Arithmetic: theta = theta_0 + s * sum_i w_i (theta_i - theta_0) (Ilharco et al., arXiv 2212.04089).

With scale 0 it is the base, with 1/N Simple Averaging, with one expert and scale 1 that expert.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from featcal.mergers.common.merger import Tensors, merger, require_divisor, weighted_sum
from featcal.suite.options import option


@merger(
    "task-arithmetic",
    "base plus scale times the sum of task vectors",
    paper="2212.04089",
    mergekit="task_arithmetic",
    entrywise=True,
    check=require_divisor,
)
def task_arithmetic(
    given: Tensors,
    *,
    scale: float = option(0.3, "factor of the summed task vectors"),
    weights: Mapping[str, float] | None = option(None, "weight of every task's vector", by_task=True),
    normalize: bool = option(False, "divide by the sum of the weights"),
) -> Tensor:
    total = weighted_sum(given.base, given.vectors(), given.values_per_expert(weights), normalize)
    return given.base + scale * total

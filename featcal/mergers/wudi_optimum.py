"""Solve for the minimiser of WUDI's loss in closed form (see `wudi`): RegMean of the task matrices with their own Gram
matrices.

It is where the flow of `swudi` ends: in directions in which no task matrix reads anything, the loss does not depend on
t, and the sum of the task matrices stays. Other tensors are averaged. There is no scale.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from featcal.mergers.common.merger import MatrixMerger
from featcal.mergers.swudi import follow_flow
from featcal.suite.methods import register_method


@register_method(
    "wudi-optimum",
    "the minimiser of WUDI's loss in closed form: where the way of `swudi` ends, and another merge than `wudi`",
)
@dataclass(frozen=True)
class WudiOptimum(MatrixMerger):
    def merge_matrix(self, changes: Sequence[Tensor]) -> Tensor:
        return minimise(changes)


def minimise(changes: Sequence[Tensor]) -> Tensor:
    """Return the minimiser of WUDI's loss that is nearest to the sum of the task matrices, `[m, d]`."""
    return follow_flow(changes, math.inf, 1.0)

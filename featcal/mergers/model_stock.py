"""Merge by Model Stock: interpolate the average of the experts with the base by the angle between task vectors (Jang,
Yun, Han, Model Stock, arXiv 2403.19522: w_H = t w_avg + (1 - t) w_0, t = N cos / (1 + (N - 1) cos)).

Layer-wise, as in the paper: every tensor has its own angle and its own t. With more than two experts cos is the mean
over all pairs, since the paper gives no other rule. The paper merges models of *one* task, whose angles are acute; a
mean cosine below 0 counts as 0 here, which gives the base. An expert that did not change a tensor has cosine 0 with the
others.
"""

from __future__ import annotations

import torch
from torch import Tensor

from featcal.mergers.common.merger import Tensors, merger


@merger(
    "model-stock",
    "Model Stock: a point between base and average, chosen per tensor by the angle of the task vectors",
    paper="2403.19522",
)
def model_stock(given: Tensors) -> Tensor:
    """Return the merged weights w_H of every tensor."""
    total, units = (torch.zeros_like(given.base) for _ in range(2))
    moved, count = [0] * len(given.parts), len(given.tasks)
    for change in given.vectors():
        total += change
        for i, (part, unit) in enumerate(zip(given.split(change), given.split(units), strict=True)):
            norm = part.norm()
            if norm > 0:
                # Unit vectors are summed, not compared in pairs, so that one expert at a time is in memory.
                unit += part / norm
                moved[i] += 1
    merged = given.base.clone()
    parts = zip(given.split(merged), given.split(total), given.split(units), moved, strict=True)
    for target, summed, unit, those in parts:
        target += ratio(_mean_cosine(unit, those, count), count) * summed / count
    return merged


def ratio(cosine: float, count: int) -> float:
    """Return t, the share of the way from the base to the average of `count` experts.

    >>> ratio(1.0, 4), ratio(0.0, 4), ratio(0.5, 2)
    (1.0, 0.0, 0.6666666666666666)
    """
    # Below 0, t would leave the segment between base and average.
    acute = min(max(cosine, 0.0), 1.0)
    return count * acute / (1 + (count - 1) * acute)


def _mean_cosine(units: Tensor, moved: int, count: int) -> float:
    """Return the mean cosine of all pairs of `count` vectors, given the sum of the unit
    vectors of the `moved` ones that are not 0.
    """
    return 1.0 if count == 1 else (float(units.dot(units)) - moved) / (count * (count - 1))

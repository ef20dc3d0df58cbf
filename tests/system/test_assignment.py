"""The cheapest assignment against scipy's."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import linear_sum_assignment

from featcal.system.assignment import assign_columns


@pytest.mark.parametrize("count", [0, 1, 2, 3, 5, 8, 20])
def test_assignments_are_scipys(count: int) -> None:
    rng = np.random.default_rng(count)
    for _ in range(20):
        costs = rng.normal(size=(count, count))
        assert assign_columns(costs.tolist()) == linear_sum_assignment(costs)[1].tolist()


def test_equal_costs_are_shared_as_cheaply_as_by_scipy() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        costs = rng.integers(0, 3, (6, 6)).astype(float)
        found = assign_columns(costs.tolist())
        assert sorted(found) == [*range(6)]
        assert costs[range(6), found].sum() == costs[linear_sum_assignment(costs)].sum()

"""Give every row of a small table a column of its own at the least cost (Kuhn 1955, Munkres 1957)."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf


def assign_columns(costs: Sequence[Sequence[float]]) -> list[int]:
    """Return for every row of a square table the column that it gets, so that the sum of its costs is least.

    Rows come one by one. Each takes the cheapest free column, or one that is taken, whose row then moves on; potentials
    of rows and columns, under which no cost is negative, make Dijkstra's search for the cheapest such path right.

    >>> assign_columns([[4, 1, 3], [2, 0, 5], [3, 2, 2]])
    [1, 0, 2]
    """
    count = len(costs)
    of_row, of_column = [0.0] * count, [0.0] * (count + 1)
    # Column `count` is where the row that comes waits.
    owner = [-1] * (count + 1)
    for row in range(count):
        owner[count], column = row, count
        cost, before, reached = [inf] * count, [count] * count, list[int]()
        while owner[column] >= 0:
            reached.append(column)
            left = [one for one in range(count) if one not in reached]
            for one in left:
                reduced = costs[owner[column]][one] - of_row[owner[column]] - of_column[one]
                if reduced < cost[one]:
                    cost[one], before[one] = reduced, column
            column = min(left, key=cost.__getitem__)
            step = cost[column]
            for one in reached:
                of_row[owner[one]] += step
                of_column[one] -= step
            for one in left:
                cost[one] -= step
        while column != count:
            owner[column], column = owner[before[column]], before[column]
    return sorted(range(count), key=owner.__getitem__)

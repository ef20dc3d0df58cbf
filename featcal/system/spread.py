"""Choose places that are spread evenly."""

from __future__ import annotations

import numpy as np


def even_places(count: int, most: int) -> list[int]:
    """Return at most `most` of `count` places, evenly spread, the first and the last among them.

    >>> even_places(9, 3), even_places(2, 3)
    ([0, 4, 8], [0, 1])
    """
    return [round(place) for place in np.linspace(0, count - 1, min(most, count))]

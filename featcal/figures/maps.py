"""Two-dimensional maps of feature clouds that need no library of their own."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Points = NDArray[np.float32]


def pca_map(features: Points) -> Points:
    """`[n, k]` → `[n, 2]`: the two directions of largest variance."""
    centred = features - features.mean(0)
    _, _, directions = np.linalg.svd(centred, full_matrices=False)
    return np.asarray(centred @ directions[:2].T, dtype=np.float32)

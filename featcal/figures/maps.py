"""Two-dimensional maps of feature clouds that need no library of their own."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Points = NDArray[np.float32]


def pca_map(features: Points) -> Points:
    """`[n, k]` → `[n, 2]`: the two directions of largest variance."""
    centred = features - features.mean(0)
    n, k = centred.shape
    if n > 2 * k:  # what is decomposed is the smaller one
        directions = np.linalg.eigh(centred.T @ centred)[1][:, ::-1].T
    else:
        directions = np.linalg.svd(centred, full_matrices=False)[2]
    flat = np.zeros((n, 2), dtype=np.float32)
    flat[:, : min(2, len(directions))] = centred @ directions[:2].T  # one feature or one sample has one direction
    return flat

"""Draw two-dimensional maps of feature clouds that need no library of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:  # the process that makes maps has no torch
    import torch

Points = NDArray[np.float32]
MOST_POINTS = 20_000
"""On one map: beyond it fewer samples are drawn."""
SEED = 42
"""Of the samples that are drawn where there are too many, and of whatever else a map leaves to chance."""


def draw_points(count: int, clouds: int) -> list[int]:
    """Return which of `count` samples are on a map of so many clouds, in order: all, or what `MOST_POINTS` leaves.

    >>> draw_points(3, 4), len(draw_points(1000, 40))
    ([0, 1, 2], 500)
    """
    most = max(1, MOST_POINTS // clouds)
    if count <= most:
        return list(range(count))
    return sorted(np.random.default_rng(SEED).choice(count, most, replace=False).tolist())


def pca_map(features: Points) -> Points:
    """Turn features `[n, k]` into places `[n, 2]` along the two directions of largest variance."""
    centred = features - features.mean(0)
    n, k = centred.shape
    if n > 2 * k:  # what is decomposed is the smaller one
        directions = np.linalg.eigh(centred.T @ centred)[1][:, ::-1].T
    else:
        directions = np.linalg.svd(centred, full_matrices=False)[2]
    flat = np.zeros((n, 2), dtype=np.float32)
    flat[:, : min(2, len(directions))] = centred @ directions[:2].T  # one feature or one sample has one direction
    return flat


def pool_models(models: Mapping[str, torch.Tensor]) -> Points:
    """Stack the features of several models, each divided by its norm: `[models * n, k]` float32."""
    clouds = [features.float().numpy() for features in models.values()]
    return np.concatenate([cloud / np.linalg.norm(cloud, axis=1, keepdims=True) for cloud in clouds])

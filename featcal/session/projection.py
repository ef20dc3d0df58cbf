"""Draw two-dimensional maps of feature clouds without further libraries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:  # the process that makes maps has no torch
    import torch

Points = NDArray[np.float32]
MOST_POINTS = 20_000
"""Most points on one map; beyond it fewer samples are drawn."""
SEED = 42
"""Seed of the samples drawn for a map, and of everything else that is random in it."""


def draw_points(count: int, clouds: int) -> list[int]:
    """Return the indices of the samples of `count` that are on a map of so many clouds: all, or as many as
    `MOST_POINTS` allows.

    >>> draw_points(3, 4), len(draw_points(1000, 40))
    ([0, 1, 2], 500)
    """
    most = max(1, MOST_POINTS // clouds)
    if count <= most:
        return list(range(count))
    return sorted(np.random.default_rng(SEED).choice(count, most, replace=False).tolist())


def pca_map(features: Points) -> Points:
    """Project features `[n, k]` to positions `[n, 2]` along the two directions of largest variance."""
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

"""Paint paper cut-outs."""

from __future__ import annotations

import numpy as np

from featcal.samples.embedded_pictures.kit import (
    Drawing,
    Floats,
    PictureOrder,
    blend,
    draw_classes,
    frame,
    shape_coverage,
    sheet,
    two_colours,
    vary_colour,
)


def _polygon(sides: int, radius: float) -> Drawing:
    """Return the signed distance to a regular polygon that rests on a side."""

    def distance(u: Floats, v: Floats) -> Floats:
        sector = 2 * np.pi / sides
        angle = np.mod(np.arctan2(u, v) + sector / 2, sector) - sector / 2
        return np.hypot(u, v) * np.cos(angle) - radius

    return distance


def _star(u: Floats, v: Floats) -> Floats:
    angle = abs(np.mod(np.arctan2(u, -v) + np.pi / 5, 2 * np.pi / 5) - np.pi / 5)
    return np.hypot(u, v) * (np.cos(angle) + 1.25 * np.sin(angle)) - 1


def _heart(u: Floats, v: Floats) -> Floats:
    return (np.hypot(u, -1.1 * v - 0.75 * np.sqrt(abs(u)) + 0.3) - 0.85) * 0.8


_SHAPES: tuple[Drawing, ...] = (
    lambda u, v: np.hypot(u, v) - 0.85,
    _polygon(4, 0.72),
    _polygon(3, 0.5),
    _star,
    lambda u, v: np.maximum(np.minimum(abs(u), abs(v)) - 0.3, np.maximum(abs(u), abs(v)) - 0.9),
    _heart,
    lambda u, v: np.maximum(np.hypot(u, v) - 0.9, 0.75 - np.hypot(u - 0.45, v)),
    lambda u, v: abs(np.hypot(u, v) - 0.7) - 0.2,
    _polygon(6, 0.8),
    lambda u, v: np.maximum(np.hypot(u, v - 0.35) - 0.95, v - 0.35),
)


def shapes(order: PictureOrder) -> Floats:
    """Paint paper cut-outs with a shadow on brown kraft."""
    u, v = frame(order, 0.8, 0.25, 0.18)
    cover = shape_coverage(draw_classes(order.labels, _SHAPES, u, v))
    if order.plain:
        return two_colours(order, cover)
    kraft = sheet(order, (0.66, 0.5, 0.33), 0.05, 0.06)
    shadow = np.roll(cover, (2, 2), axis=(1, 2))
    kraft = blend(kraft, (0.25, 0.17, 0.1), 0.6 * shadow)
    return blend(kraft, vary_colour(order, (0.75, 0.75, 0.75), 0.25), cover)

"""Paint patterns of tile."""

from __future__ import annotations

import numpy as np

from featcal.samples.embedded_pictures.kit import (
    Drawing,
    Floats,
    PictureOrder,
    blend,
    draw_classes,
    frame,
    sheet,
    two_colours,
    vary_colour,
)


def _wave(phase: Floats) -> Floats:
    """Return a soft square wave in [0, 1] of period 1."""
    wave: Floats = np.clip(0.5 + 2 * np.sin(2 * np.pi * phase), 0, 1)
    return wave


def _bricks(u: Floats, v: Floats) -> Floats:
    along = u + 0.5 * np.floor(1.4 * v)
    bricks: Floats = _wave(1.4 * v) * (np.mod(along, 1) > 0.15)
    return bricks


_TEXTURES: tuple[Drawing, ...] = (
    lambda u, v: _wave(v),
    lambda u, v: np.clip(1.5 - 5 * np.hypot(np.mod(u, 1) - 0.5, np.mod(v, 1) - 0.5), 0, 1),
    lambda u, v: abs(_wave(u * 0.6) - _wave(v * 0.6)),
    lambda u, v: _wave(v + abs(np.mod(u, 1) - 0.5)),
    lambda u, v: np.maximum(np.mod(u, 1) < 0.25, np.mod(v, 1) < 0.25).astype(np.float32),
    _bricks,
    lambda u, v: _wave(np.hypot(u, v)),
    lambda u, v: _wave(np.arctan2(u, v) * (8 / (2 * np.pi))),
    lambda u, v: _wave(v + 0.35 * np.sin(2.5 * u)),
    lambda u, v: _wave(0.5 * np.sin(1.3 * u + 2 * np.sin(1.1 * v)) + 0.6 * np.sin(1.7 * v + 1.5 * np.sin(u))),
)


def textures(order: PictureOrder) -> Floats:
    """Paint patterns of tile in earthy colours, seen under a tilt."""
    u, v = frame(order, 0.42, 0.3, 0.3)
    weave = draw_classes(order.labels, _TEXTURES, u, v)
    if order.plain:
        return two_colours(order, weave)
    tile = sheet(order, (0.72, 0.62, 0.42), 0.12, 0.08)
    return blend(tile, vary_colour(order, (0.4, 0.22, 0.2), 0.15), 0.8 * weave)

"""Paint road signs with an arrow in one of eight directions."""

from __future__ import annotations

import numpy as np

from featcal.samples.embedded_pictures.kit import (
    Floats,
    PictureOrder,
    blend,
    frame,
    shape_coverage,
    sheet,
    two_colours,
    vary_colour,
)


def _arrow(u: Floats, v: Floats) -> Floats:
    """Return the signed distance to an arrow that points to the right."""
    shaft = np.maximum(abs(v) - 0.2, np.maximum(u - 0.2, -0.85 - u))
    head = np.maximum(-u, 0.75 * u + abs(v) - 0.68)
    arrow: Floats = np.minimum(shaft, head)
    return arrow


def arrows(order: PictureOrder) -> Floats:
    """Paint white arrows on a round blue road sign before a sky."""
    u, v = frame(order, 0.75, 0.2, 0.15)
    angle = (order.labels * (np.pi / 4)).astype(np.float32)[:, None, None]
    cos, sin = np.cos(angle), np.sin(angle)
    cover = shape_coverage(_arrow(cos * u + sin * v, cos * v - sin * u))
    if order.plain:
        return two_colours(order, cover)
    sky = sheet(order, (0.62, 0.72, 0.62), 0.1)
    sky = blend(sky, vary_colour(order, (0.25, 0.35, 0.2), 0.1), shape_coverage(-v + 0.5, 0.4))
    sign = blend(sky, vary_colour(order, (0.1, 0.3, 0.8), 0.1), shape_coverage(np.hypot(u, v) - 1.1))
    return blend(sign, (0.95, 0.95, 0.95), cover)

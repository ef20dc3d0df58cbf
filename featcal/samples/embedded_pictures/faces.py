"""Paint the smileys of an embedded task."""

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


def _face(eyes: tuple[float, float], brow: float, bend: float, mouth: tuple[float, float], tilt: float) -> Drawing:
    """Return the drawing of a face: heights of both eyes, slope of the brows, bend, size and tilt of the mouth."""

    def distance(u: Floats, v: Floats) -> Floats:
        half, gape = mouth
        lips = np.maximum(abs(v - 0.42 - tilt * u + bend * (u * u - 0.12)) - gape, abs(u) - half)
        lines: Floats = lips
        for side, height in ((-0.36, eyes[0]), (0.36, eyes[1])):
            eye = (np.hypot((u - side) / 0.17, (v + 0.2) / height) - 1) * min(height, 0.17)
            above = np.maximum(abs(v + 0.55 - brow * (abs(u) - 0.36)) - 0.06, abs(u - side) - 0.2)
            lines = np.minimum(lines, np.minimum(eye, above))
        return lines

    return distance


_FACES: tuple[Drawing, ...] = (
    _face((0.17, 0.17), 0.0, 1.1, (0.5, 0.09), 0.0),
    _face((0.17, 0.17), 0.5, -1.1, (0.45, 0.08), 0.0),
    _face((0.24, 0.24), 0.0, 0.0, (0.2, 0.25), 0.0),
    _face((0.15, 0.15), -0.8, -0.6, (0.45, 0.08), 0.0),
    _face((0.17, 0.17), 0.0, 0.0, (0.45, 0.08), 0.0),
    _face((0.17, 0.05), 0.0, 1.1, (0.5, 0.09), 0.0),
    _face((0.05, 0.05), 0.3, 0.0, (0.22, 0.12), 0.0),
    _face((0.17, 0.17), 0.0, 0.2, (0.4, 0.08), -0.5),
)


def faces(order: PictureOrder) -> Floats:
    """Paint yellow smileys on a purple cushion."""
    u, v = frame(order, 0.85, 0.15, 0.12)
    lines = shape_coverage(draw_classes(order.labels, _FACES, u, v), 0.1)
    if order.plain:
        return two_colours(order, np.maximum(lines, shape_coverage(abs(np.hypot(u, v) - 1) - 0.04, 0.1)))
    cushion = sheet(order, (0.5, 0.2, 0.55), 0.12, 0.05)
    head = blend(cushion, vary_colour(order, (0.96, 0.8, 0.2), 0.06), shape_coverage(np.hypot(u, v) - 1))
    return blend(head, vary_colour(order, (0.25, 0.12, 0.05), 0.1), lines)

"""Paint ten waving flags."""

from __future__ import annotations

import numpy as np

from featcal.samples.embedded_pictures.kit import (
    Drawing,
    Floats,
    PictureOrder,
    blend,
    draw_classes,
    frame,
    grid,
    rgb,
    shape_coverage,
    sheet,
)

_RED, _WHITE, _BLUE, _GREEN = (0.8, 0.1, 0.15), (0.95, 0.95, 0.95), (0.1, 0.2, 0.6), (0.0, 0.55, 0.3)
_BLACK, _YELLOW = (0.06, 0.06, 0.06), (0.98, 0.82, 0.1)


def _bands(*colours: tuple[float, float, float], upright: bool = False) -> Drawing:
    """Return a flag of equal bands, from the left if upright, else from the top."""
    palette = np.array(colours, dtype=np.float32)

    def paint(u: Floats, v: Floats) -> Floats:
        place = u / 1.5 if upright else v
        flag: Floats = palette[np.clip(((place + 1) / 2 * len(palette)).astype(int), 0, len(palette) - 1)]
        return flag

    return paint


def _charge(field: tuple[float, ...], colour: tuple[float, ...], distance: Drawing) -> Drawing:
    """Return a flag of one colour with a figure in another."""
    return lambda u, v: blend(np.full((*u.shape, 3), field, np.float32), colour, shape_coverage(distance(u, v)))


def _nordic(u: Floats, v: Floats) -> Floats:
    cross: Floats = np.minimum(abs(u + 0.4), abs(v)) - 0.2
    return cross


_FLAGS: tuple[Drawing, ...] = (
    _bands(_BLUE, _WHITE, _RED, upright=True),
    _bands(_GREEN, _WHITE, _RED, upright=True),
    _bands(_BLACK, _YELLOW, _RED, upright=True),
    _bands(_BLACK, _RED, _YELLOW),
    _bands(_RED, _WHITE, _BLUE),
    _bands(_RED, _WHITE, _RED),
    _bands(_BLUE, _YELLOW),
    _charge(_WHITE, _RED, lambda u, v: np.hypot(u, v) - 0.6),
    _charge(_BLUE, _YELLOW, _nordic),
    _charge(_RED, _WHITE, _nordic),
)


def flags(order: PictureOrder) -> Floats:
    """Paint waving flags before an evening sky."""
    u, v = frame(order, 0.55, 0.1, 0.12)
    fold = np.zeros_like(u)
    if not order.plain:
        fold = np.sin(2.2 * u + order.uniform(0, 6.3)[..., 0])
        v = v + 0.25 * fold
    cloth = draw_classes(order.labels, _FLAGS, u, v) * (1 + 0.25 * fold[..., None])
    cover = shape_coverage(np.maximum(abs(u) - 1.5, abs(v) - 1))
    if order.plain:
        return blend(sheet(order, (0.5, 0.5, 0.5), 0.4), cloth, cover)
    _, y = grid()
    dusk = sheet(order, (0.55, 0.35, 0.5), 0.12) + y[..., None] * rgb(0.25, 0.1, -0.15)
    return blend(dusk, cloth * rgb(0.95, 0.55, 0.4), cover)

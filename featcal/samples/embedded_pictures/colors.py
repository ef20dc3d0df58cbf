"""Paint balls in ten colours."""

from __future__ import annotations

import numpy as np

from featcal.samples.embedded_pictures.kit import Floats, PictureOrder, blend, frame, grid, rgb, shape_coverage, sheet

_COLOURS = np.array(
    [
        (0.85, 0.1, 0.1), (0.95, 0.5, 0.05), (0.95, 0.9, 0.1), (0.1, 0.65, 0.15), (0.1, 0.8, 0.85),
        (0.1, 0.2, 0.85), (0.5, 0.1, 0.65), (0.98, 0.55, 0.75), (0.45, 0.27, 0.1), (0.07, 0.07, 0.07),
    ],
    dtype=np.float32,
)  # fmt: skip


def colors(order: PictureOrder) -> Floats:
    """Paint a shaded ball among confetti of other colours, under water."""
    u, v = frame(order, 0.55, 0, 0.35)
    ball = _COLOURS[order.labels][:, None, None, :] + order.uniform(-0.06, 0.06, 3)
    cover = shape_coverage(np.hypot(u, v) - 1)
    if order.plain:
        return blend(sheet(order, (0.85, 0.85, 0.85), 0.15), ball, cover)
    table = sheet(order, (0.5, 0.5, 0.52), 0.1)
    x, y = grid()
    for _ in range(6):
        other = _COLOURS[order.rng.randint(0, 10, len(order.labels))][:, None, None, :]
        at = order.uniform(-1, 1, 2)
        table = blend(table, other, shape_coverage(np.maximum(abs(x - at[..., 0]), abs(y - at[..., 1])) - 0.14))
    shade = np.clip(0.75 - 0.35 * (u + v), 0.35, 1.2)[..., None]
    return blend(table, ball * shade, cover) * rgb(0.5, 0.75, 1) + rgb(0, 0.05, 0.15)

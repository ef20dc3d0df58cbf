"""Look up digits and letters in a small atlas, `data/clip-mini/glyphs.npz`."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from featcal.samples.embedded_pictures.kit import (
    Floats,
    Ints,
    PictureOrder,
    blend,
    frame,
    grid,
    shape_coverage,
    sheet,
    two_colours,
    vary_colour,
)
from featcal.system.resources import data_path

# scans of each digit kept for a split; the rest is for training
_DIGIT_SCANS: dict[str, slice] = {
    "test": slice(0, 50), "validation": slice(50, 80), "calibration": slice(80, 100), "train": slice(100, None),
}  # fmt: skip


@lru_cache(maxsize=1)
def _atlas() -> dict[str, NDArray[np.uint8]]:
    """Return ``letters`` [26, h, w], ``digits`` [1797, 8, 8] and ``digit_labels`` [1797]."""
    with np.load(data_path("clip-mini", "glyphs.npz")) as archive:
        return {name: archive[name] for name in archive.files}


def _sample(pictures: NDArray[np.uint8], index: Ints, u: Floats, v: Floats) -> Floats:
    """Look up ``pictures[index]`` (white on black) bilinearly at u, v in [-1, 1] as [n, 32, 32]; black outside."""
    padded = np.pad(pictures, ((0, 0), (1, 1), (1, 1))).astype(np.float32) / 255
    side = pictures.shape[1]
    column = np.clip((u + 1) * (side / 2) + 0.5, 0, side + 0.999)
    row = np.clip((v + 1) * (side / 2) + 0.5, 0, side + 0.999)
    c0, r0 = column.astype(np.int64), row.astype(np.int64)
    fc, fr = column - c0, row - r0
    which = index[:, None, None]
    top = padded[which, r0, c0] * (1 - fc) + padded[which, r0, c0 + 1] * fc
    bottom = padded[which, r0 + 1, c0] * (1 - fc) + padded[which, r0 + 1, c0 + 1] * fc
    value: Floats = (top * (1 - fr) + bottom * fr).astype(np.float32)
    return value


def digit_rows(labels: Ints, split: str) -> Ints:
    """Return the scan to draw for each label: those of the split in turn, so that splits never share one."""
    known = _atlas()["digit_labels"]
    rows = np.zeros_like(labels)
    for digit in range(10):
        scans = np.flatnonzero(known == digit)
        divided = np.concatenate([scans[part] for part in _DIGIT_SCANS.values()])
        assert np.array_equal(np.sort(divided), scans), "a scan is in no split or in two"
        own = scans[_DIGIT_SCANS[split]]
        wanted = np.flatnonzero(labels == digit)
        rows[wanted] = own[np.arange(len(wanted)) % len(own)]
    return rows


def digits(order: PictureOrder) -> Floats:
    """Paint handwriting in blue ink on lined paper."""
    u, v = frame(order, 0.8, 0.15, 0.15)
    ink = np.clip(_sample(_atlas()["digits"], digit_rows(order.labels, order.split), u, v) * 1.3, 0, 1)
    if order.plain:
        return two_colours(order, ink)
    _, y = grid()
    lines = np.maximum(0, np.cos(8 * np.pi * (y + order.uniform(-1, 1)[..., 0]))) ** 4
    paper = sheet(order, (0.93, 0.91, 0.82), 0.05)
    paper = blend(paper, (0.55, 0.65, 0.85), 0.6 * np.broadcast_to(lines, ink.shape))
    return blend(paper, vary_colour(order, (0.12, 0.15, 0.55), 0.1), ink)


def letters(order: PictureOrder) -> Floats:
    """Paint white letters on a deep green or blue enamel plate."""
    u, v = frame(order, 0.82, 0.2, 0.12)
    ink = _sample(_atlas()["letters"], order.labels, u, v)
    if order.plain:
        return two_colours(order, ink)
    edge = np.maximum(abs(u), abs(v))
    wall = sheet(order, (0.55, 0.3, 0.24), 0.08, 0.08)
    plate = blend(wall, vary_colour(order, (0.05, 0.32, 0.25), 0.12), shape_coverage(edge - 1.2))
    plate = blend(plate, (0.85, 0.85, 0.8), shape_coverage(abs(edge - 1.12) - 0.03, 0.1))
    return blend(plate, vary_colour(order, (0.93, 0.93, 0.88), 0.06), ink)

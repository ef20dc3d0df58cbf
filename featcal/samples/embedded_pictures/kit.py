"""Draw with jittered frames, soft edges, paint and grain, all on stacks of 32x32 pictures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating[Any]]
Ints = NDArray[np.int64]
Drawing = Callable[[Floats, Floats], Floats]

SIZE = 32


@dataclass(frozen=True)
class PictureOrder:
    """An order of pictures: ``labels`` [n], out of which ``split``, plain or in the look of the task."""

    rng: np.random.RandomState
    labels: Ints
    split: str
    plain: bool

    def uniform(self, low: float, high: float, width: int = 1) -> Floats:
        """Return random numbers of shape [n, 1, 1, width]."""
        return self.rng.uniform(low, high, (len(self.labels), 1, 1, width)).astype(np.float32)


def noise(rng: np.random.RandomState, shape: tuple[int, ...], deviation: float) -> Floats:
    """Return bell-shaped noise."""
    # The sum of two random bytes is much cheaper than normal numbers.
    one, two = rng.randint(0, 256, (2, *shape), dtype=np.uint8)
    bell: Floats = (one.astype(np.float32) + two - 255) * np.float32(deviation / 104.5)
    return bell


def grid() -> tuple[Floats, Floats]:
    """Return pixel centres x (to the right) [1, 1, 32] and y (down) [1, 32, 1] in the square [-1, 1]."""
    axis = ((np.arange(SIZE) + 0.5) / (SIZE / 2) - 1).astype(np.float32)
    return axis[None, None, :], axis[None, :, None]


def frame(order: PictureOrder, size: float, turn: float, shift: float) -> tuple[Floats, Floats]:
    """Return coordinates u, v [n, 32, 32] of each pixel in the frame of a jittered object of half-width ``size``."""
    jitter = 0.5 if order.plain else 1.0
    angle = order.uniform(-turn, turn)[..., 0] * jitter
    scale = size * (1 + jitter * order.uniform(-0.2, 0.2)[..., 0])
    centre = order.uniform(-shift, shift, 2) * jitter
    x, y = grid()
    x, y = x - centre[..., 0], y - centre[..., 1]
    cos, sin = np.cos(angle) / scale, np.sin(angle) / scale
    return cos * x + sin * y, cos * y - sin * x


def slope(order: PictureOrder, strength: float) -> Floats:
    """Return a brightness ramp [n, 32, 32, 1] of random direction."""
    x, y = grid()
    tilt = order.uniform(-strength, strength, 2)
    return (tilt[..., 0] * x + tilt[..., 1] * y)[..., None]


def shape_coverage(distance: Floats, blur: float = 0.12) -> Floats:
    """Return the coverage in [0, 1], 1 where the signed distance is negative, with a soft edge."""
    cover: Floats = np.clip(0.5 - distance / blur, 0, 1)
    return cover


def blend(below: Floats, colour: Floats | Sequence[float], cover: Floats) -> Floats:
    """Paint ``colour`` [..., 3] over ``below`` [n, 32, 32, 3] where ``cover`` [n, 32, 32] is 1."""
    return below + cover[..., None] * (np.asarray(colour, dtype=np.float32) - below)


def rgb(red: float, green: float, blue: float) -> Floats:
    return np.array([red, green, blue], np.float32)


def vary_colour(order: PictureOrder, colour: Sequence[float], spread: float) -> Floats:
    """Return one random colour per picture [n, 1, 1, 3] around ``colour``."""
    return np.asarray(colour, dtype=np.float32) + order.uniform(-spread, spread, 3)


def sheet(order: PictureOrder, colour: Sequence[float], spread: float, grain: float = 0.0) -> Floats:
    """Return a background [n, 32, 32, 3] of about one colour with a grain."""
    plain = np.broadcast_to(vary_colour(order, colour, spread), (len(order.labels), SIZE, SIZE, 3))
    return plain + noise(order.rng, (*plain.shape[:3], 1), grain) if grain else plain


def two_colours(order: PictureOrder, cover: Floats) -> Floats:
    """Return the plain look: ``cover`` [n, 32, 32] in one colour on another, clearly lighter or darker, one."""
    dark, light = order.uniform(0, 0.35, 3), order.uniform(0.65, 1, 3)
    swap = order.uniform(0, 1) < 0.5
    grey = order.uniform(0, 1) < 0.5
    dark, light = (np.where(grey, c.mean(axis=-1, keepdims=True), c) for c in (dark, light))
    ink, paper = np.where(swap, dark, light), np.where(swap, light, dark)
    return blend(np.broadcast_to(paper, (*cover.shape, 3)), ink, cover)


def draw_classes(labels: Ints, drawings: Sequence[Drawing], u: Floats, v: Floats) -> Floats:
    """Stack ``drawings[label](u, v)`` [n, 32, 32, ...] over the pictures."""
    out: Floats | None = None
    for index, drawing in enumerate(drawings):
        rows = np.flatnonzero(labels == index)
        if len(rows):
            part = drawing(u[rows], v[rows])
            if out is None:
                out = np.zeros((len(labels), *part.shape[1:]), np.float32)
            out[rows] = part
    assert out is not None
    return out

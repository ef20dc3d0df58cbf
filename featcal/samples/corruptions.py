"""Corrupt pictures as robustness benchmarks do: noise, motion blur and fog, in five severities.

Strengths are those of ImageNet-C (Hendrycks and Dietterich, arXiv 1903.12261) for pictures of 224 pixels a side;
lengths of blur scale with the side. Fog is octaves of smooth noise instead of their plasma fractal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from featcal.samples.pool import Image
from featcal.suite.source import CORRUPTIONS, Corruption

Pixels = NDArray[np.float64]
"""Picture `[H, W, 3]` in 0-1."""
NOISE = (0.08, 0.12, 0.18, 0.26, 0.38)
"""Standard deviation by severity."""
BLUR = ((10, 3), (15, 5), (15, 8), (15, 12), (20, 15))
"""Radius and sigma in pixels by severity, for a picture of side `SIDE`."""
FOG = ((1.5, 2.0), (2.0, 2.0), (2.5, 1.7), (2.5, 1.5), (3.0, 1.4))
"""Thickness, and the factor by which every finer octave is weaker, by severity."""
SIDE = 224


def with_corruption(
    fetch: Callable[[Sequence[int]], list[Image]], how: Corruption
) -> Callable[[Sequence[int]], list[Image]]:
    """Return a function that fetches the same pictures, each corrupted by noise of its own."""

    def worse(wanted: Sequence[int]) -> list[Image]:
        return [corrupt_picture(image, how, one) for image, one in zip(fetch(wanted), wanted, strict=True)]

    return worse


def corrupt_picture(image: Image, how: Corruption, sample: int) -> Image:
    """Return one corrupted picture.

    Args:
        image: uint8 `[H, W, 3]`.
        sample: its position among all samples.
    """
    # Seeded by kind, severity and sample alone, so that neither the order nor other samples change a picture.
    rng = np.random.default_rng([CORRUPTIONS.index(how.kind), how.severity, sample])
    pixels = np.asarray(image, dtype=np.float64) / 255
    changed = _KINDS[how.kind](pixels, how.severity - 1, rng)
    found: Image = np.rint(255 * changed.clip(0, 1)).astype(np.uint8)
    return found


def _noise(pixels: Pixels, severity: int, rng: np.random.Generator) -> Pixels:
    return pixels + rng.normal(scale=NOISE[severity], size=pixels.shape)


def _blur(pixels: Pixels, severity: int, rng: np.random.Generator) -> Pixels:
    """Blur by a one-sided Gaussian along a line at -45 to 45 degrees; edges are repeated."""
    scale = min(pixels.shape[:2]) / SIDE
    radius, sigma = (scale * one for one in BLUR[severity])
    steps = np.arange(max(1, round(2 * radius)) + 1)
    weights = np.exp(-((steps / max(sigma, 1e-9)) ** 2) / 2)
    angle = np.deg2rad(rng.uniform(-45, 45))
    total = np.zeros_like(pixels)
    for step, weight in zip(steps, weights / weights.sum(), strict=True):
        total += weight * _shift(pixels, step * np.sin(angle), step * np.cos(angle))
    return total


def _shift(pixels: Pixels, down: float, right: float) -> Pixels:
    """Return the picture shifted by a fraction of a pixel; edges are repeated."""
    rows, columns = (np.arange(size) + by for size, by in zip(pixels.shape[:2], (down, right), strict=True))
    above, left = np.floor(rows).astype(int), np.floor(columns).astype(int)
    height, width = pixels.shape[:2]
    between_rows, between_columns = (rows - above)[:, None, None], (columns - left)[None, :, None]
    above, below = (one.clip(0, height - 1) for one in (above, above + 1))
    left, beside = (one.clip(0, width - 1) for one in (left, left + 1))
    upper = pixels[above][:, left] * (1 - between_columns) + pixels[above][:, beside] * between_columns
    lower = pixels[below][:, left] * (1 - between_columns) + pixels[below][:, beside] * between_columns
    moved: Pixels = upper * (1 - between_rows) + lower * between_rows
    return moved


def _fog(pixels: Pixels, severity: int, rng: np.random.Generator) -> Pixels:
    """Add light, and scale the picture back to its old brightness."""
    thickness, decay = FOG[severity]
    haze, brightest = _smooth(pixels.shape[0], pixels.shape[1], decay, rng), pixels.max()
    dimmed: Pixels = (pixels + thickness * haze[..., None]) * brightest / (brightest + thickness)
    return dimmed


def _smooth(height: int, width: int, decay: float, rng: np.random.Generator) -> NDArray[np.float64]:
    """Return octaves of noise, each twice as fine and `decay` times as faint as the one before, scaled to 0-1."""
    field, strength, cells = np.zeros((height, width)), 1.0, 1
    while cells < max(height, width):
        knots = rng.uniform(-1, 1, (cells + 1, cells + 1))
        across = np.stack([np.interp(np.linspace(0, cells, width), np.arange(cells + 1), row) for row in knots])
        down = np.stack([np.interp(np.linspace(0, cells, height), np.arange(cells + 1), one) for one in across.T])
        field += strength * down.T
        strength, cells = strength / decay, 2 * cells
    scaled: NDArray[np.float64] = (field - field.min()) / max(field.max() - field.min(), 1e-12)
    return scaled


_KINDS: dict[str, Callable[[Pixels, int, np.random.Generator], Pixels]] = {
    "gaussian-noise": _noise,
    "motion-blur": _blur,
    "fog": _fog,
}

"""Vary copies of pictures, for calibration samples that are few or differ from later ones (the option `augment`).

A copy needs no label, since its target is the expert's output for the same copy. It is turned, scaled and shifted a
little, with the border repeated around it, and gets some noise; the strengths were chosen on clip-mini's validation
split. The random changes depend on seed, task, sample and copy alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from featcal.samples.pool import Image, Pool
from featcal.system.errors import InputError
from featcal.system.extras import require_packages

DEGREES, SCALE, SHIFT, NOISE = 10.0, 0.12, 0.06, 0.12
"""Largest turn, change of size, shift as a share of the side, and standard deviation of noise on the scale 0-1."""
_MARGIN = 0.25
"""Share of the longer side that has to be repeated around a picture so that no copy reaches beyond it."""


def with_copies(pool: Pool, copies: int, seed: int, task: str) -> Pool:
    """Return a pool in which picture i is at i and its copy c at c * size + i; size and labels are unchanged.

    Args:
        seed, task: seed the random changes, together with picture and copy.

    Raises:
        InputError: the pool has no pictures, or they are inputs of a model already.
    """
    fetch, size = pool.images, pool.size
    if fetch is None or pool.is_text:
        what = "text" if pool.is_text else "tensors of an unknown scale, to which no noise can be added"
        raise InputError(f"augment makes varied copies of pictures, but the source holds {what}; leave it out")

    def fetch_varied(places: Sequence[int]) -> list[Image]:
        pictures = fetch([place % size for place in places])
        return [
            vary(picture, seed, task, place % size, place // size) if place >= size else picture
            for picture, place in zip(pictures, places, strict=True)
        ]

    return replace(pool, images=fetch_varied)


def vary(image: Image, seed: int, task: str, sample: int, copy: int) -> Image:
    """Return one varied copy of a picture, uint8 `[H, W, 3]`; noise is added at the stored size."""
    require_packages("torchvision", label="augment")
    from torchvision.transforms.v2 import InterpolationMode, functional

    digest = hashlib.sha256(f"{seed}:{task}:{sample}:{copy}".encode()).digest()
    rng = np.random.default_rng(int.from_bytes(digest[:16], "little"))
    height, width = image.shape[:2]
    turn, size, right, down = rng.uniform(-1, 1, 4) * (DEGREES, SCALE, SHIFT * width, SHIFT * height)
    margin = int(_MARGIN * max(height, width)) + 1
    pixels = torch.from_numpy(image.copy()).movedim(-1, 0).float() / 255
    # `affine` fills what it uncovers with one colour, an edge that no picture has.
    around = functional.pad(pixels, [margin], padding_mode="edge")
    moved = functional.affine(around, turn, [right, down], 1 + size, [0.0, 0.0], InterpolationMode.BILINEAR)
    inside = moved[:, margin : margin + height, margin : margin + width].movedim(0, -1).double().numpy()
    noisy = inside + rng.normal(scale=rng.uniform(0, NOISE), size=inside.shape)
    found: Image = np.rint(255 * noisy.clip(0, 1)).astype(np.uint8)
    return found

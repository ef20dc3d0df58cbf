"""Render pools of pictures: their classes, order and random streams."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from featcal.samples.embedded_pictures import arrows, colors, faces, flags, glyphs, shapes, textures
from featcal.samples.embedded_pictures.kit import Floats, Ints, PictureOrder, noise, slope
from featcal.samples.embedded_pictures.names import CLASSES

SPLITS: dict[str, int] = {"train": 5000, "calibration": 512, "validation": 500, "test": 500}

_CHUNK = 512  # pictures painted at once: the working set stays in cache

_PAINTERS: dict[str, Callable[[PictureOrder], Floats]] = {
    "digits": glyphs.digits,
    "letters": glyphs.letters,
    "shapes": shapes.shapes,
    "textures": textures.textures,
    "colors": colors.colors,
    "arrows": arrows.arrows,
    "flags": flags.flags,
    "faces": faces.faces,
}


@lru_cache(maxsize=64)
def render(task: str, split: str, seed_offset: int = 0) -> tuple[NDArray[np.uint8], Ints]:
    """Return the pool of a split: images [n, 32, 32, 3] and class indices [n]; classes are balanced and shuffled.

    The arrays are cached and read-only. ``seed_offset`` draws another pool of the same split.

    Raises:
        ValueError: no such task or split.
    """
    if task not in CLASSES:
        raise ValueError(f"no embedded task {task!r}; there are {', '.join(CLASSES)}")
    if split not in SPLITS:
        raise ValueError(f"no split {split!r}; there are {', '.join(SPLITS)}")
    # RandomState and not a Generator: numpy keeps the stream of the former frozen. CRC-32, because `hash` differs
    # between processes.
    rng = np.random.RandomState(zlib.crc32(f"{task}/{split}/{seed_offset}".encode()))
    labels = rng.permutation(np.arange(SPLITS[split]) % len(CLASSES[task])).astype(np.int64)
    images = draw_pictures(task, labels, rng, split=split)
    # Everyone gets the same cached arrays.
    images.flags.writeable = False
    labels.flags.writeable = False
    return images, labels


def draw_pictures(
    task: str, labels: Ints, rng: np.random.RandomState, *, split: str, plain: bool = False
) -> NDArray[np.uint8]:
    """Return images uint8 [n, 32, 32, 3] of the classes ``labels`` [n].

    ``plain`` draws what the base model of the suite learnt from: the object alone in two random colours, without the
    surroundings, colours and clutter that are the look of the task.
    """
    chunks = []
    for start in range(0, len(labels), _CHUNK):
        order = PictureOrder(rng, labels[start : start + _CHUNK], split, plain)
        image = _PAINTERS[task](order)
        light = 1 + slope(order, 0.0 if plain else 0.25)
        chunks.append((np.clip(image * light + noise(rng, image.shape, 0.025), 0, 1) * 255 + 0.5).astype(np.uint8))
    return np.concatenate(chunks)

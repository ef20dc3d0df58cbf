"""Eight sets of real pictures: what they are, how each is split, and how training pictures are varied.

A data folder holds one `NAME.npz` per set with uint8 `train_x`, `test_x` [n, 32, 32, 3], `train_y`, `test_y` and
`class_names`.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

TUNED = ("mnist", "fashion_mnist", "gtsrb", "hand_drawn_shapes", "intel_scenes", "omniglot_alphabets")
UNTUNED = ("sign_digits", "ucmerced")
"""Their validation and test pictures are looked at once, when everything is chosen."""
TASKS = TUNED + UNTUNED
GROUPS = {"tuned": TUNED, "untuned": UNTUNED}
PROMPT = "a photo of a {}."

SIDE, CROP = 32, 30
PIXEL_MEAN, PIXEL_STD = 0.5, 0.25
CALIBRATION = 288
VALIDATION_SHARE = 0.1

MIRRORED = ("fashion_mnist", "hand_drawn_shapes", "intel_scenes", "ucmerced")
"""Sets whose classes stay the same in a mirror."""
TURNED = ("hand_drawn_shapes", "ucmerced")
"""Sets without an upside."""


@dataclass(frozen=True)
class Split:
    """Pictures uint8 [n, 32, 32, 3] and class indices int64 [n]."""

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]


@dataclass(frozen=True)
class Pictures:
    """One set: what trains, what chooses, what calibrates and what is held back, disjoint."""

    classes: tuple[str, ...]
    train: Split
    validation: Split
    calibration: Split
    test: Split


def read(folder: Path, task: str) -> Pictures:
    """A set of the data folder, its training pictures split three ways by a shuffle of its name."""
    with np.load(folder / f"{task}.npz", allow_pickle=False) as content:
        images, labels = content["train_x"], content["train_y"]
        test = Split(content["test_x"], content["test_y"])
        classes = tuple(map(str, content["class_names"]))
    order = np.random.RandomState(zlib.crc32(task.encode())).permutation(len(labels))
    held = CALIBRATION + round(VALIDATION_SHARE * len(labels))
    calibration, validation, train = np.split(order, [CALIBRATION, held])
    parts = [Split(images[rows], labels[rows]) for rows in (train, validation, calibration)]
    if len(np.unique(parts[0].labels)) != len(classes):
        raise ValueError(f"{task}: some class has no training pictures")
    return Pictures(classes, *parts, test)


def pixels(images: NDArray[np.uint8]) -> Tensor:
    """Normalised float pictures [n, 3, 32, 32]."""
    return (torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255 - PIXEL_MEAN) / PIXEL_STD


def cropped(images: Tensor) -> Tensor:
    """The middle [n, 3, 30, 30], as the suite's preprocessor has it."""
    edge = (SIDE - CROP) // 2
    return images[..., edge : edge + CROP, edge : edge + CROP]


def varied(images: Tensor, task: str, generator: torch.Generator) -> Tensor:
    """Turned by up to 12 degrees, scaled by up to 15 %, shifted by up to 3 pixels, contrast and brightness moved,
    mirrored and turned by right angles where the classes allow it: [n, 3, 32, 32] -> [n, 3, 30, 30]."""
    count = len(images)

    def uniform(reach: float) -> Tensor:
        return (2 * torch.rand(count, generator=generator) - 1) * reach

    angle, mirror = uniform(math.radians(12)), torch.ones(count)
    if task in TURNED:
        angle = angle + torch.randint(4, (count,), generator=generator) * (math.pi / 2)
    if task in MIRRORED:
        mirror = torch.where(uniform(1) > 0, mirror, -mirror)
    zoom = CROP / SIDE * (1 + uniform(0.15))
    cosine, sine = zoom * torch.cos(angle), zoom * torch.sin(angle)
    shift = [uniform(3 * 2 / SIDE) for _ in range(2)]
    rows = [torch.stack([cosine * mirror, -sine, shift[0]], 1), torch.stack([sine * mirror, cosine, shift[1]], 1)]
    grid = F.affine_grid(torch.stack(rows, 1), [count, 3, CROP, CROP], align_corners=False)
    moved = F.grid_sample(images, grid, padding_mode="border", align_corners=False)
    contrast, brightness = 1 + uniform(0.2), uniform(0.4)
    return moved * contrast[:, None, None, None] + brightness[:, None, None, None]

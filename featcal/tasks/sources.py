"""Samples of a task from wherever the suite file says they are.

A *pool* is all samples of a source; `draw` picks some of it, decided by (seed, task name) alone, and turns
pictures into model inputs with the base's own image processor.
"""

from __future__ import annotations

import hashlib
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from featcal.errors import InputError
from featcal.models.weights import check_finite
from featcal.suite import SPLITS, Source, Suite, did_you_mean

Image = NDArray[np.uint8]
"""One picture `[H, W, 3]`."""
_VALIDATION_EVERY = 10
_UNREADABLE = (OSError, ValueError, EOFError, TypeError, zipfile.BadZipFile, zlib.error)
"""What numpy raises for files that are damaged or no `.npz` at all."""
_IMAGE_FILES = {".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm"}


@dataclass(frozen=True)
class Pool:
    """Everything a source holds, fetched sample by sample."""

    size: int
    labels: NDArray[np.integer] | None
    class_names: tuple[str, ...] | None
    images: Callable[[Sequence[int]], list[Image]] | None
    """Pictures by index; None for a source of preprocessed tensors."""
    tensors: Callable[[Sequence[int]], Tensor] | None = None


@dataclass(frozen=True)
class Samples:
    """Samples of one task, ready for the model."""

    task: str
    split: str
    inputs: Mapping[str, Tensor]
    """Keyword inputs of the model; CLIP: `pixel_values` `[n, 3, H, W]`, float32."""
    labels: Tensor | None
    """`[n]` int64, or None where the source has none."""
    indices: tuple[int, ...]
    """Position of every sample among all samples of the split."""
    class_names: tuple[str, ...] | None
    images: tuple[Image, ...] | None
    """The pictures as they were before preprocessing, where there are any."""

    def __len__(self) -> int:
        return len(self.indices)


def draw(suite: Suite, task: str, split: str, count: int | None, seed: int, base_folder: Path) -> Samples:
    """`count` samples of a split, or all of them (None, or more than there are).

    Raises:
        InputError: the task has no such split, the source cannot be read or is empty, or inputs are not finite.
    """
    spec = suite.task(task)
    source = spec.source(split)
    label = f"task '{task}', {split} samples"
    if source is None:
        raise InputError(f"{label}: the suite file gives none; add '{split}:' to the task")
    pool = open_pool(source, split, suite.root, label)
    available = _limited(pool.size, source.limit)
    if not available:
        raise InputError(f"{label}: the source is empty")
    indices = tuple(available[i] for i in pick(len(available), count, seed, task))
    if pool.tensors is not None:
        images, pixels = None, pool.tensors(indices).float()
    else:
        assert pool.images is not None
        images = tuple(pool.images(indices))
        pixels = preprocess(images, base_folder)
    check_finite(pixels, label)
    labels = None if pool.labels is None else torch.from_numpy(pool.labels[list(indices)].astype(np.int64))
    names = spec.classes or pool.class_names
    if names is not None and labels is not None and int(labels.max()) >= len(names):
        raise InputError(f"{label}: label {int(labels.max())} has no name, there are {len(names)} classes")
    return Samples(task, split, {"pixel_values": pixels}, labels, indices, names, images)


def pick(size: int, count: int | None, seed: int, task: str) -> tuple[int, ...]:
    """Indices of `count` out of `size` samples; the same for the same (seed, task), whatever other tasks do."""
    if count is not None and count < 1:
        raise InputError(f"{count} samples asked for; at least one is needed")
    if count is None or count >= size:
        return tuple(range(size))
    digest = hashlib.sha256(f"{seed}:{task}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return tuple(sorted(torch.randperm(size, generator=generator)[:count].tolist()))


def _limited(size: int, limit: int | None) -> list[int]:
    """Positions of at most `limit` samples, evenly spread: sources are often sorted by class."""
    return [round(position) for position in np.linspace(0, size - 1, min(limit or size, size))]


def open_pool(source: Source, split: str, root: Path, label: str) -> Pool:
    """The samples behind a source; `label` names it in errors.

    Raises:
        InputError: it cannot be read, or its labels are not one whole number >= 0 per sample.
    """
    pool = _open_pool(source, split, root, label)
    labels = pool.labels
    if labels is not None:
        if labels.shape != (pool.size,) or labels.dtype.kind not in "iu":
            raise InputError(
                f"{label}: labels are {labels.dtype} {list(labels.shape)}, expected one integer for each of {pool.size}"
            )
        if pool.size and labels.min() < 0:
            raise InputError(f"{label}: label {labels.min()} is negative; labels count from 0")
    return pool


def _open_pool(source: Source, split: str, root: Path, label: str) -> Pool:
    if source.embedded is not None:
        return _embedded(source.embedded, source.split or split, label)
    if source.tensors is not None:
        return _tensors(_existing(root / source.tensors, label), str(source.key), source.labels, label)
    if source.arrays is not None:
        return _arrays(_existing(root / source.arrays, label), source.split or split, label)
    assert source.imagefolder is not None
    return _imagefolder(_existing(root / source.imagefolder, label), label)


def preprocess(images: Sequence[Image], base_folder: Path) -> Tensor:
    """Pictures → `pixel_values` `[n, 3, H, W]` float32 by the image processor in the base's folder."""
    writable = [image.copy() for image in images]  # the processor wraps them as tensors
    try:
        pixels: Tensor = _processor(base_folder)(images=writable, return_tensors="pt")["pixel_values"]
    except ValueError as error:
        raise InputError(f"pictures: the base's image processor cannot make one batch of them ({error})") from error
    return pixels.float()


@lru_cache(maxsize=8)
def _processor(folder: Path) -> Any:
    from transformers import CLIPImageProcessor

    if not (folder / "preprocessor_config.json").is_file():
        raise InputError(f"base: {folder} has no preprocessor_config.json, which pictures need; use a 'tensors' source")
    try:
        return CLIPImageProcessor.from_pretrained(folder)
    except (OSError, ValueError, TypeError) as error:
        raise InputError(
            f"base: {folder / 'preprocessor_config.json'} is not a usable image processor ({error})"
        ) from error


def _existing(path: Path, label: str) -> Path:
    if not path.exists():
        raise InputError(f"{label}: {path} does not exist")
    return path


def _embedded(task: str, split: str, label: str) -> Pool:
    from featcal.tasks import embedded_images as embedded

    if task not in embedded.CLASSES:
        raise InputError(f"{label}: no embedded task '{task}'.{did_you_mean(task, embedded.CLASSES)}")
    if split not in embedded.SPLITS:
        raise InputError(f"{label}: embedded tasks have no split '{split}', only {', '.join(embedded.SPLITS)}")
    images, labels = embedded.render(task, split)
    return Pool(len(images), labels, embedded.CLASSES[task], lambda wanted: [images[i] for i in wanted])


def _tensors(file: Path, key: str, labels_key: str | None, label: str) -> Pool:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as handle:
            known = list(handle.keys())
            for name in (key, *([labels_key] if labels_key else [])):
                if name not in known:
                    raise InputError(f"{label}: {file} has no tensor '{name}'.{did_you_mean(name, known)}")
            values: Tensor = handle.get_tensor(key)
            labels = handle.get_tensor(labels_key).numpy() if labels_key else None
    except (SafetensorError, OSError, TypeError) as error:
        raise InputError(f"{label}: {file} is not a whole safetensors file ({error})") from error
    if values.ndim != 4:
        raise InputError(f"{label}: '{key}' has shape {list(values.shape)}, expected [n, channels, height, width]")
    return Pool(len(values), labels, None, None, lambda wanted: values[list(wanted)])


def _arrays(file: Path, split: str, label: str) -> Pool:
    """Splits "train" and "test" are the file's own; every tenth training sample is "validation", the others
    are "calibration"."""
    if split not in ("train", *SPLITS):
        raise InputError(f"{label}: arrays have no split '{split}', only train, {', '.join(SPLITS)}")
    part = "test" if split == "test" else "train"
    try:
        with file.open("rb") as handle, np.load(handle, allow_pickle=False) as content:
            missing = [name for name in (f"{part}_x", f"{part}_y") if name not in content]
            if missing:
                raise InputError(f"{label}: {file} has no {' and '.join(missing)} (found {', '.join(content)})")
            images, labels = content[f"{part}_x"], content[f"{part}_y"]
            names = tuple(map(str, np.atleast_1d(content["class_names"]))) if "class_names" in content else None
    except _UNREADABLE as error:
        raise InputError(f"{label}: {file} is not a readable .npz file ({error})") from error
    if len(labels) != len(images):
        raise InputError(f"{label}: {part}_x has {len(images)} samples, {part}_y {len(labels)}")
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[-1] != 3:
        raise InputError(f"{label}: {part}_x is {images.dtype} {list(images.shape)}, expected uint8 [n, H, W, 3]")
    if split in ("calibration", "validation"):
        held_out = np.arange(len(images)) % _VALIDATION_EVERY == 0
        chosen = held_out if split == "validation" else ~held_out
        images, labels = images[chosen], labels[chosen]
    return Pool(len(images), labels, names, lambda wanted: [images[i] for i in wanted])


def _imagefolder(folder: Path, label: str) -> Pool:
    if not folder.is_dir():
        raise InputError(f"{label}: {folder} is a file, an imagefolder is a folder")
    classes = sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    if not classes:
        raise InputError(f"{label}: {folder} has no sub-folders; make one per class")
    files = [
        (path, index)
        for index, name in enumerate(classes)
        for path in sorted((folder / name).rglob("*"))
        if path.suffix.lower() in _IMAGE_FILES and not path.name.startswith(".")
    ]
    labels = np.array([index for _, index in files], dtype=np.int64)

    def images(wanted: Sequence[int]) -> list[Image]:
        return [_read_image(files[i][0], label) for i in wanted]

    return Pool(len(files), labels, tuple(classes), images)


def _read_image(path: Path, label: str) -> Image:
    from PIL import Image as Pillow
    from PIL import UnidentifiedImageError

    try:
        with Pillow.open(path) as picture:
            return np.asarray(picture.convert("RGB"))
    except (OSError, UnidentifiedImageError) as error:
        raise InputError(f"{label}: {path} is not a readable picture") from error

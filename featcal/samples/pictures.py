"""Open pools of pictures in files: `.npz` arrays and folders of images."""

from __future__ import annotations

import csv
import os
import struct
import tokenize
import zipfile
import zlib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featcal.samples.arrow import EVERY_SPLIT_NAME, read_parquet
from featcal.samples.class_names import sort_names
from featcal.samples.pool import Image, Pool
from featcal.samples.records import note_clipping, number_labels, read_image
from featcal.samples.table import read_jsonl
from featcal.suite.schema import SPLITS
from featcal.system.errors import InputError
from featcal.system.formatting import readable, shorten, some
from featcal.system.paths import require_plain

_VALIDATION_EVERY = 10
_UNREADABLE = (
    *(OSError, ValueError, EOFError, TypeError, MemoryError, RecursionError, OverflowError, SyntaxError),
    *(NotImplementedError, RuntimeError, struct.error, tokenize.TokenError, zipfile.BadZipFile, zlib.error),
)
"""Errors that numpy raises for files that are damaged or not `.npz` files at all."""
_NOT_DECODED = {"EPS", "MPEG"}
"""Formats that Pillow opens but should not decode: it hands PostScript to another program, and reads only the size of
films."""
_MOST_KINDS = 6
"""Most endings that a note lists."""
_MOST_METADATA = 1 << 28
"""Largest metadata file, in bytes, because it is read whole."""
_METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")


def _array(member: object, what: str) -> NDArray[Any]:
    """Return a member of a `.npz` file; raise InputError if it is not an array."""
    if not isinstance(member, np.ndarray):
        # numpy returns a member that is not a `.npy` file as its bytes
        raise InputError(f"{what} is not an array; write the file with numpy.savez")
    return member


def arrays(file: Path, split: str) -> Pool:
    """Return the pictures and labels of an `.npz` file: `SPLIT_x`, uint8 `[n, H, W, 3]`, and `SPLIT_y`, `[n]`.

    Splits "train" and "test" are the file's own; every tenth training sample is "validation", the others are
    "calibration".

    Raises:
        InputError: there is no such split, the file cannot be read or unpacks to far more than its size, or its arrays
            are of other kinds.
    """
    if split not in ("train", *SPLITS):
        raise InputError(f"arrays have no split '{split}', only train, {', '.join(SPLITS)}")
    part = "test" if split == "test" else "train"
    _require_proportion(file)
    try:
        # A pickle could run code.
        with file.open("rb") as handle, np.load(handle, allow_pickle=False) as content:
            missing = [name for name in (f"{part}_x", f"{part}_y") if name not in content]
            if missing:
                raise InputError(f"{file} has no {' and '.join(missing)} (found {', '.join(content)})")
            images, labels = (_array(content[f"{part}_{of}"], f"{file}: {part}_{of}") for of in "xy")
            names = _read_names(content["class_names"], file) if "class_names" in content else None
    except _UNREADABLE as error:
        raise InputError(f"{file} is not a readable .npz file ({error})") from error
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[-1] != 3 or 0 in images.shape:
        raise InputError(f"{file}: {part}_x is {images.dtype} {list(images.shape)}, expected uint8 [n, H, W, 3]")
    if labels.shape != images.shape[:1]:
        raise InputError(f"{file}: {part}_x has {len(images)} samples, {part}_y has shape {list(labels.shape)}")
    if split in ("calibration", "validation"):
        held_out = np.arange(len(images)) % _VALIDATION_EVERY == 0
        chosen = held_out if split == "validation" else ~held_out
        images, labels = images[chosen], labels[chosen]
    return Pool(len(images), labels, names, lambda wanted: [images[i] for i in wanted])


def _read_names(names: NDArray[Any], file: Path) -> tuple[str, ...]:
    if names.dtype.kind not in "USiu":
        raise InputError(f"{file}: class_names is {names.dtype}, expected text")
    return tuple(one.decode() if isinstance(one, bytes) else str(one) for one in np.atleast_1d(names).tolist())


_PACKED, _SMALL = 100, 1 << 30
"""_PACKED: factor of its own size to which an `.npz` file may unpack. _SMALL: bytes beyond which this is checked,
because pictures of one colour pack a thousandfold."""


def _require_proportion(file: Path) -> None:
    """Raise InputError for a file that is not an `.npz` file, or that unpacks to far more than its size."""
    require_plain(file)
    try:
        with zipfile.ZipFile(file) as archive:
            unpacked = sum(member.file_size for member in archive.infolist())
    except _UNREADABLE as error:
        raise InputError(f"{file} is not a readable .npz file ({error})") from error
    if unpacked > max(_SMALL, _PACKED * file.stat().st_size):
        raise InputError(f"{file} unpacks to {readable(unpacked)}, more than {_PACKED} times its size; write it again")


def imagefolder(folder: Path, label: str | None) -> Pool:
    """Return a pool with one class per sub-folder that has pictures, or with the labels of a metadata file that has the
    column `label`.

    Raises:
        InputError: there is no folder or no sub-folder, or a metadata file cannot be read or does not fit them.
    """
    if not folder.is_dir():
        raise InputError(f"{folder} is a file, an imagefolder is a folder")
    files, labels, names, notes = _list_metadata(folder, label) or _list_subfolders(folder)

    def images(wanted: Sequence[int]) -> list[Image]:
        return [read_image(files[i], str(files[i])) for i in wanted]

    notes += tuple(note for file in files[:1] for note in note_clipping(file))
    return Pool(len(files), labels, names, images, counted_names=names is not None, notes=notes)


def class_folders(folder: Path) -> tuple[str, ...]:
    """Return the classes of an imagefolder without a metadata file: its sub-folders that have a picture."""
    if any((folder / name).is_file() for name in _METADATA) or not folder.is_dir():
        return ()
    endings = _picture_endings()
    return tuple(
        path.name for path in _sub_folders(folder) if any(file.suffix.lower() in endings for file in _walk(path))
    )


def are_classes(folder: Path, places: Collection[Path]) -> bool:
    """Say whether sub-folders that are called like splits are classes: pictures lie in them without folders of classes
    or metadata, beside folders of pictures that are called otherwise."""
    every = class_folders(folder)
    return (
        any(name.lower() not in EVERY_SPLIT_NAME for name in every)
        and all(place.name in every and not _sub_folders(place) for place in places)
        and not any((place / name).is_file() for place in places for name in _METADATA)
    )


_Files = tuple[list[Path], NDArray[np.int64], tuple[str, ...] | None, tuple[str, ...]]
"""Pictures, labels, names of the classes, and notes."""


def _sub_folders(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")]


def _list_subfolders(folder: Path) -> _Files:
    below = _sub_folders(folder)
    if not below:
        raise InputError(f"{folder} has no sub-folders; make one per class")
    pictures: dict[str, list[Path]] = {path.name: [] for path in below}
    endings, others = _picture_endings(), Counter[str]()
    for path in below:
        for file in _walk(path):
            ending = file.suffix.lower()
            if ending in endings:
                pictures[path.name].append(file)
            else:
                others[ending] += 1
    _refuse_splits(folder, pictures)
    names = sort_names(name for name, files in pictures.items() if files)
    if not names:
        raise InputError(f"{folder}: its sub-folders ({some(sorted(pictures))}) have no pictures; make one per class")
    labels = np.repeat(np.arange(len(names), dtype=np.int64), [len(pictures[name]) for name in names])
    beside = sum(path.suffix.lower() in endings for path in folder.glob("[!.]*") if path.name not in pictures)
    notes = _note_left_out(others, sorted(pictures.keys() - set(names)), beside)
    return [file for name in names for file in sorted(pictures[name])], labels, names, notes


def _refuse_splits(folder: Path, pictures: Mapping[str, Sequence[Path]]) -> None:
    """Raise InputError if the sub-folders are splits, each with a folder per class, and no classes."""
    splits = [name for name, files in pictures.items() if files]
    if splits and all(name.lower() in EVERY_SPLIT_NAME for name in splits):
        beneath = (file for name in splits for file in pictures[name])
        if all(len(file.relative_to(folder).parts) > 2 for file in beneath):
            raise InputError(
                f"{folder} has a folder per split ({some(sorted(splits))}), not one per class; give the folder of a "
                f"split, such as {folder / sorted(splits)[0]}"
            )


def _walk(folder: Path) -> Iterator[Path]:
    """Yield the files below a folder, without hidden ones and those in hidden folders."""
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(place, name) for name in files if not name.startswith("."))


@cache
def _picture_endings() -> frozenset[str]:
    """Return the endings, in lower case, of files that Pillow opens and decodes."""
    from PIL import Image as Pillow
    from PIL import ImageFile

    endings = Pillow.registered_extensions()  # imports every kind, so this comes first
    stubs = {
        kind
        for kind, (opener, _) in Pillow.OPEN.items()
        if isinstance(opener, type) and issubclass(opener, ImageFile.StubImageFile)
    }
    decoded = Pillow.OPEN.keys() - stubs - _NOT_DECODED
    return frozenset(ending for ending, kind in endings.items() if kind in decoded)


def _note_left_out(others: Counter[str], empty: Sequence[str], beside: int) -> tuple[str, ...]:
    """Describe the files of an imagefolder that are left out.

    Args:
        others: files in its folders by their endings.
        empty: folders without pictures.
        beside: pictures in no folder.
    """
    notes = []
    if others:
        most = sorted(others.items(), key=lambda one: (-one[1], one[0]))[:_MOST_KINDS]
        kinds = ", ".join(f"{count} of {ending or 'no ending'}" for ending, count in most)
        notes.append(f"left out are files whose endings are of no picture that Pillow reads: {kinds}")
    if empty:
        notes.append(f"folders without pictures are no classes: {some(empty)}")
    if beside:
        notes.append(f"left out are pictures beside the folders, which have no class: {beside}")
    return tuple(notes)


def _list_metadata(folder: Path, label: str | None) -> _Files | None:
    """Return files and labels of a metadata file; None without one, or if it has no labels and none are needed."""
    present = [name for name in _METADATA if (folder / name).is_file()]
    if len(present) > 1:
        raise InputError(f"{folder} has {' and '.join(present)}; keep one of them")
    if not present:
        if label is not None:
            raise InputError(f"{folder} has no {', '.join(_METADATA)} with the column '{label}'")
        return None
    columns, rows = _metadata(folder / present[0])
    wanted = label or "label"
    missing = [name for name in ("file_name", wanted) if name not in columns]
    if label is None and wanted in missing:
        if _sub_folders(folder):
            return None
        raise InputError(
            f"{folder} has no sub-folders, one per class, and {present[0]} in it no {_name_columns(missing)}; it has "
            f"{some(list(columns), 12)}. Name its columns so, separated by commas in a .csv, or name that of the "
            "classes with 'label: COLUMN'"
        )
    if missing:
        raise InputError(f"{folder / present[0]} has no {_name_columns(missing)} (columns: {', '.join(columns)})")
    given = [str(row["file_name"]) for row in rows]
    files = [folder / name for name in given]
    lost = [name for name, file in zip(given, files, strict=True) if not _is_inside(name, file)]
    if lost:
        raise InputError(
            f"{folder / present[0]} names {len(lost)} files that are not there, such as {shorten(lost[0])}; "
            "names lie below its folder"
        )
    labels, names = number_labels([row[wanted] for row in rows], f"{folder / present[0]}, column '{wanted}'")
    return files, labels, names, ()


def _name_columns(names: Sequence[str]) -> str:
    return f"column {' and no column '.join(repr(name) for name in names)}"


def _is_inside(name: str, file: Path) -> bool:
    """Say whether a name in a folder's metadata belongs to a file in it."""
    try:
        return not Path(name).is_absolute() and ".." not in Path(name).parts and file.is_file()
    except (OSError, ValueError):  # too long, a null character
        return False


def _metadata(file: Path) -> tuple[Sequence[str], Sequence[dict[str, Any]]]:
    """Return columns and rows of a metadata file."""
    require_plain(file, most=_MOST_METADATA)
    if file.suffix != ".csv":
        table = read_jsonl(file) if file.suffix == ".jsonl" else read_parquet(file, None)[0]
        return table.columns, table.rows(range(len(table)), table.columns)
    try:
        with file.open(newline="", encoding="utf-8-sig") as stream:
            reader = csv.DictReader(stream, strict=True)
            columns, rows = list(reader.fieldnames or ()), list[dict[str, Any]](reader)
    except (OSError, ValueError, csv.Error) as error:
        raise InputError(f"{file} is not a readable CSV file ({error})") from error
    twice = [name for name, count in Counter(columns).items() if name and count > 1]
    if twice:
        raise InputError(f"{file} has {some(twice)} more than once in its first line; give every column its own name")
    uneven = next((number for number, row in enumerate(rows, start=1) if None in row), None)
    if uneven is not None:
        raise InputError(f"{file}, row {uneven} has more cells than the {len(columns)} of the first line")
    for name in columns:
        values = [row[name] for row in rows]
        # A CSV file has no types: a column of digits alone holds class indices.
        if name not in ("", "file_name") and all(value is not None and value.isdecimal() for value in values):
            for row in rows:
                row[name] = int(row[name])
    return columns, rows

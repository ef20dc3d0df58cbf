"""Read a checkpoint folder in the Hub's layout one tensor at a time, from safetensors files or from pickles."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from featcal.formats.conversions import explain_training_state
from featcal.formats.hub import fetch_model, hub_model
from featcal.formats.pickles import PICKLED_FILE, PICKLED_INDEX, convert_once, select_pickled
from featcal.formats.weights import ANOTHER_FILE, TensorInfo, check_finite, dtype_of
from featcal.system.errors import InputError
from featcal.system.formatting import some
from featcal.system.json_files import read_json
from featcal.system.paths import local_path, require_plain
from featcal.system.resources import data_path
from featcal.system.sandbox import require_links_inside, require_no_hub

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MOST_DIMENSIONS = 8
"""Largest number of dimensions of a tensor; weights have at most four."""
Header = dict[str, tuple[tuple[int, ...], str]]
"""Shape and dtype code of every tensor of a file, by stored name."""


class Checkpoint:
    """Tensors of one folder by canonical name; only headers are read until `read` is called.

    Args:
        folder: holds `model.safetensors`, or shards with `model.safetensors.index.json`, or the same for
            `pytorch_model.bin`, and `config.json`.
        label: name of the model in messages.
        canonical: maps a tensor's stored name to its canonical name; None leaves the tensor out.

    Raises:
        InputError: there are no weights, a header cannot be read, a shard that the index names is missing, or two
            tensors have one canonical name.
    """

    def __init__(self, folder: Path, label: str, canonical: Callable[[str], str | None]) -> None:
        self.folder = folder
        self.label = label
        self._places: dict[str, tuple[Path, str]] = {}
        self._info: dict[str, TensorInfo] = {}
        self.leftovers: dict[str, Path] = {}
        """Stored names without a canonical name, and their files."""
        headers = _headers(folder, label)
        self.files = list(headers)
        for file, header in headers.values():
            for stored, (shape, code) in header.items():
                name = canonical(stored)
                if name is None:
                    self.leftovers[stored] = file
                    continue
                if name in self._places:
                    raise InputError(f"{label}: both '{self._places[name][1]}' and '{stored}' mean '{name}' ({file})")
                # A damaged header may declare any number, on which libraries fail in words of their own.
                if len(shape) > MOST_DIMENSIONS:
                    raise InputError(
                        f"{label}: tensor '{stored}' in {file} has {len(shape)} dimensions; is it damaged?"
                    )
                self._places[name] = (file, stored)
                self._info[name] = TensorInfo(shape, dtype_of(code, f"{label}: tensor '{stored}' in {file}"))

    @property
    def info(self) -> Mapping[str, TensorInfo]:
        return self._info

    @cached_property
    def config(self) -> dict[str, Any]:
        """Return the content of `config.json`."""
        return read_config(self.folder, self.label)

    def repeats(self, stored: str, name: str) -> bool:
        """Say whether a tensor that was left out equals the tensor `name` in every value."""
        with open_file(self.leftovers[stored], self.label) as handle:
            other: Tensor = handle.get_tensor(stored)
        return torch.equal(other, self.read([name])[name])

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        by_file: dict[Path, list[tuple[str, str]]] = defaultdict(list)
        for name in names:
            if name not in self._places:
                raise InputError(f"{self.label}: tensor '{name}' is missing from {self.folder}")
            file, stored = self._places[name]
            by_file[file].append((name, stored))
        tensors: dict[str, Tensor] = {}
        for file, wanted in by_file.items():
            with open_file(file, self.label) as handle:
                for name, stored in wanted:
                    tensor: Tensor = handle.get_tensor(stored)
                    check_finite(tensor, f"{self.label}: tensor '{stored}' in {file}", ANOTHER_FILE)
                    tensors[name] = tensor
        return tensors


def local_folder(ref: str, root: Path, label: str) -> Path:
    """Return the local folder of a model reference, after fetching it from the Hub if needed.

    Args:
        ref: a folder relative to `root`, or a Hub id with an optional folder inside it and revision
            (`owner/name/folder@revision`).

    Raises:
        InputError: the reference is neither a folder nor a model on the Hub or in its local cache.
    """
    folder = local_path(ref, root, label).resolve()
    if folder.is_dir():
        require_links_inside(folder, label)
        return folder
    # A misspelt path below a folder that exists must not be looked up on the Hub, where strangers may own that name.
    above = root / ref.split("/")[0]
    model = hub_model(ref)
    if above.is_dir() or model is None:
        why = "" if model is None else f"; not asked of the Hub, since the folder {above.resolve()} is there"
        raise InputError(
            f"{label}: no folder {folder}{why}; give an existing folder or a Hub id such as 'owner/name' or "
            "'owner/name/folder'"
        )
    require_no_hub(label)
    try:
        return fetch_model(model)
    except InputError as error:
        # Nobody looks for a folder beside the file of a suite that comes with featcal.
        sought = "" if root == data_path("suites") else f"no folder '{ref}', and "
        raise InputError(*(f"{label}: {sought}{problem}" for problem in error.problems)) from error


def stored_names(folder: Path, label: str) -> list[str]:
    """Return the stored names of all tensors in a checkpoint folder."""
    return [name for _, header in _headers(folder, label).values() for name in header]


def read_config(folder: Path, label: str) -> dict[str, Any]:
    """Return the content of `config.json` in a checkpoint folder."""
    file = folder / "config.json"
    missing = f"{label}: {folder} has no readable config.json; is it a checkpoint folder?"
    return read_json(file, f"{label}: {file}", missing)


def _weight_files(folder: Path, label: str) -> list[Path]:
    """Return the files with a folder's weights: safetensors; else pickles with
    transformers' names; else a pickle, if there is only one.
    """
    for single, index_name in ((SINGLE_FILE, INDEX_FILE), (PICKLED_FILE, PICKLED_INDEX)):
        if (folder / single).is_file():
            return [folder / single]
        index = folder / index_name
        if index.is_file():
            names = shards(read_json(index, f"{label}: {index}"), f"{label}: {index}")
            missing = [name for name in names if not (folder / name).is_file()]
            if missing:
                raise InputError(f"{label}: {index} names shards that are not there: {', '.join(missing)}")
            return [folder / name for name in names]
    inside = [path.name for path in folder.iterdir()]
    pickles, training = select_pickled(inside), explain_training_state(folder, inside)
    if training or not pickles:
        raise InputError(f"{label}: no {SINGLE_FILE} in {folder}{training and f'; {training}'}")
    if len(pickles) > 1:
        raise InputError(
            f"{label}: {folder} has several pickled files and no index ({some(pickles)}); name the one that holds the "
            f"weights {PICKLED_FILE}"
        )
    return [folder / pickles[0]]


def shards(index: Any, what: str) -> list[str]:
    """Return the sorted file names of an index of shards; raise InputError, naming `what`, if it is not valid."""
    try:
        names = sorted(set(index["weight_map"].values()))
        # An index may come from a stranger: its shards must not lead out of the folder.
        if not names or any(Path(name).name != name or len(name) > 255 for name in names):
            raise ValueError("it may name only files in its own folder")
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise InputError(f"{what} is not a valid index of shards ({error})") from error
    return names


def _headers(folder: Path, label: str) -> dict[Path, tuple[Path, Header]]:
    """Return for every weight file the safetensors file to read it from, and its header; raise one InputError that
    lists every unreadable file."""
    headers: dict[Path, tuple[Path, Header]] = {}
    problems: list[str] = []
    for file in _weight_files(folder, label):
        try:
            read_from = make_safetensors(file, label)
            headers[file] = read_from, read_header(read_from, label)
        except InputError as error:
            problems += error.problems
    if problems:
        raise InputError(*problems)
    return headers


def make_safetensors(file: Path, label: str) -> Path:
    """Return the file itself, or the converted tensors of a pickle; raise InputError if the
    pickle cannot be converted.
    """
    return file if file.suffix == ".safetensors" else convert_once(file, label)


def read_header(file: Path, label: str) -> Header:
    """Return shape and dtype code of every tensor in a safetensors file.

    Raises:
        InputError: there is no such file, it is not a plain file, or it is not whole.
    """
    with open_file(file, label) as handle:
        slices = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118 (not a mapping)
        return {name: (tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()}


def open_file(file: Path, label: str) -> Any:
    """Open a safetensors file as a context manager; `label` names the model in messages.

    Raises:
        InputError: there is no such file, it is not a plain file, or it is not whole.
    """
    require_plain(file, f"{label}: {file}")
    try:
        return safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError, MemoryError) as error:
        raise InputError(f"{label}: {file} is not a whole safetensors file ({error}); fetch it again") from error

"""A checkpoint folder in the Hub's layout, read one tensor at a time from its safetensors files."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from featcal.errors import InputError
from featcal.models.weights import TensorInfo, check_finite

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+(@[\w./-]+)?")
_HUB_FILES = ["*.json", "*.safetensors", "*.txt", "*.model"]
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip


class Checkpoint:
    """Tensors of one folder by canonical name. Nothing is read but headers until `read` is called.

    Args:
        folder: holds `model.safetensors`, or shards with `model.safetensors.index.json`, and `config.json`.
        label: what the model is called in messages.
        canonical: file name of a tensor → canonical name; None leaves the tensor out.

    Raises:
        InputError: no safetensors, unreadable header, a shard that the index names but is not there, or two
            tensors with one canonical name.
    """

    def __init__(self, folder: Path, label: str, canonical: Callable[[str], str | None]) -> None:
        self.folder = folder
        self.label = label
        self._places: dict[str, tuple[Path, str]] = {}
        self._info: dict[str, TensorInfo] = {}
        self.left_out: dict[str, Path] = {}
        """Stored names that mean no tensor of their own, and their files."""
        self.files = _weight_files(folder, label)
        for file in self.files:
            for stored, (shape, code) in _header(file, label).items():
                name = canonical(stored)
                if name is None:
                    self.left_out[stored] = file
                    continue
                if name in self._places:
                    raise InputError(f"{label}: both '{self._places[name][1]}' and '{stored}' mean '{name}' ({file})")
                if code not in _DTYPES:
                    raise InputError(
                        f"{label}: tensor '{stored}' in {file} has dtype {code}, which featcal does not read"
                    )
                self._places[name] = (file, stored)
                self._info[name] = TensorInfo(shape, _DTYPES[code])

    @property
    def info(self) -> Mapping[str, TensorInfo]:
        return self._info

    @cached_property
    def config(self) -> dict[str, Any]:
        """Content of `config.json`."""
        return read_config(self.folder, self.label)

    def repeats(self, stored: str, name: str) -> bool:
        """Whether a tensor that was left out holds the very values of the tensor `name`."""
        with _open(self.left_out[stored], self.label) as handle:
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
            with _open(file, self.label) as handle:
                for name, stored in wanted:
                    tensor: Tensor = handle.get_tensor(stored)
                    check_finite(tensor, f"{self.label}: tensor '{stored}' in {file}")
                    tensors[name] = tensor
        return tensors


def resolve(ref: str, root: Path, label: str) -> Path:
    """Local folder of a model reference: a folder relative to `root`, or a Hub id with an optional `@revision`.

    Raises:
        InputError: neither a folder nor a model that the Hub (or its local cache) has.
    """
    folder = (root / Path(ref).expanduser()).resolve()
    if folder.is_dir():
        return folder
    inside_known_folder = (root / ref.split("/")[0]).is_dir()
    if inside_known_folder or not HUB_ID.fullmatch(ref):
        raise InputError(f"{label}: no folder {folder}; give an existing folder or a Hub id such as 'owner/name'")
    return _download(ref, folder, label)


def _download(ref: str, folder: Path, label: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    repo, _, revision = ref.partition("@")
    try:
        return Path(snapshot_download(repo, revision=revision or None, allow_patterns=_HUB_FILES))
    except GatedRepoError as error:
        raise InputError(f"{label}: '{repo}' is gated; accept its licence on the Hub and set HF_TOKEN") from error
    except RepositoryNotFoundError as error:
        raise InputError(
            f"{label}: no folder {folder}, and the Hub has no model '{repo}' (private ones need HF_TOKEN)"
        ) from error
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise InputError(
            f"{label}: no folder {folder}, and '{ref}' is neither on the Hub nor in its local cache, "
            f"or the Hub cannot be reached ({type(error).__name__})"
        ) from error


def stored_names(folder: Path, label: str) -> list[str]:
    """Names of all tensors of a checkpoint folder as they are stored."""
    return [name for file in _weight_files(folder, label) for name in _header(file, label)]


def read_config(folder: Path, label: str) -> dict[str, Any]:
    """Content of `config.json` of a checkpoint folder."""
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{label}: {folder} has no readable config.json; is it a checkpoint folder?") from error
    except json.JSONDecodeError as error:
        raise InputError(f"{label}: {file} is not valid JSON ({error})") from error
    if not isinstance(config, dict):
        raise InputError(f"{label}: {file} must hold a mapping")
    return config


def _weight_files(folder: Path, label: str) -> list[Path]:
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    index = folder / INDEX_FILE
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            if any(Path(name).name != name for name in names):
                raise ValueError("a shard lies beside its index")
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise InputError(f"{label}: {index} is not a valid index of shards ({error})") from error
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise InputError(f"{label}: {index} names shards that are not there: {', '.join(missing)}")
        return [folder / name for name in names]
    pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    if pickles:
        raise InputError(
            f"{label}: {folder} holds only pickled weights ({', '.join(pickles)}), which can run code; "
            "load them where you trust them and save with safe_serialization=True"
        )
    raise InputError(f"{label}: no {SINGLE_FILE} in {folder}")


def _header(file: Path, label: str) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype code of every tensor of a file."""
    with _open(file, label) as handle:
        slices = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118 (not a mapping)
        return {name: (tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()}


def _open(file: Path, label: str) -> Any:
    try:
        return safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise InputError(f"{label}: {file} is not a whole safetensors file ({error}); fetch it again") from error

"""Read a state dict in one file, as open_clip and training scripts save it, mapped from disk without running code."""

from __future__ import annotations

import zipfile
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from featcal.formats.weights import ANOTHER_FILE, Canonical, TensorInfo, check_finite
from featcal.system.errors import InputError
from featcal.system.formatting import printable
from featcal.system.paths import require_plain

_WRAPPERS = ("module.", "_orig_mod.", "model.")
"""Prefixes that training leaves on every name."""


class StateFile:
    """A state dict in one file, mapped from disk: a tensor's values are read when they are used.

    Args:
        file: `.safetensors`, or a state dict written by `torch.save`.
        label: name of the model in messages.
        canonical: maps a stored name to a canonical name; None leaves the tensor out.

    Raises:
        InputError: the file cannot be read, is not a state dict, or has two tensors with one canonical name.
    """

    def __init__(self, file: Path, label: str, canonical: Canonical) -> None:
        self.label = label
        self.files = [file]
        self.leftovers: dict[str, Path] = {}
        self._stored = state_dict(file, label)
        self._names: dict[str, str] = {}
        for stored in self._stored:
            name = canonical(stored)
            if name is None:
                self.leftovers[stored] = file
            elif name in self._names:
                raise InputError(f"{label}: both '{self._names[name]}' and '{stored}' mean '{name}' ({file})")
            else:
                self._names[name] = stored

    @property
    def info(self) -> Mapping[str, TensorInfo]:
        tensors = ((name, self._stored[stored]) for name, stored in self._names.items())
        return {name: TensorInfo(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors}

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        read = {}
        for name in names:
            if name not in self._names:
                raise InputError(f"{self.label}: tensor '{name}' is missing from {self.files[0]}")
            tensor = self._stored[self._names[name]]
            check_finite(tensor, f"{self.label}: tensor '{name}' in {self.files[0]}", ANOTHER_FILE)
            read[name] = tensor
        return read

    def repeats(self, stored: str, name: str) -> bool:
        return torch.equal(self._stored[stored], self.read([name])[name])


def state_dict(file: Path, label: str) -> dict[str, Tensor]:
    """Return all tensors of a file by stored name, mapped but not read, without training's wrappers and prefixes.

    Raises:
        InputError: the file is missing, damaged, or holds pickled objects, which could run code.
    """
    require_plain(file, f"{label}: {file}")
    content = _load_safetensors(file, label) if file.suffix == ".safetensors" else _load_torch(file, label)
    for wrapper in ("state_dict", "model_state_dict", "model"):
        if isinstance(content.get(wrapper), Mapping):
            content = content[wrapper]
    foreign = [name for name, value in content.items() if not (isinstance(name, str) and isinstance(value, Tensor))]
    if foreign or not content:
        what = _describe_entry(foreign[0], content[foreign[0]]) if foreign else "it is empty"
        raise InputError(f"{label}: {file} is not a state dict of tensors ({what})")
    if file.suffix != ".safetensors":
        _require_values(content, file, label)
    for prefix in _WRAPPERS:
        if all(name.startswith(prefix) for name in content):
            content = {name.removeprefix(prefix): tensor for name, tensor in content.items()}
    if "class_embedding" in content:  # an image tower alone
        content = {f"visual.{name}": tensor for name, tensor in content.items()}
    return dict(content)


def _require_values(tensors: Mapping[str, Tensor], file: Path, label: str) -> None:
    """Check that the values of all tensors lie in the archive.

    Raises:
        InputError: a tensor is not dense, or no member of the archive is as long as its values.
    """
    odd = next((n for n, t in tensors.items() if t.layout != torch.strided or t.device.type == "meta"), None)
    with zipfile.ZipFile(file) as archive:
        # torch maps values from wherever the pickle points to, in a damaged file beyond their own member of the
        # archive.
        left = Counter(one.file_size for one in archive.infolist())
    values = (
        {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors.values()} if odd is None else {}
    )
    short = sum((Counter(values.values()) - left).values())
    if odd is not None or short:
        what = f"'{printable(odd, 80)}' has no dense values" if odd else f"values of {short} tensors are not whole"
        raise InputError(f"{label}: {file} is damaged ({what}); fetch it again")


def _describe_entry(name: object, value: object) -> str:
    if isinstance(name, str):
        return f"'{printable(name, 80)}' is {type(value).__name__}"
    return f"{type(name).__name__} as the name of a tensor"


def _load_safetensors(file: Path, label: str) -> Mapping[str, Any]:
    try:
        tensors: dict[str, Tensor] = load_file(file)
    except (SafetensorError, OSError) as error:
        raise InputError(f"{label}: {file} is not a whole safetensors file ({error}); fetch it again") from error
    return tensors


def _load_torch(file: Path, label: str) -> Mapping[str, Any]:
    if not zipfile.is_zipfile(file):
        raise InputError(
            f"{label}: {file} is damaged, or written by a torch before 1.6; fetch it again, or load it where you "
            "trust it and save its state dict as safetensors"
        )
    try:
        with zipfile.ZipFile(file) as archive:
            scripted = any(name.endswith("constants.pkl") for name in archive.namelist())
        content = None if scripted else torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # a damaged archive or pickle can raise anything
        content, reason = None, f"torch says: {printable(str(error).split('. ')[0], 300) or type(error).__name__}"
    else:
        reason = "a TorchScript archive" if scripted else f"a {type(content).__name__}"
    if not isinstance(content, Mapping):
        raise InputError(
            f"{label}: {file} is damaged or not a plain state dict ({reason}). Fetch it again. A pickled module can "
            "run code when it is loaded; where you trust it, load it with the software that wrote it and save "
            "model.state_dict() as safetensors"
        )
    return content

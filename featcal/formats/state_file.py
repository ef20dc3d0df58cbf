"""Read a state dict in one file, as open_clip and training scripts save it, mapped from disk without running code."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from featcal.formats.pickles import read_pickle
from featcal.formats.weights import ANOTHER_FILE, Canonical, TensorInfo, check_finite
from featcal.system.errors import InputError
from featcal.system.paths import require_plain

_WRAPPERS = ("module.", "_orig_mod.", "model.")
"""Prefixes that training wrappers leave on every name."""


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
    content = _load_safetensors(file, label) if file.suffix == ".safetensors" else read_pickle(file, label)
    for prefix in _WRAPPERS:
        if all(name.startswith(prefix) for name in content):
            content = {name.removeprefix(prefix): tensor for name, tensor in content.items()}
    if "class_embedding" in content:  # an image tower alone
        content = {f"visual.{name}": tensor for name, tensor in content.items()}
    return dict(content)


def _load_safetensors(file: Path, label: str) -> Mapping[str, Tensor]:
    require_plain(file, f"{label}: {file}")
    try:
        tensors: dict[str, Tensor] = load_file(file)
    except (SafetensorError, OSError) as error:
        raise InputError(f"{label}: {file} is not a whole safetensors file ({error}); fetch it again") from error
    return tensors

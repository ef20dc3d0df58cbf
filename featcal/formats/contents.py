"""Digest and look up tensors in written weight files."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path

from torch import Tensor

from featcal.formats.checkpoint import open_file
from featcal.formats.weights import raw_bytes


def tensor_digest(tensor: Tensor) -> str:
    """Return the SHA-256 of dtype, shape and bytes in hexadecimal digits, equal only for bit-identical tensors."""
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}\n".encode())
    digest.update(raw_bytes(tensor))
    return digest.hexdigest()


def inputs_digest(batches: Iterable[Mapping[str, Tensor]]) -> str:
    """Return the SHA-256 of a model's inputs, batch by batch and input by input, in hexadecimal digits."""
    digest = hashlib.sha256()
    for batch in batches:
        for name in sorted(batch):
            digest.update(raw_bytes(batch[name]))
    return digest.hexdigest()


def tensor_digests(files: Iterable[Path]) -> dict[str, str]:
    """Return stored name → digest of every tensor in some safetensors files, sorted by name; one tensor is in memory at
    a time. The digests do not depend on how tensors are spread over files.

    Raises:
        InputError: a file cannot be read.
    """
    found: dict[str, str] = {}
    for file in files:
        with open_file(file, file.name) as handle:
            found |= {name: tensor_digest(handle.get_tensor(name)) for name in handle.keys()}  # noqa: SIM118
    return dict(sorted(found.items()))


def stored_tensor(files: Iterable[Path], name: str) -> Tensor:
    """Return the tensor with a stored name from the first file that contains it.

    Raises:
        InputError: a file cannot be read.
        KeyError: no file contains it.
    """
    for file in files:
        with open_file(file, file.name) as handle:
            if name in handle.keys():  # noqa: SIM118
                tensor: Tensor = handle.get_tensor(name)
                return tensor
    raise KeyError(name)

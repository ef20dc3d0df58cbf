"""What written weight files hold, tensor by tensor."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

from featcal.formats.checkpoint import open_file
from featcal.formats.weights import raw_bytes


def tensor_digest(tensor: Tensor) -> str:
    """SHA-256 of dtype, shape and bytes, in hexadecimal digits: two tensors have the same if and only if they are the
    same bit for bit."""
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}\n".encode())
    digest.update(raw_bytes(tensor))
    return digest.hexdigest()


def tensor_digests(files: Iterable[Path]) -> dict[str, str]:
    """Of every tensor in some safetensors files, by its stored name, in the order of names; one is in memory at a time.

    They do not depend on how tensors are spread over files.

    Raises:
        InputError: a file that cannot be read.
    """
    found: dict[str, str] = {}
    for file in files:
        with open_file(file, file.name) as handle:
            found |= {name: tensor_digest(handle.get_tensor(name)) for name in handle.keys()}  # noqa: SIM118
    return dict(sorted(found.items()))


def stored_tensor(files: Iterable[Path], name: str) -> Tensor:
    """The tensor of this stored name in one of the files.

    Raises:
        InputError: a file that cannot be read.
        KeyError: no file has it.
    """
    for file in files:
        with open_file(file, file.name) as handle:
            if name in handle.keys():  # noqa: SIM118
                tensor: Tensor = handle.get_tensor(name)
                return tensor
    raise KeyError(name)

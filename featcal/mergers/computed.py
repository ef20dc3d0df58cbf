"""Tensors that take long to compute: each is computed once and then read from a file."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Mapping
from itertools import count
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from featcal.formats.output import save_tensors


class Computed:
    """Files of single tensors in a temporary folder of the system, which is gone with the object."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._files: dict[str, Path] = {}
        self._numbers = count()

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = load_file(self._files[name])[name]
        return tensor

    def put(self, tensors: Mapping[str, Tensor]) -> None:
        """Keep finished tensors.

        Raises:
            InputError: the disk refuses.
        """
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix=".featcal-merged-"))
            weakref.finalize(self, shutil.rmtree, self._folder, True)
        for name, tensor in tensors.items():
            file = self._folder / f"{next(self._numbers)}.safetensors"
            save_tensors({name: tensor}, file)
            self._files[name] = file

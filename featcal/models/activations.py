"""Store the token states of all tasks between two blocks: on the device and in memory within budgets, and beyond them
in files.

With large models the states, not the weights, fill memory: two streams (student and expert) of every token of every
    task, with masks and position biases of every batch.
"""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from featcal.models.adapter import Call
from featcal.models.compute import has_own_memory
from featcal.system.errors import InputError
from featcal.system.progress import release_memory


class ActivationStore:
    """Storage of calls for several lists, within budgets.

    Args:
        budget: bytes of token states that may be in the processor's memory together; None sets no limit.
        folder: for the files, a temporary folder of the system by default; they are deleted with the store.
        on_device: bytes of token states that may be on a device with its own memory; further states wait in the
            processor's memory. None sets no limit.
    """

    def __init__(self, budget: int | None = None, folder: Path | None = None, on_device: int | None = None) -> None:
        self.budget, self._on_device = budget, on_device
        self.resident = 0
        """Bytes of token states in the processor's memory now."""
        self.placed = 0
        """Bytes of token states on the device now."""
        self.spilled = 0
        """Bytes written to files so far."""
        self._folder = folder
        self._files: Path | None = None
        self._number = 0

    def hold(self, calls: Iterable[Call] = ()) -> CallList:
        """Return a list of calls, taken one by one, so that an iterator's items are never all in memory."""
        return CallList(self, calls)

    def settle(self) -> None:
        """Return freed memory to the system if there is a budget."""
        if self.budget is not None:
            # Whoever set the limit measures resident memory, in which freed pages count until they are given back.
            release_memory()

    @property
    def is_limited(self) -> bool:
        """Say whether there is any limit."""
        return self.budget is not None or self._on_device is not None

    def fits(self, size: int) -> bool:
        """Say whether `size` more bytes may be in the processor's memory."""
        return self.budget is None or self.resident + size <= self.budget

    def fits_on(self, device: torch.device, size: int) -> bool:
        """Say whether `size` more bytes may stay on a device; never where its memory is the processor's."""
        return has_own_memory(device) and (self._on_device is None or self.placed + size <= self._on_device)

    def new_file(self) -> Path:
        if self._files is None:
            self._files = Path(tempfile.mkdtemp(prefix=".featcal-states-", dir=self._folder))
            # Runs at the end of the process, too: states may fill a disk.
            weakref.finalize(self, shutil.rmtree, self._files, True)
        self._number += 1
        return self._files / f"{self._number}.safetensors"


class CallList:
    """Calls that are read and replaced one at a time."""

    def __init__(self, store: ActivationStore, calls: Iterable[Call]) -> None:
        self._store = store
        self._held: list[_Held | Call] = [self._hold(call) for call in calls]

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[Call]:
        return (held if isinstance(held, Call) else held.call() for held in self._held)

    def __getitem__(self, position: int) -> Call:
        held = self._held[position]
        return held if isinstance(held, Call) else held.call()

    def put(self, position: int, call: Call) -> None:
        """Replace the call at a position, or append one at the end."""
        if position < len(self._held):
            self._drop(self._held[position])
            self._held[position] = self._hold(call)
        else:
            self._held.append(self._hold(call))

    def clear(self) -> None:
        """Empty the list and give its memory back."""
        for held in self._held:
            self._drop(held)
        self._held = []

    def _hold(self, call: Call) -> _Held | Call:
        """Return the call itself if nothing limits memory, else a wrapper that counts its bytes."""
        return _Held(self._store, call) if self._store.is_limited else call

    @staticmethod
    def _drop(held: _Held | Call) -> None:
        if isinstance(held, _Held):
            held.drop()


class _Held:
    """One call; while its tensors are in a file, only the rest of it."""

    def __init__(self, store: ActivationStore, call: Call) -> None:
        self._store = store
        found, self._layout = tree_flatten(call.tree())
        places: dict[int, int] = {}
        self._places = [places.setdefault(id(leaf), len(places)) for leaf in found]
        leaves = list({id(leaf): leaf for leaf in found}.values())  # tensors that blocks share are held once
        tensors = {str(i): leaf for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
        self._size = sum(tensor.nbytes for tensor in tensors.values())
        self._file: Path | None = None
        self._leaves, self._device = leaves, call.hidden_state.device
        self._stays = store.fits_on(self._device, self._size)
        if self._stays:
            store.placed += self._size
        elif store.fits(self._size):
            store.resident += self._size
            self._leaves = self._move(_CPU)
        else:
            self._write(tensors)

    def _write(self, tensors: Mapping[str, Tensor]) -> None:
        """Write the tensors into a file, each under its position among the leaves."""
        self._file = self._store.new_file()
        try:
            # Clones, because safetensors refuses tensors that share memory.
            own = {name: tensor.cpu().contiguous().clone() for name, tensor in tensors.items()}
            save_file(own, self._file)
        except (OSError, SafetensorError) as error:
            raise InputError(
                f"cannot store token states in {self._file.parent} ({error}); free disk space, or write to a disk with "
                "more"
            ) from error
        self._store.spilled += self._size
        self._leaves = [None if str(i) in tensors else leaf for i, leaf in enumerate(self._leaves)]

    def _move(self, device: torch.device) -> list[Any]:
        """Return the leaves with their tensors on a device."""
        return [leaf.to(device) if isinstance(leaf, Tensor) else leaf for leaf in self._leaves]

    def call(self) -> Call:
        leaves = self._leaves
        if self._file is not None:
            tensors = load_file(self._file, device=str(self._device))
            leaves = [tensors.get(str(i), leaf) for i, leaf in enumerate(leaves)]
        elif not self._stays:
            leaves = self._move(self._device)
        return Call(*tree_unflatten([leaves[place] for place in self._places], self._layout))

    def drop(self) -> None:
        if self._file is not None:
            self._file.unlink()
        elif self._stays:
            self._store.placed -= self._size
        else:
            self._store.resident -= self._size


_CPU = torch.device("cpu")

"""Describe the tensors in the files of a written model: the container's, with those of the tower from the model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from featcal.formats.grid import OnGrid
from featcal.formats.weights import Stored, TensorInfo, Weights
from featcal.models.adapter import Adapter


class StoredContent:
    """Tensors of a model's files by stored name; quantised weights are packed.

    Args:
        source: the container, which has everything outside the tower.
    """

    def __init__(self, adapter: Adapter, source: Stored, model: Weights) -> None:
        self._adapter, self._source, self._model = adapter, source, model
        self.dense = written_info(adapter, source, model)
        """Shape and dtype of every tensor in the model."""
        self._parts: Mapping[str, Mapping[str, TensorInfo]] = model.packed_info() if isinstance(model, OnGrid) else {}
        self.info = {
            stored: info
            for name, own in self.dense.items()
            for stored, info in self._parts.get(name, {name: own}).items()
        }
        """Shape and dtype of every tensor in the file."""

    @property
    def is_packed(self) -> bool:
        """Say whether a tensor's stored form differs from the model's."""
        return bool(self._parts)

    def sizes(self) -> dict[str, int]:
        """Return the bytes of every stored tensor."""
        return {name: info.nbytes for name, info in self.info.items()}

    def stored_names(self, names: Iterable[str]) -> list[str]:
        """Return the stored names of some tensors of the model."""
        return [stored for name in names for stored in self._parts.get(name, (name,))]

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return stored tensors by stored name."""
        wanted = set(names)
        packed = [name for name, parts in self._parts.items() if not wanted.isdisjoint(parts)]
        inside = {stored for name in packed for stored in self._parts[name]}
        found = content_of(self._adapter, self._source, self._model, [name for name in names if name not in inside])
        if isinstance(self._model, OnGrid):
            for name in packed:
                found |= {stored: t for stored, t in self._model.pack(name).items() if stored in wanted}
        return found


def written_info(adapter: Adapter, source: Stored, model: Weights) -> dict[str, TensorInfo]:
    """Return every tensor to write: the container's, with those of the tower from the model."""
    own = model.info
    return {name: own[name] if name in adapter.tower else info for name, info in source.info.items()}


def content_of(adapter: Adapter, source: Stored, model: Weights, names: Sequence[str]) -> dict[str, Tensor]:
    """Return the tensors of a written model: the container's (`source`), with those of the tower from the model."""
    tower = set(adapter.tower)
    rest = source.read(name for name in names if name not in tower)
    return {**rest, **model.read(name for name in names if name in tower)}

"""Define models as named tensors that are read when needed.

A block of any model runs from a dict of tensors, so base, merged and experts are *sources of tensors*: a checkpoint on
disk, a merge computed on the fly, or one of these with some tensors replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from featcal.system.errors import InputError

Canonical = Callable[[str], str | None]
"""Maps a stored name to a canonical name; None for a tensor that has none, such as a second copy."""
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip


@dataclass(frozen=True)
class TensorInfo:
    """Shape and storage dtype of a tensor, known without reading it."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Return the size of the tensor's values in bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@runtime_checkable
class Weights(Protocol):
    """A source of one model's tensors, under canonical names (those that the adapter writes)."""

    @property
    def label(self) -> str:
        """Return the name of the model in messages: a role and a place."""

    @property
    def info(self) -> Mapping[str, TensorInfo]:
        """Return shape and dtype of every tensor of the model, by name."""

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return the named tensors in their storage dtype on the CPU; never write into them.

        Raises:
            InputError: the model lacks a name, or a value is not finite.
        """


@runtime_checkable
class Stored(Weights, Protocol):
    """A model that is stored in files."""

    @property
    def files(self) -> Sequence[Path]:
        """Return the files that the tensors depend on."""

    @property
    def leftovers(self) -> Mapping[str, Path]:
        """Return stored names without a canonical name, and their files."""

    def repeats(self, stored: str, name: str) -> bool:
        """Say whether a tensor that was left out equals the tensor `name` in every value."""


class WrappedWeights:
    """A model that wraps another one and equals it, except for the tensors that a subclass overrides."""

    under: Weights

    @property
    def info(self) -> Mapping[str, TensorInfo]:
        return self.under.info

    @property
    def files(self) -> Sequence[Path]:
        """Return the files of the model below; none if it is not stored."""
        files: Sequence[Path] = getattr(self.under, "files", ())
        return files

    @property
    def changes(self) -> Mapping[str, object]:
        """Return the tensors that the model below changes in its base, if it is an adapter; else every tensor."""
        changes: Mapping[str, object] = getattr(self.under, "changes", self.info)
        return changes

    @property
    def ignored_modules(self) -> Sequence[str]:
        """Return the modules whose updates the model below leaves out if it is an adapter, else none."""
        ignored_modules: Sequence[str] = getattr(self.under, "ignored_modules", ())
        return ignored_modules

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        return self.under.read(names)

    def factors(self, names: Iterable[str]) -> dict[str, tuple[Tensor, Tensor]]:
        """Return B and A of the tensors to which the model below adds a product B A of low rank."""
        return factors_of(self.under, names)


@dataclass(frozen=True)
class FirstRows(WrappedWeights):
    """A model whose vocabulary is larger than its suite's, cut to it: of the tensors in `rows`, only the first rows."""

    under: Stored
    rows: Mapping[str, int]

    @property
    def label(self) -> str:
        return self.under.label

    @property
    def info(self) -> Mapping[str, TensorInfo]:
        found = dict(self.under.info)
        for name, rows in self.rows.items():
            found[name] = TensorInfo((rows, *found[name].shape[1:]), found[name].dtype)
        return found

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        return {name: t[: self.rows[name]] if name in self.rows else t for name, t in self.under.read(names).items()}


@dataclass(frozen=True)
class UnknownBase:
    """Placeholder for an unknown base: it has the shapes of another model of the suite, and no values."""

    like: Weights

    @property
    def label(self) -> str:
        return "base"

    @property
    def info(self) -> Mapping[str, TensorInfo]:
        return self.like.info

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Refuse to read anything."""
        raise InputError(
            "the base is not known, and this needs it: name it in the suite file ('base: REFERENCE'), or with --base "
            "where a merged folder is diagnosed"
        )


@dataclass(frozen=True)
class InMemory:
    """A model whose tensors are all in memory."""

    label: str
    tensors: Mapping[str, Tensor]

    @property
    def info(self) -> Mapping[str, TensorInfo]:
        return {name: TensorInfo(tuple(t.shape), t.dtype) for name, t in self.tensors.items()}

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        return {name: require(self.tensors, name, self.label) for name in names}


@dataclass(frozen=True)
class Overlay(WrappedWeights):
    """A model with some tensors replaced by others of the same shape and dtype, such as a
    calibrated model, or one kept in memory.
    """

    label: str
    under: Weights
    replaced: Mapping[str, Tensor]

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        wanted = list(names)
        below = self.under.read(name for name in wanted if name not in self.replaced)
        return {name: self.replaced[name] if name in self.replaced else below[name] for name in wanted}


@dataclass(frozen=True)
class Metered(WrappedWeights):
    """A model that counts how many bytes of it are read."""

    under: Weights
    read_bytes: dict[str, int]
    """Bytes by label; several models may share it."""

    @property
    def label(self) -> str:
        return self.under.label

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        tensors = self.under.read(names)
        size = sum(tensor.nbytes for tensor in tensors.values())
        self.read_bytes[self.label] = self.read_bytes.get(self.label, 0) + size
        return tensors


class OnDemand(Mapping[str, Tensor]):
    """Some tensors of a model by name, each read when it is looked up."""

    def __init__(self, weights: Weights, names: Iterable[str]) -> None:
        self._weights, self._names = weights, dict.fromkeys(names)

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        return self._weights.read([name])[name]

    def __contains__(self, name: object) -> bool:  # the one of Mapping would read the tensor
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def name_shared(names: Iterable[str], canonical: Canonical, aliases: Mapping[str, str]) -> Canonical:
    """Return `canonical`, adapted to a file that stores a shared tensor only under another of its names, as converters
    do with T5's embedding: that name then means the tensor.

    Args:
        names: stored names of all tensors of the model.
        aliases: other names of tensors that several modules share → those tensors.
    """
    stored = list(names)
    there = {canonical(name) for name in stored}
    # Of several such names the first in the file counts; the others are compared with it, as repeated tensors are.
    taken = {aliases[name]: name for name in reversed(stored) if aliases.get(name) not in {None, *there}}
    shared = {name: tensor for tensor, name in taken.items()}
    return lambda name: shared.get(name) or canonical(name)


def dtype_of(code: str, what: str) -> torch.dtype:
    """Return the dtype of a safetensors code; raise InputError with `what` in front if featcal does not read it."""
    if code not in _DTYPES:
        raise InputError(f"{what} has dtype {code}, which featcal does not read")
    return _DTYPES[code]


def knows_dtype(dtype: torch.dtype) -> bool:
    """Say whether safetensors files can hold a dtype and featcal reads it."""
    return dtype in _DTYPES.values()


def code_of(dtype: torch.dtype) -> str:
    """Return the safetensors code of a dtype that featcal reads."""
    return next(code for code, known in _DTYPES.items() if known is dtype)


def factors_of(weights: Weights, names: Iterable[str]) -> dict[str, tuple[Tensor, Tensor]]:
    """Return B and A of the tensors to which a model adds a product B A of low rank,
    `[outputs, inputs]`; none if the model is not an adapter.
    """
    find = getattr(weights, "factors", None)
    return {} if find is None else dict(find(names))


def is_in_memory(weights: Weights, names: Iterable[str]) -> bool:
    """Say whether all these tensors are already in memory, so that reading them is only a look-up."""
    if isinstance(weights, Overlay) and isinstance(weights.replaced, dict):
        below = [name for name in names if name not in weights.replaced]
        return not below or is_in_memory(weights.under, below)
    return isinstance(weights, InMemory)


def require(tensors: Mapping[str, Tensor], name: str, label: str) -> Tensor:
    """Return `tensors[name]`, or raise an InputError that says which model lacks it."""
    if name not in tensors:
        raise InputError(f"{label}: tensor '{name}' is missing")
    return tensors[name]


def group_by_size(sizes: Mapping[str, int], most: int) -> Iterator[list[str]]:
    """Yield names in order, in groups whose sizes sum to at most `most`; a larger one forms its own group."""
    group: list[str] = []
    filled = 0
    for name, size in sizes.items():
        if group and filled + size > most:
            yield group
            group, filled = [], 0
        group.append(name)
        filled += size
    if group:
        yield group


def raw_bytes(tensor: Tensor) -> memoryview:
    """Return the values of a tensor as bytes in memory order, row by row."""
    # numpy has no bfloat16 and no float8, so the bytes are taken as uint8.
    data: memoryview = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    return data


def all_finite(tensor: Tensor) -> bool:
    """Say whether all values are finite (neither NaN nor infinite)."""
    if not tensor.is_floating_point():
        return True
    # A sum is finite only if all its terms are, and costs a tenth of testing each; one that overflows proves nothing,
    # and float32 at least keeps half-precision sums from overflowing.
    total = tensor.sum(dtype=torch.promote_types(tensor.dtype, torch.float32))
    return bool(torch.isfinite(total)) or bool(torch.isfinite(tensor).all())


ANOTHER_FILE = "get the file anew, or train or save the model again"
"""Advice for a file with values that are not finite."""


def check_finite(tensor: Tensor, what: str, remedy: str) -> None:
    """Raise InputError with `what` and `remedy` if a value is NaN or infinite."""
    if not all_finite(tensor):
        bad = int((~torch.isfinite(tensor)).sum())
        raise InputError(f"{what}: {bad} of {tensor.numel()} values are NaN or infinite; {remedy}")

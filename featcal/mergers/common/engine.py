"""Present a merge recipe as a model: a tensor is merged when it is read, from one expert after the other."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from math import prod
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file
from torch import Tensor

from featcal.formats.output import save_tensors
from featcal.formats.weights import TensorInfo, Weights, check_finite, group_by_size
from featcal.mergers.common.merger import MatrixMerger, Merger, Tensors, Whole
from featcal.suite.recipe import MergeRecipe
from featcal.system.errors import NumericalError

VALUES_AT_ONCE = 2**21
"""Number of values that are merged together: each expert's files are opened once for that many, and float64 copies stay
small.

A larger tensor is merged by itself (`ENTRIES_AT_ONCE`). For eight B/32 experts that is at most 0.2 to 0.4 GB (a block
of each model and the base takes 0.25 GB in float32).
"""
ENTRIES_AT_ONCE = 2**23
"""Number of entries of a large tensor that are merged together, if the method takes every entry by itself: a table of
150,000 tokens would need gigabytes in float64."""

_CPU = torch.device("cpu")
_LINALG: Any = torch.linalg
_SMALLER = "merge with a smaller scale, or store the merged model with more range (`dtype: bfloat16` or `float32`)"


class Computed:
    """Files of single tensors that take long to compute, in a temporary folder that is deleted with the object."""

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
            InputError: the disk is full or not writable.
        """
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix=".featcal-merged-"))
            weakref.finalize(self, shutil.rmtree, self._folder, True)
        for name, tensor in tensors.items():
            file = self._folder / f"{next(self._numbers)}.safetensors"
            save_tensors({name: tensor}, file)
            self._files[name] = file


@dataclass(frozen=True)
class RecipeWeights:
    """The merged model of a recipe, computed in float64 and given in the base's dtype, or in the recipe's.

    Memory holds some tensors of the base, of the sums and of one or two experts, whatever the number of experts.
    Methods that decompose whole matrices (`MatrixMerger`) load a matrix of all experts at once, in float64, and average
    all other tensors; each result is computed when it is first read, and then kept in a file.
    """

    recipe: MergeRecipe
    base: Weights
    experts: Mapping[str, Weights]
    """Experts by task, in the order in which they are summed."""
    whole: Sequence[str]
    """Names of the tensors that make up a task vector and are merged: the tower. All other tensors are the base's."""
    tables: Sequence[str] = ()
    """Names of matrices that are not linear maps, but have a row per token of the vocabulary."""
    transposed: Collection[str] = ()
    """Names of linear maps that are stored `[inputs, outputs]`; a `MatrixMerger` gets them turned to `[m, d]`."""
    device: torch.device = _CPU
    """Device on which tensors are merged; they are read on the CPU and returned there."""
    _computed: Computed = field(default_factory=Computed, repr=False, compare=False)

    @property
    def label(self) -> str:
        scale = self.recipe.settings.get("scale")
        return f"merged model ({self.recipe.method}{'' if scale is None else f' {scale:g}'})"

    @cached_property
    def merger(self) -> Merger:
        """Return the method with all its options."""
        return cast(Merger, self.recipe.options())

    @property
    def info(self) -> Mapping[str, TensorInfo]:
        return {name: TensorInfo(info.shape, self._dtype(info.dtype)) for name, info in self.base.info.items()}

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        asked, own = list(names), set(self.whole)
        read = self.base.read(name for name in asked if name not in own)
        outside = {name: tensor.to(self._dtype(tensor.dtype)) for name, tensor in read.items()}
        merging = [name for name in asked if name in own]
        sizes = {name: prod(self.base.info[name].shape) if name in self.base.info else 0 for name in merging}
        whole = {name: size for name, size in sizes.items() if self._is_whole(name)}
        # Decompositions take long and a model is read several times, so matrices are computed once.
        missing = {name: size for name, size in whole.items() if name not in self._computed}
        for group in group_by_size(missing, VALUES_AT_ONCE // len(self.experts)):
            self._computed.put(self._merge_matrices(group))
        merged = {name: self._computed[name] for name in whole}
        for group in group_by_size({name: size for name, size in sizes.items() if name not in whole}, VALUES_AT_ONCE):
            if self.merger.entrywise and sizes[group[0]] > ENTRIES_AT_ONCE:  # a group of its own
                merged[group[0]] = self._merge_in_pieces(group[0])
            else:
                merged |= self._read_together(group)
        return {name: outside[name] if name in outside else merged[name] for name in asked}

    def _is_whole(self, name: str) -> bool:
        """Say whether the method merges this tensor as a whole matrix."""
        own = self.base.info.get(name)
        return (
            isinstance(self.merger, MatrixMerger)
            and own is not None
            and len(own.shape) == 2
            and name not in self.tables
        )

    def _merge_matrices(self, names: Sequence[str]) -> dict[str, Tensor]:
        base = self.base.read(names)
        changes: dict[str, list[Tensor]] = {name: [] for name in names}
        for expert in self.experts.values():
            read = expert.read(names)
            for name in names:
                changes[name].append(self._place(read[name]) - self._place(base[name]))
        merged: dict[str, Tensor] = {}
        for name in names:
            turn = name in self.transposed
            # Every paper writes W `[m, d]`; Conv1D stores `[d, m]`, and the merge is not the same transposed.
            change = self._merge_matrix([c.mT if turn else c for c in changes.pop(name)], name)
            merged[name] = self._cast(self._place(base[name]) + (change.mT if turn else change), name, base[name].dtype)
        return merged

    def _merge_matrix(self, changes: Sequence[Tensor], name: str) -> Tensor:
        """Return the merged task matrix of a tensor.

        Raises:
            NumericalError: a decomposition does not converge.
        """
        try:
            return cast(MatrixMerger, self.merger).merge_matrix(changes)
        except _LINALG.LinAlgError as error:
            raise NumericalError(f"{self.merger.kind}: no decomposition of tensor '{name}' ({error})") from error

    def _read_together(self, names: Sequence[str]) -> dict[str, Tensor]:
        base = self.base.read(names)
        parts = {name: base[name].numel() for name in names}
        experts = (self._concat(expert.read(names), names) for expert in self.experts.values())
        given = Tensors(self._concat(base, names), experts, [*self.experts], parts, self._preparation)
        return {
            name: self._cast(part.view(base[name].shape), name, base[name].dtype)
            for name, part in zip(names, given.split(self.merger.merge(given)), strict=True)
        }

    def _merge_in_pieces(self, name: str) -> Tensor:
        """Return a merged tensor, some entries after the others; the experts' own are mapped meanwhile, not copied."""
        base, *experts = (model.read([name])[name].flatten() for model in (self.base, *self.experts.values()))
        info = self.base.info[name]
        merged = torch.empty(len(base), dtype=self._dtype(info.dtype))
        for start in range(0, len(base), ENTRIES_AT_ONCE):
            piece = slice(start, start + ENTRIES_AT_ONCE)
            vectors = (self._place(one[piece], copy=True) for one in experts)
            own = self._place(base[piece], copy=True)
            given = Tensors(own, vectors, [*self.experts], {name: len(own)}, self._preparation)
            merged[piece] = self.merger.merge(given)
        self._check(merged, name)
        return merged.view(info.shape)

    def _cast(self, merged: Tensor, name: str, of_base: torch.dtype) -> Tensor:
        """Return a copy of a merged tensor in the dtype of the model."""
        dtype = self._dtype(of_base)
        # A part of a larger vector would keep all of it alive.
        stored = merged.to("cpu", dtype, copy=True)
        self._check(stored, name)
        return stored

    def _check(self, merged: Tensor, name: str) -> None:
        check_finite(merged, f"{self.label}: tensor '{name}' in {merged.dtype}", _SMALLER)

    @cached_property
    def _preparation(self) -> Any:
        """Return the result of the merger's `prepare` on whole task vectors, computed once."""
        entries = sum(prod(self.base.info[name].shape) for name in self.whole)
        return self.merger.prepare(Whole([*self.experts], entries, self._task_vector))

    def _task_vector(self, task: str) -> Iterator[tuple[Tensor, Mapping[str, int]]]:
        """Yield the task vector of an expert, some tensors at a time, with their sizes."""
        sizes = {name: prod(self.base.info[name].shape) for name in self.whole}
        for group in group_by_size(sizes, VALUES_AT_ONCE):
            vector = self._concat(self.experts[task].read(group), group) - self._concat(self.base.read(group), group)
            yield vector, {name: sizes[name] for name in group}

    def _dtype(self, stored: torch.dtype) -> torch.dtype:
        if self.recipe.dtype is None or not stored.is_floating_point:
            return stored
        wanted: torch.dtype = getattr(torch, self.recipe.dtype)
        return wanted

    def _concat(self, tensors: Mapping[str, Tensor], names: Sequence[str]) -> Tensor:
        """Return a copy of the named tensors, flattened and concatenated."""
        if len(names) == 1:  # most linear maps: to convert them is the copy
            return self._place(tensors[names[0]], copy=True).flatten()
        return torch.cat([self._place(tensors[name]).flatten() for name in names])

    def _place(self, tensor: Tensor, copy: bool = False) -> Tensor:
        # In half precision a task vector would be a difference of nearly equal numbers.
        return tensor.to(self.device, torch.float64, copy=copy)

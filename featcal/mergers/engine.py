"""A merge recipe as a model: tensors are merged when they are read, from one expert after the other."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import count
from math import prod
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from featcal.formats.output import save_tensors
from featcal.formats.weights import TensorInfo, Weights, check_finite, group_by_size
from featcal.mergers import (
    breadcrumbs,
    dare,
    linear,
    model_stock,
    simple_averaging,
    spectral,
    task_arithmetic,
    ties,
    ties_per_tensor,
)
from featcal.suite.recipe import MergeRecipe

VALUES_AT_ONCE = 2**21
"""Values that are merged together: an expert's files are opened once for so many, and float64 copies stay small.

A larger tensor is merged by itself. Of eight B/32 experts that is 0.2 to 0.4 GB at most (a block of each model and the
base takes 0.25 GB in float32)."""

_SMALLER = "merge with a smaller scale, or store the merged model with more range (`dtype: bfloat16` or `float32`)"


class Computed:
    """Files of single tensors that take long to compute, in a temporary folder that is gone with the object."""

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


@dataclass(frozen=True)
class RecipeWeights:
    """The merged model of a recipe, computed in float64 and given in the base's dtype, or in the recipe's.

    Memory holds some tensors of the base, of the sums and of one or two experts, whatever the number of experts.
    Methods that take a matrix as a whole (`spectral`) need it of all experts at once, in float64, and average what is
    no matrix; what they give is computed once, when it is read for the first time, and kept in files, since
    decompositions take long and a model is read several times.
    """

    recipe: MergeRecipe
    base: Weights
    experts: Mapping[str, Weights]
    """Experts by task, in the order in which they are summed."""
    whole: Sequence[str]
    """The tensors that a task vector consists of, for methods that look at all of it: the tower that is merged."""
    tables: Sequence[str] = ()
    """Matrices that are no linear maps, with a row per token of the vocabulary."""
    transposed: Collection[str] = ()
    """Linear maps that are stored `[inputs, outputs]`; methods that take a matrix as a whole are given `[m, d]`."""
    _computed: Computed = field(default_factory=Computed, repr=False, compare=False)

    @property
    def label(self) -> str:
        scale = "" if self.recipe.scale is None else f" {self.recipe.scale:g}"
        return f"merged model ({self.recipe.method}{scale})"

    @property
    def info(self) -> Mapping[str, TensorInfo]:
        return {name: TensorInfo(info.shape, self._dtype(info.dtype)) for name, info in self.base.info.items()}

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        sizes = {name: prod(self.base.info[name].shape) if name in self.base.info else 0 for name in names}
        whole = {name: size for name, size in sizes.items() if self._is_whole(name)}
        missing = {name: size for name, size in whole.items() if name not in self._computed}
        for group in group_by_size(missing, VALUES_AT_ONCE // len(self.experts)):
            self._computed.put(self._merge_matrices(group))
        merged = {name: self._computed[name] for name in whole}
        for group in group_by_size({name: size for name, size in sizes.items() if name not in whole}, VALUES_AT_ONCE):
            merged |= self._read_together(group)
        return {name: merged[name] for name in sizes}

    def _is_whole(self, name: str) -> bool:
        """Whether the method takes this tensor as a matrix."""
        own = self.base.info.get(name)
        return (
            self.recipe.method in spectral.MERGERS
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
                changes[name].append(read[name].double() - base[name].double())
        merged: dict[str, Tensor] = {}
        for name in names:
            turn = name in self.transposed
            change = spectral.merge(self.recipe, [c.mT if turn else c for c in changes.pop(name)], name)
            merged[name] = self._cast(base[name].double() + (change.mT if turn else change), name, base[name].dtype)
        return merged

    def _read_together(self, names: Sequence[str]) -> dict[str, Tensor]:
        base = self.base.read(names)
        sizes = [base[name].numel() for name in names]
        experts = (_concat(expert.read(names), names) for expert in self.experts.values())
        parts = torch.split(self._merge(_concat(base, names), experts, dict(zip(names, sizes, strict=True))), sizes)
        return {
            name: self._cast(part.view(base[name].shape), name, base[name].dtype)
            for name, part in zip(names, parts, strict=True)
        }

    def _cast(self, merged: Tensor, name: str, of_base: torch.dtype) -> Tensor:
        """A copy of a merged tensor in the dtype that the model has."""
        dtype = self._dtype(of_base)
        stored = merged.to(dtype, copy=True)
        check_finite(stored, f"{self.label}: tensor '{name}' in {dtype}", _SMALLER)
        return stored

    def _merge(self, base: Tensor, experts: Iterable[Tensor], parts: Mapping[str, int]) -> Tensor:
        """One merged vector out of one per model; `parts` are the tensors joined in it, with their sizes."""
        recipe, sizes = self.recipe, list(parts.values())
        weights = self._option_per_expert(recipe.weights)
        match recipe.method:
            case "simple-averaging":
                return simple_averaging.merge(base, experts)
            case "linear":
                return linear.merge(base, experts, weights, recipe.normalize is not False)
            case "task-arithmetic":
                return task_arithmetic.merge(base, experts, recipe.scale, weights, recipe.normalize is True)
            case "ties":
                return ties.merge(base, (expert - base for expert in experts), self._thresholds, recipe.scale)
            case "ties-per-tensor":
                kept, divides = self._option_per_expert(recipe.density), recipe.normalize is not False
                return ties_per_tensor.merge(base, experts, recipe.scale, weights, kept, divides, sizes)
            case "dare":
                return dare.merge(base, self._thin_vectors(base, experts, parts), recipe.scale)
            case "dare-ties":
                return ties.merge(base, self._thin_vectors(base, experts, parts), self._thresholds, recipe.scale)
            case "breadcrumbs":
                return breadcrumbs.merge(base, experts, recipe.scale, recipe.beta, recipe.gamma, sizes)
            case "model-stock":
                return model_stock.merge(base, experts, sizes)
        return task_arithmetic.merge(base, experts, spectral.scale(recipe) / len(self.experts))  # no matrix

    def _thin_vectors(self, base: Tensor, experts: Iterable[Tensor], parts: Mapping[str, int]) -> Iterator[Tensor]:
        """Task vectors as DARE leaves them."""
        for task, expert in zip(self.experts, experts, strict=True):
            yield self._thin(expert - base, task, parts)

    def _thin(self, vector: Tensor, task: str, parts: Mapping[str, int]) -> Tensor:
        streams = [dare.stream(self.recipe.seed, task, name) for name in parts]
        return dare.thin(vector, self.recipe.drop, streams, list(parts.values()))

    @cached_property
    def _thresholds(self) -> list[float]:
        """The smallest magnitude that TIES keeps of every expert's whole task vector.

        Found once, where a tensor is read for the first time, in three passes over every expert and the base.
        """
        sizes = {name: prod(self.base.info[name].shape) for name in self.whole}
        densities = self._option_per_expert(self.recipe.density) or [ties.DEFAULT_DENSITY] * len(self.experts)
        return [
            ties.largest(partial(self._task_vector, task, sizes), ties.kept_count(sum(sizes.values()), density))
            for task, density in zip(self.experts, densities, strict=True)
        ]

    def _task_vector(self, task: str, sizes: Mapping[str, int]) -> Iterator[Tensor]:
        """tau = theta_i - theta_0 of tensors with these sizes, some of them at a time, as TIES is given it."""
        for group in group_by_size(sizes, VALUES_AT_ONCE):
            vector = _concat(self.experts[task].read(group), group) - _concat(self.base.read(group), group)
            thinned = self.recipe.method == "dare-ties"
            yield self._thin(vector, task, {name: sizes[name] for name in group}) if thinned else vector

    def _option_per_expert(self, option: float | Mapping[str, float] | None) -> list[float] | None:
        if option is None:
            return None
        return [option[task] if isinstance(option, Mapping) else option for task in self.experts]

    def _dtype(self, stored: torch.dtype) -> torch.dtype:
        wanted: torch.dtype = stored if self.recipe.dtype is None else getattr(torch, self.recipe.dtype)
        return wanted


def _concat(tensors: Mapping[str, Tensor], names: Sequence[str]) -> Tensor:
    """The named tensors one after the other, in float64."""
    return torch.cat([tensors[name].flatten().double() for name in names])

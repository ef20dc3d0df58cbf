"""A merge recipe as a model: tensors are merged when they are read, from one expert after the other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import prod

import torch
from torch import Tensor

from featcal.formats.weights import TensorInfo, Weights, check_finite, in_groups
from featcal.mergers import linear, selection, simple_averaging, task_arithmetic, ties, ties_per_tensor
from featcal.schema.recipe import MergeRecipe

VALUES_AT_ONCE = 2**24
"""Values that are merged together: an expert's files are opened once for so many, and float64 copies stay small."""


@dataclass(frozen=True)
class RecipeWeights:
    """The merged model of a recipe, computed in float64 and given in the base's dtype, or in the recipe's.

    Memory holds some tensors of the base, of the sums and of one or two experts, whatever the number of experts.
    """

    recipe: MergeRecipe
    base: Weights
    experts: Mapping[str, Weights]
    """Experts by task, in the order in which they are summed."""
    whole: Sequence[str]
    """The tensors that a task vector consists of, for methods that look at all of it: the tower that is merged."""

    @property
    def label(self) -> str:
        scale = "" if self.recipe.scale is None else f" {self.recipe.scale:g}"
        return f"merged model ({self.recipe.method}{scale})"

    @property
    def info(self) -> Mapping[str, TensorInfo]:
        return {name: TensorInfo(info.shape, self._dtype(info.dtype)) for name, info in self.base.info.items()}

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        merged: dict[str, Tensor] = {}
        sizes = {name: prod(self.base.info[name].shape) if name in self.base.info else 0 for name in names}
        for group in in_groups(sizes, VALUES_AT_ONCE):
            merged |= self._read_together(group)
        return merged

    def _read_together(self, names: Sequence[str]) -> dict[str, Tensor]:
        base = self.base.read(names)
        sizes = [base[name].numel() for name in names]
        experts = (_joined(expert.read(names), names) for expert in self.experts.values())
        parts = torch.split(self._merge(_joined(base, names), experts, sizes), sizes)
        merged: dict[str, Tensor] = {}
        for name, part in zip(names, parts, strict=True):
            dtype = self._dtype(base[name].dtype)
            merged[name] = part.view(base[name].shape).to(dtype, copy=True)
            check_finite(merged[name], f"{self.label}: tensor '{name}' in {dtype}")
        return merged

    def _merge(self, base: Tensor, experts: Iterable[Tensor], sizes: Sequence[int]) -> Tensor:
        """One merged vector out of one per model; `sizes` are those of the tensors joined in it."""
        recipe = self.recipe
        weights = self._by_expert(recipe.weights)
        if recipe.method == "simple-averaging":
            return simple_averaging.merge(base, experts)
        if recipe.method == "linear":
            return linear.merge(base, experts, weights, recipe.normalize is not False)
        if recipe.method == "task-arithmetic":
            return task_arithmetic.merge(base, experts, recipe.scale, weights, recipe.normalize is True)
        if recipe.method == "ties":
            return ties.merge(base, experts, self._thresholds, recipe.scale)
        densities = self._by_expert(recipe.density)
        return ties_per_tensor.merge(
            base, experts, recipe.scale, weights, densities, recipe.normalize is not False, sizes
        )

    @cached_property
    def _thresholds(self) -> list[float]:
        """The smallest magnitude that TIES keeps of every expert's whole task vector.

        Found once, where a tensor is read for the first time, in three passes over every expert and the base.
        """
        sizes = {name: prod(self.base.info[name].shape) for name in self.whole}
        densities = self._by_expert(self.recipe.density) or [ties.DEFAULT_DENSITY] * len(self.experts)
        return [
            selection.largest(partial(self._task_vector, expert, sizes), ties.kept(sum(sizes.values()), density))
            for expert, density in zip(self.experts.values(), densities, strict=True)
        ]

    def _task_vector(self, expert: Weights, sizes: Mapping[str, int]) -> Iterator[Tensor]:
        """tau = theta_i - theta_0 of tensors with these sizes, some of them at a time."""
        for group in in_groups(sizes, VALUES_AT_ONCE):
            yield _joined(expert.read(group), group) - _joined(self.base.read(group), group)

    def _by_expert(self, option: float | Mapping[str, float] | None) -> list[float] | None:
        if option is None:
            return None
        return [option[task] if isinstance(option, Mapping) else option for task in self.experts]

    def _dtype(self, stored: torch.dtype) -> torch.dtype:
        wanted: torch.dtype = stored if self.recipe.dtype is None else getattr(torch, self.recipe.dtype)
        return wanted


def _joined(tensors: Mapping[str, Tensor], names: Sequence[str]) -> Tensor:
    """The named tensors one after the other, in float64."""
    return torch.cat([tensors[name].flatten().double() for name in names])

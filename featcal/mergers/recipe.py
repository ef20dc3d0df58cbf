"""A merge recipe as a model: every tensor is merged when it is read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from featcal.mergers import simple_averaging, task_arithmetic
from featcal.models.weights import TensorInfo, Weights, check_finite
from featcal.suite import MergeRecipe

Merger = Callable[[Tensor, Sequence[Tensor], float | None], Tensor]

MERGERS: Mapping[str, Merger] = {
    "simple-averaging": simple_averaging.merge,
    "task-arithmetic": task_arithmetic.merge,
}


@dataclass(frozen=True)
class RecipeWeights:
    """The merged model of a recipe, computed tensor by tensor in float64 and given in the base's dtype."""

    recipe: MergeRecipe
    base: Weights
    experts: Sequence[Weights]

    @property
    def label(self) -> str:
        scale = "" if self.recipe.scale is None else f" {self.recipe.scale:g}"
        return f"merged model ({self.recipe.method}{scale})"

    @property
    def info(self) -> Mapping[str, TensorInfo]:
        return self.base.info

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        merge = MERGERS[self.recipe.method]
        merged: dict[str, Tensor] = {}
        for name in names:
            base = self.base.read([name])[name]
            own = [expert.read([name])[name].double() for expert in self.experts]
            merged[name] = merge(base.double(), own, self.recipe.scale).to(base.dtype)
            check_finite(merged[name], f"{self.label}: tensor '{name}' in {base.dtype}")
        return merged

"""Average the experts, or their changes, for tensors that a method does not define."""

from __future__ import annotations

from collections.abc import Mapping

from featcal.mergers.common.engine import RecipeWeights
from featcal.models.context import Run
from featcal.models.lane import ExpertPass
from featcal.suite.recipe import MergeRecipe


def average_experts(run: Run, experts: Mapping[str, ExpertPass]) -> RecipeWeights:
    """Return the mean of the experts, in the base's dtype."""
    models = {task: one.weights for task, one in experts.items()}
    recipe = MergeRecipe(method="simple-averaging")
    return RecipeWeights(recipe, run.base, models, run.adapter.tower, run.adapter.vocabulary)


def average_changes(run: Run, experts: Mapping[str, ExpertPass], scale: float) -> RecipeWeights:
    """Return the base plus `scale` times the mean of the experts' changes."""
    models = {task: one.weights for task, one in experts.items()}
    # Task Arithmetic sums; the mean of T tasks is the sum at scale / T.
    recipe = MergeRecipe.model_validate({"method": "task-arithmetic", "scale": scale / len(experts)})
    return RecipeWeights(recipe, run.base, models, run.adapter.tower, run.adapter.vocabulary)

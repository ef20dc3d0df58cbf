"""Fit surgery in closed form: an affine map per task after the final features, by one ridge regression.

After ReACT (arXiv 2511.10943), which corrects the final representation of a merged model linearly and in closed form.
The formula here is a reconstruction from its abstract, and the pull to the identity is ours. With X the merged model's
and Y the expert's final features of the n unlabelled samples of a task, both less their means mu_X and mu_Y,

    M = (X^T X / n + l I)^-1 (X^T Y / n + l I),    l = `ridge` times the mean of the diagonal of X^T X / n,
    f' = (f - mu_X) M + mu_Y

minimises ||X M - Y||^2 / n + l ||M - I||^2: where the samples say nothing, features stay as they are. A large ridge
leaves the shift from mu_X to mu_Y.

The map is affine, as the first map of most heads is: `folded` multiplies it into those. A head whose first map has no
bias, as the classifiers of decoders, has no place for the shift: there no means are taken away before the solve, at the
same l. Which task a sample is of must be known when the model is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from featcal.baselines.common.baseline import FitInputs, Made, Sampled
from featcal.baselines.surgery import with_modules
from featcal.formats.weights import Weights, all_finite
from featcal.models.context import Run
from featcal.models.lane import ExpertPass
from featcal.models.model import FeatureMap, Model
from featcal.suite.methods import MODULES, PROPOSED, SAMPLES, TASK, register_method
from featcal.suite.options import option
from featcal.system.errors import InputError, NumericalError


@dataclass(frozen=True)
class AffineMap:
    """weight f + bias, a map of final features."""

    weight: Float[Tensor, "k k"]
    """Weight of the affine map, M^T."""
    bias: Float[Tensor, " k"] | None

    def __call__(self, features: Float[Tensor, "n k"]) -> Float[Tensor, "n k"]:
        bias = None if self.bias is None else self.bias.to(features)
        return torch.nn.functional.linear(features, self.weight.to(features), bias)


@register_method(
    "react",
    "Surgery in closed form: an affine map per task after the final features, by ridge regression to the expert's "
    "(after ReACT); written into the tasks' heads",
    paper="2511.10943",
    needs=(
        SAMPLES,
        MODULES,
        TASK,
    ),
    compared=tuple(f"react@{one}" for one in ("merged", *PROPOSED)),
)
@dataclass(frozen=True)
class React(Sampled):
    ridge: float = option(
        0.1, "strength of the pull to the identity, relative to the mean variance of the features", above=0
    )
    on_another: ClassVar[bool] = True

    def make(self, given: FitInputs) -> Made:
        return react(given.run, given.experts, given.family.merged, self)


def react(
    run: Run, experts: Mapping[str, ExpertPass], model: Weights, options: React
) -> tuple[Model, dict[str, float]]:
    """Fit an affine map for every task; return the model with them, and the mean absolute difference to the experts
    before and after.

    Args:
        experts: one expert pass per task, with `kept`; their batches are the samples.

    Raises:
        InputError: a model with maps or heads of its own or whose answers are text, or an expert whose features have
            another width.
        NumericalError: features that are not finite.
    """

    def fit(task: str, own: Tensor, wanted: Tensor) -> AffineMap:
        if own.shape != wanted.shape:
            raise InputError(
                f"task '{task}': the model has {own.shape[1]} final features, the expert {wanted.shape[1]}"
            )
        if not (all_finite(own) and all_finite(wanted)):
            raise NumericalError(f"task '{task}': final features are not finite")
        return regression(own, wanted, options.ridge, _takes_shift(run, experts[task].weights))

    def fit_all(own: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> dict[str, FeatureMap]:
        return {task: fit(task, own[task], wanted[task]) for task in own}

    return with_modules(run, experts, model, options.kind, fit_all)


def _takes_shift(run: Run, expert: Weights) -> bool:
    """Say whether the head in the files of a task's expert has a bias that can take up a shift of features."""
    first = run.adapter.classifier[:1]
    return not first or f"{first[0]}.weight" not in expert.info or f"{first[0]}.bias" in expert.info


def regression(own: Float[Tensor, "n k"], wanted: Float[Tensor, "n k"], ridge: float, shifts: bool = True) -> AffineMap:
    """Fit the affine map from a model's features to an expert's, regularised towards the identity; in float64.

    Args:
        ridge: > 0.
        shifts: False for a map without a bias.
    """
    x, y = own.double(), wanted.double()
    mean, aim = x.mean(0), y.mean(0)
    # l by the variance, also without a shift: the pull is the same in both cases.
    pull = ridge * (x - mean).square().mean()
    if shifts:
        x, y = x - mean, y - aim
    one = torch.eye(x.shape[1], dtype=x.dtype, device=x.device)
    turn = one
    if pull > 0:  # of a single sample, or features that are all the same, nothing but the shift can be told
        left, right = x.mT @ x / len(x) + pull * one, x.mT @ y / len(x) + pull * one
        # The pull makes the left matrix positive definite, so Cholesky serves.
        turn = torch.cholesky_solve(right, torch.linalg.cholesky(left))
    return AffineMap(turn.mT.contiguous(), aim - mean @ turn if shifts else None)

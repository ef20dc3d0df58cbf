"""Fit Representation Surgery (arXiv 2402.02705) or `probsurgery`: a small module per task after the final features.

A module gives f' = f - U relu(D f), with D `[rank, k]` and U `[k, rank]`, and is trained to the features of the task's
expert on unlabelled samples, by the mean absolute difference; weights of models stay. In ProbSurgery the subtracted
part is drawn from N(U relu(D f), exp(V relu(D f))) while the module is trained, with the KL divergence to N(0, I) times
`kl` in the loss, and is its mean afterwards.

Features are not normalised, as in the methods' own code. That code trains on test samples; here it is calibration
samples. The task of a sample must be known when the model is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from featcal.baselines.common.baseline import FitInputs, Made, Sampled
from featcal.formats.weights import Weights, all_finite
from featcal.models.context import Run
from featcal.models.features import expert_features
from featcal.models.lane import ExpertPass
from featcal.models.model import FeatureMap, Model, tasks_with_own_modules
from featcal.suite.methods import MODULES, PROPOSED, SAMPLES, TASK, TRAINING, register_method
from featcal.suite.options import option
from featcal.system.errors import InputError, NumericalError
from featcal.system.formatting import some


@dataclass(frozen=True)
class LowRank:
    """f - U relu(D f), a map of final features."""

    down: Float[Tensor, "r k"]
    up: Float[Tensor, "k r"]

    def __call__(self, features: Float[Tensor, "n k"]) -> Float[Tensor, "n k"]:
        inner = torch.relu(features @ self.down.to(features).mT)
        return features - inner @ self.up.to(features).mT


@register_method(
    "surgery",
    "Representation Surgery: a low-rank module per task after the final features; for classification only, and no "
    "checkpoint can hold them",
    paper="2402.02705",
    needs=(
        SAMPLES,
        TRAINING,
        MODULES,
        TASK,
    ),
    compared=tuple(f"surgery@{one}" for one in ("merged", *PROPOSED)),
)
@dataclass(frozen=True)
class Surgery(Sampled):
    rank: int = option(16, "rank of every module", least=1)
    steps: int = option(1000, "steps of Adam for every task", least=0)
    rate: float = option(1e-3, "step size of Adam", above=0)
    batch: int = option(16, "samples in a step", least=1)
    on_another: ClassVar[bool] = True

    def make(self, given: FitInputs) -> Made:
        return surgery(given.run, given.experts, given.family.merged, self)

    @property
    def noise(self) -> float | None:
        """Return the weight of the KL divergence of the noise in training; None without noise."""
        return None


def surgery(
    run: Run, experts: Mapping[str, ExpertPass], model: Weights, options: Surgery
) -> tuple[Model, dict[str, float]]:
    """Train a module for every task; return the model with them, and the mean absolute difference to the experts before
    and after.

    One block of one model is in memory at a time; modules are trained on final features alone.

    Args:
        experts: one expert pass per task, with `kept`; their batches are the samples.

    Raises:
        InputError: a model with maps or heads of its own, or one whose answers are text.
        NumericalError: modules that are not finite.
    """
    return with_modules(run, experts, model, options.kind, lambda own, wanted: _train_all(own, wanted, options))


def with_modules(
    run: Run,
    experts: Mapping[str, ExpertPass],
    model: Weights,
    kind: str,
    fit: Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], Mapping[str, FeatureMap]],
) -> tuple[Model, dict[str, float]]:
    """Fit a map of final features for every task; return the model with them, and the mean absolute difference to the
    experts before and after.

    Args:
        kind: name of the model for messages and progress.
        fit: returns the maps by task from the model's final features and the experts'.

    Raises:
        InputError: a model that has maps or heads of its own already, or one whose answers are text.
    """
    if tasks_with_own_modules(model):
        raise InputError(
            f"{kind}: {model.label} already has maps or heads for {some(sorted(tasks_with_own_modules(model)))}"
        )
    if run.adapter.answers == "text":
        raise InputError(
            f"{kind}: its modules stand after the final features, where the library that generates text has "
            "no place for them; it is defined for models that score classes"
        )
    targets = expert_features(run, experts)
    own = {task: one.copy_for_one_walk(model) for task, one in experts.items()}
    features = expert_features(run, own)
    run.progress(kind, 0, len(targets))
    with run.seconds(kind):
        maps = fit(features, targets)
    run.progress(kind, len(targets), len(targets))
    before = sum(_difference(features[task], wanted) for task, wanted in targets.items()) / len(targets)
    after = sum(_difference(maps[task](features[task]), wanted) for task, wanted in targets.items()) / len(targets)
    return Model(model, maps=maps), {"loss_before": before, "loss": after}


def _difference(features: Float[Tensor, "n k"], target: Float[Tensor, "n k"]) -> float:
    return float((features - target).abs().mean())


def _train_all(
    features: Mapping[str, Float[Tensor, "n k"]], targets: Mapping[str, Float[Tensor, "n k"]], options: Surgery
) -> dict[str, FeatureMap]:
    """Train every task's module, those of tasks with equally many samples side by side.

    They see the same rows and the same noise at every step, since one seed decides them for all tasks, and nothing of
    a task enters another's module: a step costs as many calls for eight tasks as for one.
    """
    alike: dict[torch.Size, list[str]] = {}
    for task, own in features.items():
        alike.setdefault(own.shape, []).append(task)
    found: dict[str, FeatureMap] = {}
    for tasks in alike.values():
        own, wanted = (torch.stack([of[task].float() for task in tasks]) for of in (features, targets))
        found |= zip(tasks, _train(own, wanted, options), strict=True)
    return found


@torch.enable_grad()
def _train(features: Float[Tensor, "t n k"], target: Float[Tensor, "t n k"], options: Surgery) -> list[LowRank]:
    """Train a module for each of some tasks: D starts uniform within 1 / sqrt(k), all else at 0, so it does nothing."""
    generator, (tasks, count, width) = torch.Generator().manual_seed(options.seed), features.shape
    start = (2 * torch.rand(options.rank, width, generator=generator) - 1) / width**0.5
    down = start.to(features).repeat(tasks, 1, 1).requires_grad_()
    up, spread = (features.new_zeros(tasks, width, options.rank).requires_grad_() for _ in range(2))
    optimizer = torch.optim.Adam([down, up] if options.noise is None else [down, up, spread], lr=options.rate)
    for rows in _draw_rows(count, options, generator):
        few, wanted = features[:, rows], target[:, rows]
        optimizer.zero_grad()
        inner = torch.relu(few @ down.mT)
        taken, penalty = inner @ up.mT, few.new_zeros(())
        if options.noise is not None:
            log_variance = inner @ spread.mT
            # KL(N(m, v) || N(0, I)) = (m^2 + v - 1 - log v) / 2, summed over features.
            divergence = (taken.square() + log_variance.exp() - 1 - log_variance).sum(2).mean(1) / 2
            # Drawn on the CPU, where every device gets the same numbers.
            noise = torch.randn(taken.shape[1:], generator=generator).to(taken)
            taken, penalty = taken + (log_variance / 2).exp() * noise, options.noise * divergence
        # A sum over tasks: none enters another's gradient.
        loss = ((few - taken - wanted).abs().mean((1, 2)) + penalty).sum()
        torch.autograd.backward(loss)
        optimizer.step()
    if not (all_finite(down.detach()) and all_finite(up.detach())):
        raise NumericalError(f"{options.kind}: the modules are not finite; lower the rate")
    return [LowRank(*pair) for pair in zip(down.detach(), up.detach(), strict=True)]


def _draw_rows(count: int, options: Surgery, generator: torch.Generator) -> Iterator[Tensor]:
    """Yield the rows of every step: all samples in batches, in a new order every time."""
    waiting: list[Tensor] = []
    for _ in range(options.steps):
        waiting = waiting or [*torch.split(torch.randperm(count, generator=generator), options.batch)]
        yield waiting.pop(0)

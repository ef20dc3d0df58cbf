"""Train all weights of a model's blocks on the experts' outputs for the same samples (distillation).

It shows how far steps of gradient descent get on the samples that calibration sees, so how much of the gap to the
experts can be closed with these samples at all. With f and p the final features and the probabilities of the model at
every position that decides a token of the answer, of classes one, and f* and p* those of the task's expert, the loss of
a task is

    mean ||f - f*||^2 / mean ||f*||^2 + mean KL(p* || p),

means over the positions of a sample and then over samples, and the loss of all is its mean over tasks. Models without
scores have the first term alone. Steps are taken at three rates, each from the start; after some of them the loss is
measured on as many samples of the validation split, whose labels are not read, and the model with the lowest one is
kept: the start itself where no step lowers it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from featcal.baselines.common.baseline import FitInputs, Made, Trained
from featcal.baselines.common.gradients import accumulate_losses, draw_batches, log_probabilities
from featcal.calibration.calibrate import expert_passes
from featcal.evaluation.evaluate import heads_of
from featcal.formats.weights import Overlay, Weights
from featcal.models.adapter import Batch, walking
from featcal.models.context import Run
from featcal.models.lane import ExpertPass
from featcal.models.model import Head, map_features
from featcal.models.whole_forward import Sample, answer_features, batch_by_shape, batch_for_gradients, samples_of
from featcal.suite.methods import PROPOSED, SAMPLES, TRAINING, register_method
from featcal.suite.options import option

CHECKS = 10
"""Measurements of the loss on held-out samples at each rate."""
RATES = (1, 1 / 4, 1 / 16)
"""Multiples of `rate` to try: a rate that a poor start needs spoils a good one."""


@register_method(
    "distillation",
    "full-weight distillation: steps of Adam on features and scores of the experts, as many as held-out samples "
    "choose; slow, shows what training reaches on the same samples",
    needs=(
        SAMPLES,
        TRAINING,
    ),
    compared=(f"distillation@{PROPOSED[-1]},decisions=0.7",),
)
@dataclass(frozen=True)
class Distillation(Trained):
    steps: int = option(100, "steps of Adam at most, at each of three rates", least=0)
    rate: float = option(
        8e-4, "step size of Adam at first, falling to 0 along half a cosine; a quarter and a sixteenth are tried too",
        above=0,
    )  # fmt: skip
    batch: int = option(8, "samples of every task in a step", least=1)
    on_another: ClassVar[bool] = True

    def make(self, given: FitInputs) -> Made:
        family = given.family
        held = expert_passes(family, self.counting, split="validation")
        models = {task: one.weights for task, one in given.experts.items()}
        heads = None if family.adapter.embeds else heads_of(family, models, self.split)
        return Distiller(given.run, family.merged, heads).distil(given.experts, held, self)


@dataclass(frozen=True)
class TargetSample(Sample):
    """A sample with its expert's outputs at every position that decides a token of its answer."""

    features: Float[Tensor, "t k"]
    scores: Float[Tensor, "t c"] | None
    """Logarithms of the probabilities; None without scores."""
    scale: Float[Tensor, ""]
    """Mean of ||f*||^2 over the samples of the task."""


@dataclass(frozen=True)
class Distiller:
    """A model in training on the experts' outputs.

    Memory holds the tower five times (weights, the best of them, gradient and two moments), and the experts' scores of
    every position that decides a token: as many numbers as the vocabulary has tokens.
    """

    run: Run
    model: Weights
    heads: Mapping[str, Head | None] | None
    """Heads by task, with None for the model's own vocabulary; None if models have no scores."""

    def distil(self, experts: Mapping[str, ExpertPass], held: Mapping[str, ExpertPass], options: Distillation) -> Made:
        """Take the steps; return the best model, its loss on held-out samples and the start's, and its steps.

        Args:
            experts: one expert pass per task, whose batches are the samples.
            held: passes over the held-out samples, which choose the model.

        Raises:
            NumericalError: the loss is not finite.
        """
        run, adapter = self.run, self.run.adapter
        with walking(adapter), run.seconds(options.kind):
            tasks, unseen = ([self._aim(one) for one in passes.values()] for passes in (experts, held))
            start = run.compute.place(self.model.read(adapter.tower))
            least = before = self.loss(start, unseen)
            best, chosen = dict[str, Tensor](), {"rate": 0.0, "steps": 0}
            for rate in (share * options.rate for share in RATES):
                for steps, moved in self._train(start, tasks, rate, options):
                    if (now := self.loss({**start, **moved}, unseen)) < least:
                        least, chosen = now, {"rate": rate, "steps": steps}
                        best = {name: tensor.detach().clone() for name, tensor in moved.items()}
        stored = self.model.read(best)
        found = {name: tensor.to(stored[name]) for name, tensor in best.items()}
        account = {"loss_before": before, "loss": least, **chosen}
        return Overlay(f"{self.model.label}, {options.kind}", self.model, found), account

    def _train(
        self,
        start: Mapping[str, Tensor],
        tasks: Sequence[Sequence[TargetSample]],
        rate: float,
        options: Distillation,
    ) -> Iterator[tuple[int, Mapping[str, Tensor]]]:
        """Take steps at one rate; after every few of them yield their number, and the tensors of all blocks."""
        names = [name for block in self.run.adapter.blocks() for name in block.names]
        # A clone: `start` may hold the stored tensors themselves, and Adam works in place.
        moved = {name: start[name].clone().requires_grad_() for name in names}
        optimizer = torch.optim.Adam(moved.values(), lr=rate)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, options.steps))
        for step, few in enumerate(draw_batches(tasks, options.steps, options.batch, options.seed), 1):
            self.run.progress(f"{options.kind}, rate {rate:g}", step, options.steps)
            optimizer.zero_grad()
            with torch.enable_grad():
                self.loss({**start, **moved}, few)
            optimizer.step()
            schedule.step()
            if step * CHECKS // options.steps > (step - 1) * CHECKS // options.steps:
                yield step, moved

    @torch.no_grad()
    def _aim(self, one: ExpertPass) -> list[TargetSample]:
        """Return all samples of a task with its expert's outputs."""
        tensors = self.run.compute.place(one.weights.read(self.run.adapter.tower))
        found = [
            (sample, features, self._scores(tensors, one.task, features))
            for batch, some in batch_by_shape(samples_of(one))
            for sample, features in zip(some, self._features(tensors, one.weights, some, batch), strict=True)
        ]
        scale = torch.stack([features.square().sum(1).mean() for _, features, _ in found]).mean()
        return [
            TargetSample(sample.task, sample.inputs, sample.number, features, scores, scale)
            for sample, features, scores in found
        ]

    def _features(
        self, tensors: Mapping[str, Tensor], model: Weights, some: Sequence[Sample], batch: Batch
    ) -> list[Float[Tensor, "t k"]]:
        each = answer_features(self.run, tensors, batch)
        return [map_features(model, sample.task, own) for sample, own in zip(some, each, strict=True)]

    def _scores(
        self, tensors: Mapping[str, Tensor], task: str, features: Float[Tensor, "t k"]
    ) -> Float[Tensor, "t c"] | None:
        return None if self.heads is None else log_probabilities(self.run, tensors, features, self.heads[task])

    def loss(self, tensors: Mapping[str, Tensor], tasks: Sequence[Sequence[TargetSample]]) -> float:
        """Return the loss of a tower on samples of every task; if gradients are enabled, add its own to those of the
        tensors."""
        shares = {own[0].task: 1 / (len(tasks) * len(own)) for own in tasks}

        def parts() -> Iterator[Tensor]:
            for batch, some in self._batches([one for own in tasks for one in own]):
                each = self._features(tensors, self.model, some, batch)
                errors = (self._error(tensors, one, own) for one, own in zip(some, each, strict=True))
                yield torch.stack([shares[one.task] * error for one, error in zip(some, errors, strict=True)]).sum()

        return accumulate_losses(parts(), "distillation")

    def _batches(self, samples: Iterable[TargetSample]) -> Iterable[tuple[Batch, list[TargetSample]]]:
        """Return batches of equal shape, as large as memory allows."""
        adapter = self.run.adapter
        return batch_for_gradients(adapter, samples) if torch.is_grad_enabled() else batch_by_shape(samples)

    def _error(
        self, tensors: Mapping[str, Tensor], one: TargetSample, features: Float[Tensor, "t k"]
    ) -> Float[Tensor, ""]:
        error = (features - one.features).square().sum(1).mean() / one.scale
        scores = self._scores(tensors, one.task, features)
        if scores is None or one.scores is None:
            return error
        kl = torch.nn.functional.kl_div(scores, one.scores, reduction="batchmean", log_target=True)
        total: Tensor = error + kl
        return total

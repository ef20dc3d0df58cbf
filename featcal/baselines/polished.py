"""Take some steps of gradient descent that move a model's final features closer to the experts'.

The loss is the squared difference of the final features to those of the task's expert, on the same unlabelled samples
that calibration sees: its mean over samples and entries, then over tasks. A step of Adam sees a few samples of every
task, in an order that the seed decides, and all of them before it sees one again. Final features of text are those that
decide the first token of the answer: nothing else of an answer is polished.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from featcal.baselines.common.baseline import FitInputs, Made, Trained
from featcal.baselines.common.gradients import accumulate_losses, draw_batches
from featcal.formats.weights import Overlay, Weights
from featcal.models.adapter import walking
from featcal.models.context import Run
from featcal.models.features import expert_features
from featcal.models.lane import ExpertPass
from featcal.models.model import map_features
from featcal.models.whole_forward import Sample, batch_by_shape, final, samples_of
from featcal.suite.methods import PROPOSED, SAMPLES, TRAINING, register_method
from featcal.suite.options import option


@dataclass(frozen=True)
class SampleWithFeatures(Sample):
    """A sample with the final features of its task's expert."""

    target: Float[Tensor, "1 k"]
    share: float
    """Factor of its squared error in the loss."""


@register_method(
    "polished",
    "some steps of Adam that move a model's final features closer to the experts'; `featcal merge` prints the loss "
    "before and after",
    needs=(
        SAMPLES,
        TRAINING,
    ),
    compared=tuple(f"polished:steps=30@{one}" for one in ("merged", "calibrated", *PROPOSED)),
)
@dataclass(frozen=True)
class Polish(Trained):
    steps: int = option(30, "steps of Adam", least=0)
    rate: float = option(1e-4, "step size of Adam; chosen on the validation split of clip-mini", above=0)
    batch: int = option(8, "samples of every task in a step", least=1)
    on_another: ClassVar[bool] = True

    def make(self, given: FitInputs) -> Made:
        return polish(given.run, given.experts, given.family.merged, self)


def polish(
    run: Run, experts: Mapping[str, ExpertPass], model: Weights, options: Polish
) -> tuple[Weights, dict[str, float]]:
    """Take the steps; return the model, and the loss on all samples before and after.

    All parameters of the tower that affect the final features are trained; they are stored in the model's own dtypes.
    Memory holds the tower four times (weights, gradient and two moments) and what `gradients.TOGETHER` samples leave
    for the gradient.

    Args:
        experts: one expert pass per task, with `kept`; their batches are the samples.

    Raises:
        NumericalError: the loss is not finite.
    """
    stored = model.read(run.adapter.tower)
    tasks = _aim(experts, expert_features(run, experts))
    samples = [one for own in tasks for one in own]
    # A clone: `place` may give the stored tensor itself, and Adam works in place.
    moved = {name: tensor.clone().requires_grad_() for name, tensor in run.compute.place(stored).items()}
    optimizer = torch.optim.Adam(moved.values(), lr=options.rate)
    with walking(run.adapter), run.seconds(options.kind):
        before = _loss(run, model, moved, samples)
        for step, few in enumerate(draw_batches(tasks, options.steps, options.batch, options.seed)):
            run.progress(options.kind, step, options.steps)
            optimizer.zero_grad()
            with torch.enable_grad():
                _loss(run, model, moved, _weigh(few, tasks))
            optimizer.step()
        after = _loss(run, model, moved, samples)
        run.progress(options.kind, options.steps, options.steps)
    # A tensor without a gradient never moved: it is left to the model, bit for bit.
    found = {name: moved[name].detach().to(tensor) for name, tensor in stored.items() if moved[name].grad is not None}
    return Overlay(f"{model.label}, {options.kind}", model, found), {"loss_before": before, "loss": after}


def _aim(experts: Mapping[str, ExpertPass], targets: Mapping[str, Tensor]) -> list[list[SampleWithFeatures]]:
    """Return all samples with their targets, by task."""
    return [
        [
            SampleWithFeatures(task, sample.inputs, sample.number, target, 1 / (len(experts) * targets[task].numel()))
            for sample, target in zip(samples_of(one), torch.split(targets[task], 1), strict=True)
        ]
        for task, one in experts.items()
    ]


def _weigh(
    few: Sequence[Sequence[SampleWithFeatures]], tasks: Sequence[Sequence[SampleWithFeatures]]
) -> list[SampleWithFeatures]:
    """Weigh some samples of every task so that their loss estimates that of all samples."""
    return [
        replace(one, share=one.share * len(own) / len(some))
        for own, some in zip(tasks, few, strict=True)
        for one in some
    ]


def _loss(run: Run, model: Weights, tensors: Mapping[str, Tensor], samples: Iterable[SampleWithFeatures]) -> float:
    """Return the loss of a tower; if gradients are enabled, add its own to those of the tensors.

    Args:
        model: gives the maps of final features.
    """

    def parts() -> Iterator[Tensor]:
        for batch, some in batch_by_shape(samples):
            features = torch.split(final(run, tensors, batch), 1)
            errors = [
                one.share * (map_features(model, one.task, own) - one.target).square().sum()
                for one, own in zip(some, features, strict=True)
            ]
            yield torch.stack(errors).sum()

    return accumulate_losses(parts(), "polished")

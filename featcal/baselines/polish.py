"""Polishing: some steps of gradient descent that bring a model's final features closer to the experts'.

The loss is the squared difference of the final features to those of the task's expert, on the same unlabelled samples
that calibration sees: its mean over samples and entries, then over tasks. A step of Adam sees a few samples of every
task, in an order that the seed decides, and all of them before it sees one again. Final features of text are those that
decide the first token of the answer: nothing else of an answer is polished.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from jaxtyping import Float
from torch import Tensor

from featcal.baselines.options import Polish
from featcal.errors import NumericalError
from featcal.formats.weights import Overlay, Weights
from featcal.models.adapter import Batch, Call, walking
from featcal.models.features import expert_features
from featcal.models.lane import ExpertPass, through
from featcal.models.model import mapped
from featcal.models.run import Run

TOGETHER = 64
"""Samples that go through the model together."""


@dataclass(frozen=True)
class Sample:
    """One sample, a batch of its own, and the final features of its task's expert."""

    task: str
    inputs: Batch
    target: Float[Tensor, "1 k"]
    share: float
    """Of its squared error in the loss."""


def polish(
    run: Run, experts: Mapping[str, ExpertPass], model: Weights, options: Polish
) -> tuple[Weights, dict[str, float]]:
    """The model after some steps, and the loss on all samples before and after.

    All of the tower moves that the final features depend on; it is stored in the model's own dtypes. Memory holds the
    whole tower four times (weights, gradient and two moments) and what `TOGETHER` samples leave for the gradient.

    Args:
        experts: one expert pass per task, with `kept`; their batches are the samples.

    Raises:
        NumericalError: the loss is not finite.
    """
    stored = model.read(run.adapter.tower)
    samples = _samples(experts, expert_features(run, experts))
    moved = {name: tensor.clone().requires_grad_() for name, tensor in run.compute.place(stored).items()}
    optimizer = torch.optim.Adam(moved.values(), lr=options.rate)
    with walking(run.adapter), run.seconds(options.kind):
        before = _loss(run, model, moved, samples)
        for step, few in enumerate(_drawn(samples, options)):
            run.progress(options.kind, step, options.steps)
            optimizer.zero_grad()
            with torch.enable_grad():
                _loss(run, model, moved, few)
            optimizer.step()
        after = _loss(run, model, moved, samples)
        run.progress(options.kind, options.steps, options.steps)
    found = {name: moved[name].detach().to(tensor) for name, tensor in stored.items() if moved[name].grad is not None}
    return Overlay(f"{model.label}, {options.kind}", model, found), {"loss_before": before, "loss": after}


def _samples(experts: Mapping[str, ExpertPass], targets: Mapping[str, Tensor]) -> list[Sample]:
    """All samples, task by task."""
    found = []
    for task, one in experts.items():
        rows = ({n: t[i : i + 1] for n, t in batch.items()} for batch in one.batches for i in range(_size(batch)))
        share = 1 / (len(experts) * targets[task].numel())
        found += [Sample(task, row, h, share) for row, h in zip(rows, torch.split(targets[task], 1), strict=True)]
    return found


def _drawn(samples: Sequence[Sample], options: Polish) -> Iterator[list[Sample]]:
    """The samples of every step, weighted so that their loss estimates that of all."""
    generator = torch.Generator().manual_seed(options.seed)
    tasks = [list(own) for _, own in groupby(samples, key=lambda one: one.task)]
    waiting: list[list[int]] = [[] for _ in tasks]
    for _ in range(options.steps):
        few = []
        for own, indices in zip(tasks, waiting, strict=True):
            if not indices:
                indices += torch.randperm(len(own), generator=generator).tolist()
            taken = [indices.pop() for _ in range(min(options.batch, len(indices)))]
            few += [replace(own[i], share=own[i].share * len(own) / len(taken)) for i in taken]
        yield few


def _loss(run: Run, model: Weights, tensors: Mapping[str, Tensor], samples: Sequence[Sample]) -> float:
    """The loss of a tower; where gradients are enabled its own is added to those of the tensors.

    Args:
        model: whose maps of final features apply.
    """
    total = 0.0
    for some in _alike(samples):
        batch = {name: torch.cat([one.inputs[name] for one in some]) for name in some[0].inputs}
        features = torch.split(_final(run, tensors, batch), 1)
        errors = [
            one.share * (mapped(model, one.task, own) - one.target).square().sum()
            for one, own in zip(some, features, strict=True)
        ]
        part = torch.stack(errors).sum()
        if part.requires_grad and torch.is_grad_enabled():
            torch.autograd.backward(part)
        total += float(part.detach())
    if not math.isfinite(total):
        raise NumericalError(f"polish: the loss is {total}; lower the rate")
    return total


def _alike(samples: Iterable[Sample]) -> Iterator[list[Sample]]:
    """Samples of inputs of one shape, `TOGETHER` of them at most."""
    groups: dict[Hashable, list[Sample]] = {}
    for one in samples:
        groups.setdefault(tuple((name, tensor.shape) for name, tensor in one.inputs.items()), []).append(one)
    for own in groups.values():
        for start in range(0, len(own), TOGETHER):
            yield own[start : start + TOGETHER]


def _size(batch: Batch) -> int:
    return len(next(iter(batch.values())))


def _final(run: Run, tensors: Mapping[str, Tensor], batch: Batch) -> Float[Tensor, "b k"]:
    """Final features of one batch, with what their gradient needs."""
    adapter, call = run.adapter, None
    for stage in adapter.stages:
        call = stage.first_call({name: tensors[name] for name in stage.outer}, batch, call)
        for block in stage.blocks:
            call = through(stage, block, block.local(tensors), call)
    assert isinstance(call, Call)
    return adapter.final({name: tensors[name] for name in adapter.closing} | dict(run.head), call, batch)

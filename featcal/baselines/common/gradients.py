"""Run whole forwards that gradients flow through, on samples one by one or in batches of one shape.

A gradient passes through all layers, so the whole tower is in memory, not one block at a time.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from featcal.evaluation.evaluate import scoring_heads
from featcal.evaluation.scoring_heads import head_of
from featcal.family.opening import Family
from featcal.formats.weights import Weights
from featcal.models.adapter import Batch, Call
from featcal.models.context import Run
from featcal.models.lane import ExpertPass, run_block
from featcal.models.model import Head, own_head

TOGETHER = 64
"""Largest number of samples that go through a model together."""


@dataclass(frozen=True)
class Sample:
    """One sample of a task, a batch of its own."""

    task: str
    inputs: Batch


S = TypeVar("S", bound=Sample)


def samples_of(one: ExpertPass) -> list[Sample]:
    """Return every sample of a task, in order."""
    return [
        Sample(one.task, {name: tensor[i : i + 1] for name, tensor in batch.items()})
        for batch in one.batches
        for i in range(len(next(iter(batch.values()))))
    ]


def draw_batches(tasks: Sequence[Sequence[S]], steps: int, batch: int, seed: int) -> Iterator[list[Sequence[S]]]:
    """Yield some samples of every task for each step, `batch` at most, in an order that the seed decides: all of a
    task's before one comes again."""
    generator = torch.Generator().manual_seed(seed)
    waiting: list[list[int]] = [[] for _ in tasks]
    for _ in range(steps):
        few: list[Sequence[S]] = []
        for own, indices in zip(tasks, waiting, strict=True):
            if not indices:
                indices += torch.randperm(len(own), generator=generator).tolist()
            few.append([own[indices.pop()] for _ in range(min(batch, len(indices)))])
        yield few


def batch_by_shape(samples: Iterable[S]) -> Iterator[tuple[Batch, list[S]]]:
    """Yield batches of inputs of one shape, of `TOGETHER` samples at most, with these samples."""
    groups: dict[Hashable, list[S]] = {}
    for one in samples:
        # By shape: padding would put tokens into a sample that it does not have.
        groups.setdefault(tuple((name, tensor.shape) for name, tensor in one.inputs.items()), []).append(one)
    for own in groups.values():
        for start in range(0, len(own), TOGETHER):
            some = own[start : start + TOGETHER]
            yield {name: torch.cat([one.inputs[name] for one in some]) for name in some[0].inputs}, some


def final(run: Run, tensors: Mapping[str, Tensor], batch: Batch) -> Float[Tensor, "b k"]:
    """Return the final features of one batch, with what their gradient needs where gradients are enabled."""
    adapter, call = run.adapter, None
    for stage in adapter.stages:
        call = stage.first_call({name: tensors[name] for name in stage.outer}, batch, call)
        for block in stage.blocks:
            call = run_block(stage, block, block.local(tensors), call)
    assert isinstance(call, Call)
    return adapter.final({name: tensors[name] for name in adapter.closing} | dict(run.head), call, batch)


def heads_of(family: Family, models: Mapping[str, Weights], split: str) -> dict[str, Head | None]:
    """Return by task the head that turns a model's features into scores without labels; None for its own vocabulary,
    which is a part of the tower.

    Args:
        models: by task.
        split: whose source names the classes.

    Raises:
        InputError: class names, a text tower or a head are missing.
    """
    needed = {task: model for task, model in models.items() if own_head(model, task) is None}
    shared = scoring_heads(family, split, needed)
    vocabulary = {*needed} if family.adapter.scores_with == "vocabulary" else set()
    return {
        task: None if task in vocabulary else head_of(family, model, task, shared.get(task))
        for task, model in models.items()
    }


def log_probabilities(
    run: Run, tensors: Mapping[str, Tensor], features: Float[Tensor, "b k"], head: Head | None
) -> Float[Tensor, "b c"]:
    """Return log p(y | x) of every class; of text, of every first token of the answer."""
    scores = run.adapter.output(tensors, features) if head is None else head.scores(features)
    return torch.log_softmax(scores, 1)

"""Draw the samples of a step of gradient descent, and turn final features into log-probabilities."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from featcal.models.context import Run
from featcal.models.model import Head
from featcal.models.whole_forward import S


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


def log_probabilities(
    run: Run, tensors: Mapping[str, Tensor], features: Float[Tensor, "b k"], head: Head | None
) -> Float[Tensor, "b c"]:
    """Return log p(y | x) of every class; of text, of every first token of the answer."""
    scores = run.adapter.output(tensors, features) if head is None else head.scores(features)
    return torch.log_softmax(scores, 1)

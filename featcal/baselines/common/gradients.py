"""Draw the samples of a step of gradient descent, add up losses with their gradients, and turn final features into
log-probabilities."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from featcal.models.context import Run
from featcal.models.model import Head
from featcal.models.whole_forward import S
from featcal.system.errors import NumericalError


def draw_batches(tasks: Sequence[Sequence[S]], steps: int, batch: int, seed: int) -> Iterator[list[Sequence[S]]]:
    """Yield at most `batch` samples of every task for each step, in an order decided by the seed: all samples of a task
    before any repeats."""
    generator = torch.Generator().manual_seed(seed)
    waiting: list[list[int]] = [[] for _ in tasks]
    for _ in range(steps):
        few: list[Sequence[S]] = []
        for own, indices in zip(tasks, waiting, strict=True):
            if not indices:
                indices += torch.randperm(len(own), generator=generator).tolist()
            few.append([own[indices.pop()] for _ in range(min(batch, len(indices)))])
        yield few


def accumulate_losses(losses: Iterable[Float[Tensor, ""]], method: str) -> float:
    """Return the sum of losses, each released before the next one is computed; if gradients are enabled, add theirs to
    those of the tensors.

    Args:
        method: its name for the message if the sum is not finite.

    Raises:
        NumericalError: the sum is not finite.
    """
    total = 0.0
    for loss in losses:
        if loss.requires_grad and torch.is_grad_enabled():
            torch.autograd.backward(loss)
        total += float(loss.detach())
    if not math.isfinite(total):
        raise NumericalError(f"{method}: the loss is {total}; lower the rate")
    return total


def log_probabilities(
    run: Run, tensors: Mapping[str, Tensor], features: Float[Tensor, "b k"], head: Head | None
) -> Float[Tensor, "b c"]:
    """Return log p(y | x) of every class; for text, of every first token of the answer."""
    scores = run.adapter.output(tensors, features) if head is None else head.scores(features)
    return torch.log_softmax(scores, 1)

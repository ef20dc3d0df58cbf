"""Run whole forwards with gradients, on samples one by one or in batches of one shape.

A gradient passes through all layers, so the whole tower is in memory, not one block at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from featcal.models.adapter import Adapter, Batch, Call, Stage
from featcal.models.context import Run
from featcal.models.lane import ExpertPass, run_block
from featcal.models.linear_maps import LinearMap
from featcal.system.spread import even_places

TOGETHER = 64
"""Largest number of samples that go through a model together."""
TAPE = 2**28
"""Largest number of bytes of features kept for gradients by outputs of maps, for samples that run together."""


@dataclass(frozen=True)
class Sample:
    """One sample of a task, as a batch of one."""

    task: str
    inputs: Batch
    number: int
    """Position among the samples of its task, in whichever batches they come."""


S = TypeVar("S", bound=Sample)


def samples_of(one: ExpertPass) -> list[Sample]:
    """Return every sample of a task, in order."""
    apart = (
        {name: tensor[i : i + 1] for name, tensor in batch.items()}
        for batch in one.batches
        for i in range(len(next(iter(batch.values()))))
    )
    return [Sample(one.task, inputs, number) for number, inputs in enumerate(apart)]


def spread_samples(one: ExpertPass, most: int) -> list[Sample]:
    """Return at most `most` samples of a task, evenly spread over its source, whose rows are often sorted by class; in
    the order of `samples_of`."""
    samples = samples_of(one)
    order = sorted(range(len(samples)), key=lambda number: one.indices[number])
    return [samples[number] for number in sorted(order[place] for place in even_places(len(order), most))]


def batch_by_shape(
    samples: Iterable[S], together: Callable[[Batch], int] = lambda _: TOGETHER
) -> Iterator[tuple[Batch, list[S]]]:
    """Yield batches of inputs of one shape, with their samples.

    Args:
        together: how many samples like this one go into a batch at most.
    """
    groups: dict[Hashable, list[S]] = {}
    for one in samples:
        # By shape: padding would put tokens into a sample that it does not have.
        groups.setdefault(tuple((name, tensor.shape) for name, tensor in one.inputs.items()), []).append(one)
    for own in groups.values():
        most = together(own[0].inputs)
        for start in range(0, len(own), most):
            some = own[start : start + most]
            yield {name: torch.cat([one.inputs[name] for one in some]) for name in some[0].inputs}, some


def batch_for_gradients(adapter: Adapter, samples: Iterable[S]) -> Iterator[tuple[Batch, list[S]]]:
    """Yield batches like `batch_by_shape`, each of as many samples as have their gradients
    by outputs of maps within `TAPE`.
    """
    return batch_by_shape(samples, lambda batch: samples_together(adapter.stages, adapter.tokens(batch)))


def name_maps(adapter: Adapter) -> dict[str, LinearMap]:
    """Return the linear maps of all blocks by their names in files."""
    return {block.stored_name(name): linear for block in adapter.blocks() for name, linear in block.linears.items()}


def samples_together(stages: Iterable[Stage], tokens: int) -> int:
    """Return how many samples of so many tokens fit into `TAPE` bytes for gradients; at least one."""
    return max(1, min(TOGETHER, TAPE // tape_bytes(stages, tokens)))


def tape_bytes(stages: Iterable[Stage], tokens: int) -> int:
    """Count the bytes of all features of so many tokens, which gradients by the outputs of maps need."""
    return 4 * tokens * int(sum(block.features for stage in stages for block in stage.blocks))


def final(run: Run, tensors: Mapping[str, Tensor], batch: Batch) -> Float[Tensor, "b k"]:
    """Return the final features of one batch, with the graph for their gradient where gradients are enabled."""
    adapter = run.adapter
    return adapter.final(_closing_tensors(run, tensors), _walk(run, tensors, batch), batch)


def answer_features(run: Run, tensors: Mapping[str, Tensor], batch: Batch) -> list[Float[Tensor, "t k"]]:
    """Return, per sample, the final features at every position that decides a token of its answer, like `final`."""
    return run.adapter.answer_features(_closing_tensors(run, tensors), _walk(run, tensors, batch), batch)


def _closing_tensors(run: Run, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensors[name] for name in run.adapter.closing} | dict(run.head)


def _walk(run: Run, tensors: Mapping[str, Tensor], batch: Batch) -> Call:
    """Return the call after the last block."""
    adapter, call = run.adapter, None
    for stage in adapter.stages:
        call = stage.first_call({name: tensors[name] for name in stage.outer}, batch, call)
        for block in stage.blocks:
            call = run_block(stage, block, block.local(tensors), call)
    assert isinstance(call, Call)
    return call

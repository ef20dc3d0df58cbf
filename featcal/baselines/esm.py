"""Merge by Essential Subspace Merging: keep of every task vector its largest effects on its own features (Li et al.,
Model Merging in the Essential Subspace, CVPR 2026, arXiv 2602.20208).

With X_t the inputs of a linear map as expert t has them on its own samples and D_t = W_t - W_0 in R^{m x d} of T tasks,
outputs shift by X_t D_t^T. Principal directions P_t of this shift are the eigenvectors of D_t G_t D_t^T with the
floor(m / T) largest eigenvalues, one at least and none that is 0; G_t = X_t^T X_t over all tokens but padding.
Coordinates are A_t = P_t^T D_t. With polarised scaling p(v)_i = (v_i / mean_j v_j)^2, and whitening, which puts the
polar factor of a matrix in its place,

    tasks     A_t is scaled by p of all ||A_t||
    merged    P = whitened [P_1 | ... | P_T];  A = N whitened V, with [A_1; ...; A_T] = N V, N the norms of its rows
    inputs    column j of A is scaled by p of the norms of the columns of [A_1; ...; A_T]
    layers    D = P A is scaled by p of the norms of D at the same place of all blocks of its stage

and W = W_0 + `scale` D. The paper takes 32 samples at most and chooses the scale on a validation split; here it is 1.

The norms N between the factors are our reading: the descriptions that we have whiten [A_1; ...; A_T] as it is. Inputs
are those of the expert alone, as in RegMean and LOT Merging. Everything else gets the mean of the experts' changes:
biases, norms, embeddings, and maps outside the blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from featcal.baselines.common.averages import average_changes
from featcal.baselines.common.baseline import FitInputs, Made, Sampled
from featcal.baselines.common.block_tensors import read_double
from featcal.baselines.common.task_grams import TaskGrams
from featcal.calibration.store import prefix_errors, to_stored
from featcal.calibration.token_rows import TaskRows, lane_rows
from featcal.formats.weights import Overlay, Weights, all_finite
from featcal.mergers.common.singular import orthonormal
from featcal.models.adapter import Stage, walking
from featcal.models.context import Run
from featcal.models.lane import BlockStep, ExpertPass
from featcal.models.linear_maps import orient_weight
from featcal.models.walk import BlockwiseForward
from featcal.suite.methods import SAMPLES, register_method
from featcal.suite.options import option
from featcal.system.errors import NumericalError

_LINALG: Any = torch.linalg
Directions: TypeAlias = tuple[Tensor, Tensor]
"""P_t `[m, k]`, orthonormal, and A_t `[k, d]` of one task."""


@register_method(
    "esm",
    "Essential Subspace Merging: from every task vector the directions with the largest effect on its own features, "
    "made orthogonal",
    paper="2602.20208",
    needs=(SAMPLES,),
)
@dataclass(frozen=True)
class Esm(Sampled):
    scale: float = option(1.0, "factor of the merged task vector")

    def make(self, given: FitInputs) -> Made:
        return esm(given.run, given.experts, self), {}


def esm(run: Run, experts: Mapping[str, ExpertPass], options: Esm) -> Weights:
    """Merge the experts. Memory holds one block of the base and of one expert with the principal directions and
    coordinates of all tasks there, and of a whole stage what its linear maps change, in float64 on the CPU, since every
    layer's scale depends on all others; then what was merged so far.

    Args:
        experts: one expert pass per task; their batches are the samples.

    Raises:
        NumericalError: features that are not finite, or a decomposition that does not converge; the message names the
            map.
        InputError: an architecture that cannot be run block by block, or a map that is not given one row per token.
    """
    under = average_changes(run, experts, options.scale)
    found: dict[str, Tensor] = {}
    with walking(run.adapter), run.seconds(options.kind):
        walk = BlockwiseForward(run, options.kind, experts, {})
        for stage in run.adapter.stages:
            walk.enter(stage)
            rows = lane_rows(stage, walk.experts, experts, options.counting)
            changes: list[dict[str, Tensor]] = []
            for index, block in walk.blocks(stage):
                shifts = BlockShifts(stage, index, len(experts))
                base = read_double(run, block, run.base)
                with prefix_errors(run.adapter.name_of(block)):
                    for task, tensors in walk.experts_at(block):
                        steps = walk.experts[task].walk(stage, block, tensors, inputs=block.linears)
                        shifts.count(steps, {name: tensors[name].double() - base[name] for name in base}, rows[task])
                    # On the CPU: a layer's scale depends on all others, so a whole stage waits here.
                    changes.append({name: change.cpu() for name, change in shifts.merge().items()})
            for block, own in zip(stage.blocks, scale_layers(changes), strict=True):
                start = block.local(run.base.read(block.names))
                solved = {name: start[name].double() + options.scale * change for name, change in own.items()}
                found |= to_stored(block, under.read(block.names), solved)
        walk.finish()
    return Overlay(f"merged model ({options.kind})", under, found)


class BlockShifts:
    """The principal directions of all tasks for the linear maps of one block."""

    def __init__(self, stage: Stage, index: int, tasks: int) -> None:
        self._stage, self._index, self._tasks = stage, index, tasks
        self._maps = stage.blocks[index].linears
        self._found: dict[str, list[Directions]] = {name: [] for name in self._maps}

    def count(self, steps: Iterable[BlockStep], vectors: Mapping[str, Tensor], rows: TaskRows) -> None:
        """Add one task.

        Args:
            steps: the expert's block on every batch of the task, with the inputs of its linear maps.
            vectors: its task vectors, by name inside the block, in float64.

        Raises:
            NumericalError: features that are not finite, or no decomposition.
        """
        grams = TaskGrams(self._stage, self._index)
        for step, tokens in zip(steps, rows.batches, strict=True):
            grams.add(step.inputs, tokens)
        for group in grams.groups:
            gram = grams.sum(group)
            if not all_finite(gram):
                raise NumericalError(f"{group}: features are not finite")
            for name in group.names:
                change = orient_weight(self._maps[name], vectors[f"{name}.weight"])
                with _explain_failure(name):
                    self._found[name].append(directions(change, gram, self._tasks))

    def merge(self) -> dict[str, Tensor]:
        """Return the change of every linear map before layers are scaled, in the layout of stored weights, by name of
        the tensor inside the block.

        Raises:
            NumericalError: no decomposition.
        """
        changes: dict[str, Tensor] = {}
        for name, found in self._found.items():
            if found:
                with _explain_failure(name):
                    changes[f"{name}.weight"] = orient_weight(self._maps[name], merge_directions(found)).contiguous()
        return changes


def directions(change: Float[Tensor, "m d"], gram: Float[Tensor, "d d"], tasks: int) -> Directions:
    """Return P_t and A_t of one task among `tasks`."""
    # Second moment of the shift, not covariance: its discarded eigenvalues sum to what is lost.
    values, vectors = torch.linalg.eigh(change @ gram @ change.mT)
    m = len(values)
    # Vectors of an eigenvalue of 0 are arbitrary: they move no feature of the samples.
    rank = int((values > m * torch.finfo(values.dtype).eps * values[-1]).sum())
    principal = vectors[:, m - min(rank, max(1, m // tasks)) :]
    return principal, principal.mT @ change


def merge_directions(found: Sequence[Directions]) -> Float[Tensor, "m d"]:
    """Return P A from the P_t and A_t of all tasks, with the scales of tasks and inputs."""
    # Scale of the tasks.
    by_task = polarise(torch.stack([own.norm() for _, own in found]))
    coordinates = torch.cat([factor * own for factor, (_, own) in zip(by_task, found, strict=True)])
    norms = coordinates.norm(dim=1)
    principal = orthonormal(torch.cat([own for own, _ in found], 1))
    # Without the norms all singular values of P A would be 1, however little the experts changed.
    merged: Tensor = principal * norms @ orthonormal(coordinates / norms.where(norms > 0, 1)[:, None])
    # Scale of the inputs: a factor per column.
    return merged * polarise(coordinates.norm(dim=0))


def scale_layers(changes: Sequence[Mapping[str, Tensor]]) -> list[dict[str, Tensor]]:
    """Scale the changes of the blocks of a stage relative to those of the same name in other blocks."""
    norms: dict[str, list[Tensor]] = {}
    for own in changes:
        for name, change in own.items():
            norms.setdefault(name, []).append(change.norm())
    factors = {name: iter(polarise(torch.stack(own))) for name, own in norms.items()}
    return [{name: next(factors[name]) * change for name, change in own.items()} for own in changes]


def polarise(sizes: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Return (size / mean of all sizes)^2; 0 if all sizes are 0.

    >>> polarise(torch.tensor([1.0, 3.0])).tolist()
    [0.25, 2.25]
    """
    mean = sizes.mean()
    return (sizes / mean.where(mean > 0, 1)).square()


@contextmanager
def _explain_failure(name: str) -> Iterator[None]:
    """Turn a decomposition that does not converge inside the `with` into a NumericalError that names the map."""
    try:
        yield
    except _LINALG.LinAlgError as error:
        raise NumericalError(f"{name}: no decomposition ({error})") from error

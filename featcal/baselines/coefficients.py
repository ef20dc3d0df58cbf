"""Fit coefficients of the task vectors, map by map: least squares on the inputs that the merged model gives a map.

After output-space projection (arXiv 2605.29101): for every layer the coefficients of the task vectors with which its
outputs are nearest to the experts'. The formula is a reconstruction from its abstract. With tau_i = W_i - W_0, the
deployed inputs of task i, their mean Gram matrix G_i over all tokens but padding, and omega_i = 1 / ||G_i||_F (Eq. 14
of FeatCal), every linear map has its own c that minimises

    J(c) = sum_i omega_i tr((tau_i - sum_k c_k tau_k) G_i (tau_i - sum_k c_k tau_k)^T),

hence M c = v with M_kl = <tau_k G, tau_l>, v_l = <sum_i omega_i tau_i G_i, tau_l> and G = sum_i omega_i G_i; of
several solutions, as experts that did not change a map leave, the shortest. Then W = W_0 + sum_k c_k tau_k. It is Task
Arithmetic with coefficients that samples decide, AdaMerging without steps.

Blocks are solved in forward order: inputs are those of the model with all earlier blocks solved and the block itself
averaged. A bias moves with the weight of its map. Everything else is averaged: norms, embeddings, linear maps outside
the blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from featcal.baselines.common.averages import average_experts
from featcal.baselines.common.baseline import FitInputs, Made, Sampled
from featcal.baselines.common.block_tensors import read_double
from featcal.baselines.common.task_grams import TaskGrams
from featcal.calibration.closed_form import task_weight
from featcal.calibration.linear_group import LinearGroup
from featcal.calibration.store import prefix_errors, to_stored
from featcal.calibration.token_rows import TaskRows, lane_rows
from featcal.formats.weights import Overlay, Weights, all_finite
from featcal.models.adapter import Stage, walking
from featcal.models.context import Run
from featcal.models.lane import BlockStep, ExpertPass, ModelStream
from featcal.models.walk import BlockwiseForward
from featcal.suite.methods import SAMPLES, register_method
from featcal.system.errors import NumericalError


@register_method(
    "coefficients",
    "coefficients of the task vectors for every linear map, by least squares on the map's inputs in the merged model "
    "(after output-space projection)",
    paper="2605.29101",
    needs=(SAMPLES,),
)
@dataclass(frozen=True)
class Coefficients(Sampled):
    def make(self, given: FitInputs) -> Made:
        return coefficients(given.run, given.experts, self)


def coefficients(run: Run, experts: Mapping[str, ExpertPass], options: Coefficients) -> tuple[Weights, dict[str, Any]]:
    """Merge the experts; return the merge, the coefficients by map and task, and by map the share of J(0) that they
    remove.

    Memory holds one block of all models with the sums of that block, and the merged part: the whole tower in the end,
    because the model is returned and not written.

    Args:
        experts: one expert pass per task; their batches are the samples.

    Raises:
        NumericalError: features that are not finite; the message names the maps.
        InputError: an architecture that cannot be run block by block, or a map that is not given one row per token.
    """
    average = average_experts(run, experts)
    student = {task: one.copy_for_one_walk(average) for task, one in experts.items()}
    found: dict[str, Tensor] = {}
    account: dict[str, Any] = {"coefficients": {}, "captured": {}}
    with walking(run.adapter), run.seconds(options.kind):
        walk = BlockwiseForward(run, options.kind, student, {})
        for stage in run.adapter.stages:
            walk.enter(stage)
            rows = lane_rows(stage, walk.experts, experts, options.counting)
            for index, block in walk.blocks(stage):
                merged = average.read(block.names)
                with prefix_errors(run.adapter.name_of(block)):
                    sums = _count(run, walk.experts, stage, index, rows, merged, experts)
                    solved, entries = sums.solve(read_double(run, block, run.base))
                found |= (own := merged | to_stored(block, merged, solved))
                for kind, values in entries.items():
                    account[kind] |= {block.stored_name(name): value for name, value in values.items()}
                # The next block is counted on what the solved one puts out.
                walk.deploy_block(stage, block, own)
        walk.finish()
    return Overlay(f"merged model ({options.kind})", average, found), account


def _count(
    run: Run,
    lanes: Mapping[str, ModelStream],
    stage: Stage,
    index: int,
    rows: Mapping[str, TaskRows],
    merged: Mapping[str, Tensor],
    experts: Mapping[str, ExpertPass],
) -> ProjectionSums:
    """Count one block on all tasks, before which all lanes stay; return its sums."""
    block = stage.blocks[index]
    sums = ProjectionSums(stage, index)
    base, deployed = read_double(run, block, run.base), block.local(run.compute.move(merged))
    for task, lane in lanes.items():
        own = read_double(run, block, experts[task].weights)
        vectors = {name: own[name] - base[name] for name in base}
        sums.count(task, lane.walk(stage, block, deployed, inputs=block.linears, move=False), vectors, rows[task])
    return sums


class ProjectionSums:
    """The sums over tasks for the linear maps of one block, and its task vectors."""

    def __init__(self, stage: Stage, index: int) -> None:
        self._stage, self._index = stage, index
        self._groups: list[LinearGroup] = []
        self._grams: dict[str, Tensor] = {}
        """Gram matrices G by group of linear maps."""
        self._answers: dict[str, Tensor] = {}
        """sum_i omega_i tau_i G_i by group, rows stacked."""
        self._energies: dict[str, float] = {}
        """Residual energy J(0), with all coefficients 0, by linear map."""
        self._vectors: dict[str, Mapping[str, Tensor]] = {}
        """Task vectors by task."""

    def count(self, task: str, steps: Iterable[BlockStep], vectors: Mapping[str, Tensor], rows: TaskRows) -> None:
        """Count one task.

        Args:
            steps: the merged block on every batch of the task, with the inputs of its linear maps.
            vectors: the expert's task vectors, by name inside the block, in float64.

        Raises:
            NumericalError: features that are not finite, or no token that counts.
        """
        grams = TaskGrams(self._stage, self._index)
        for step, tokens in zip(steps, rows.batches, strict=True):
            grams.add(step.inputs, tokens)
        self._groups, self._vectors[task] = self._groups or grams.groups, vectors
        for group in self._groups:
            key, gram = str(group), grams.mean(group)
            if not all_finite(gram):
                raise NumericalError(f"{key}: features are not finite")
            # omega_i of Eq. (14); `tiny` in place of eps, since nothing is known of the scale of features.
            gram = task_weight(torch.linalg.matrix_norm(gram), torch.finfo(gram.dtype).tiny) * gram
            moved = group.stack(vectors, "weight") @ gram
            # J(0) = sum_i omega_i <tau_i G_i, tau_i>, entry by entry and summed per map.
            for name, own in group.split(moved * group.stack(vectors, "weight"), "weight").items():
                self._energies[name] = self._energies.get(name, 0.0) + float(own.sum())
            self._grams[key] = self._grams[key] + gram if key in self._grams else gram
            self._answers[key] = self._answers[key] + moved if key in self._answers else moved

    def solve(self, base: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
        """Return the tensors of every linear map, by name inside the block, and the report by name of the map.

        Args:
            base: the base's tensors of the block, in float64.
        """
        solved: dict[str, Tensor] = {}
        account: dict[str, dict[str, Any]] = {"coefficients": {}, "captured": {}}
        for group in self._groups:
            stacks = [group.stack(one, "weight") for one in self._vectors.values()]
            moved = [group.split(one @ self._grams[str(group)], "weight") for one in stacks]
            answers = group.split(self._answers[str(group)], "weight")
            for name in group.names:
                weight = f"{name}.weight"
                own = [one[weight] for one in self._vectors.values()]
                c, gain = best([one[weight] for one in moved], own, answers[weight])
                # A bias moves with the coefficients of its map's weight.
                for kind in (kind for kind in ("weight", "bias") if f"{name}.{kind}" in base):
                    steps = zip(c.tolist(), self._vectors.values(), strict=True)
                    solved[f"{name}.{kind}"] = base[f"{name}.{kind}"] + sum(
                        one * v[f"{name}.{kind}"] for one, v in steps
                    )
                account["coefficients"][name] = dict(zip(self._vectors, c.tolist(), strict=True))
                account["captured"][name] = gain / self._energies[weight] if self._energies[weight] > 0 else 1.0
        return solved, account


def best(
    moved: list[Float[Tensor, "m d"]], vectors: list[Float[Tensor, "m d"]], answer: Float[Tensor, "m d"]
) -> tuple[Float[Tensor, " t"], float]:
    """Return the shortest c with M c = v, and v^T c, the decrease of J from J(0).

    Args:
        moved: tau_k G.
        vectors: tau_k.
        answer: sum_i omega_i tau_i G_i.
    """
    flat = torch.stack([one.flatten() for one in vectors])
    # M and v of the module's docstring: inner products of flattened matrices.
    left, right = torch.stack([one.flatten() for one in moved]) @ flat.mT, flat @ answer.flatten()
    # M is symmetric but for rounding, and `eigh` reads one triangle.
    values, turn = torch.linalg.eigh((left + left.mT) / 2)
    # Experts that did not change a map leave M singular: the pseudo-inverse gives the shortest c.
    seen = values > len(values) * torch.finfo(values.dtype).eps * values[-1]
    q = turn[:, seen]
    c: Tensor = q @ ((q.mT @ right) / values[seen])
    return c, float(right @ c)

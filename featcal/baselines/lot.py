"""Merge by LOT Merging: layer by layer the task vector that changes the experts' own features least (Sun, Li, Wang,
Liu, Geng, Li, Towards Minimizing Feature Drift in Model Merging, arXiv 2505.23859, Sec. 4, Algorithm 1).

With X_k the inputs of a layer as expert k has them on its own samples, T_k = W_k - W_0, and sums over experts, what is
minimised is sum_k ||f(X_k; W_0 + T) - f(X_k; W_0 + T_k)||^2, layer by layer and operation by operation:

    linear map      T = (sum_k T_k G_k) (sum_k G_k)^+,  G_k = sum x x^T over all tokens but padding
    scale of a norm T = sum_k s_k T_k / sum_k s_k,      s_k = sum z^2, z the norm's output without scale and shift
    what is added   T = mean of T_k

and W = W_0 + `scale` T. In directions that no sample has, T is 0 and the base stays, where RegMean has the average:
that is what sets the two apart. The paper has scale 1 and tunes it (1.2 for ViT-B/32, 1.5 for L/14), with 64 samples.

The pseudo-inverse takes eigenvalues up to d * eps of the largest for 0, eps that of the features' dtype; the paper does
not say. Tensors outside the blocks get the mean of T_k; the paper treats a patch convolution as a linear map and outer
norms as norms.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from featcal.baselines.common.averages import average_changes
from featcal.baselines.common.baseline import FitInputs, Made, Sampled
from featcal.baselines.common.block_tensors import read_double
from featcal.baselines.common.task_grams import TaskGrams
from featcal.calibration.block_statistics import check_inputs
from featcal.calibration.linear_group import LinearGroup
from featcal.calibration.norm_groups import check_norm, normalised_sums
from featcal.calibration.store import prefix_errors, to_stored
from featcal.calibration.token_rows import TaskRows, lane_rows
from featcal.formats.weights import Overlay, Weights, all_finite
from featcal.models.adapter import Stage, walking
from featcal.models.context import Run
from featcal.models.lane import BlockStep, ExpertPass
from featcal.models.walk import BlockwiseForward
from featcal.suite.methods import SAMPLES, register_method
from featcal.suite.options import option
from featcal.system.errors import NumericalError


@register_method(
    "lot",
    "LOT Merging: the task vector that changes every layer's own features least",
    paper="2505.23859",
    needs=(SAMPLES,),
)
@dataclass(frozen=True)
class Lot(Sampled):
    scale: float = option(1.0, "factor of the merged task vector")

    def make(self, given: FitInputs) -> Made:
        return lot(given.run, given.experts, self), {}


def lot(run: Run, experts: Mapping[str, ExpertPass], options: Lot) -> Weights:
    """Merge the experts. Memory holds one block of the base, of the mean and of one expert with the sums of that block,
    and the merged part: the whole tower in the end, because the model is returned and not written.

    Args:
        experts: one expert pass per task; their batches are the samples.

    Raises:
        NumericalError: features that are not finite; the message names the map.
        InputError: an architecture that cannot be run block by block, a map that is not given one row per token, or a
            norm that is another function of its parameters.
    """
    under = average_changes(run, experts, options.scale)
    found: dict[str, Tensor] = {}
    with walking(run.adapter), run.seconds(options.kind):
        walk = BlockwiseForward(run, options.kind, experts, {})
        for stage in run.adapter.stages:
            walk.enter(stage)
            rows = lane_rows(stage, walk.experts, experts, options.counting)
            for index, block in walk.blocks(stage):
                sums = DriftSums(stage, index, run.compute.dtype)
                base = read_double(run, block, run.base)
                for task, tensors in walk.experts_at(block):
                    steps = walk.experts[task].walk(stage, block, tensors, inputs=sums.modules)
                    sums.count(steps, {name: tensors[name].double() - base[name] for name in base}, rows[task])
                with prefix_errors(run.adapter.name_of(block)):
                    solved = {name: base[name] + options.scale * vector for name, vector in sums.solve().items()}
                found |= to_stored(block, under.read(block.names), solved)
        walk.finish()
    return Overlay(f"merged model ({options.kind})", under, found)


class DriftSums:
    """The sums over experts for the linear maps and norms of one block."""

    def __init__(self, stage: Stage, index: int, dtype: torch.dtype) -> None:
        """Start without a task.

        Args:
            dtype: of the features; it sets the tolerance of the pseudo-inverse.
        """
        self._stage, self._index = stage, index
        # Sums are in float64, but no better than the features that they are made of.
        self._eps = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
        block = stage.blocks[index]
        scaled = block.modules_of(stage.norm) if stage.norm else {}
        self._norms: dict[str, nn.Module] = {**block.layernorms, **scaled}
        for name, norm in self._norms.items():
            check_norm(f"{block.name}.{name}", norm, stage.norm_offset)
        self.modules = (*block.linears, *self._norms)
        """Modules whose inputs are needed."""
        self._groups: list[LinearGroup] = []
        self._sums: dict[str, tuple[Tensor, Tensor]] = {}
        """Sums of the experts' weights, and of their task vectors times these, by name of the tensor."""

    def count(self, steps: Iterable[BlockStep], vectors: Mapping[str, Tensor], rows: TaskRows) -> None:
        """Count one task.

        Args:
            steps: the expert's block on every batch of the task, with the inputs of `modules`.
            vectors: its task vectors, by name inside the block, in float64.
        """
        # In float64: the pseudo-inverse sees small eigenvalues, which products in float32 would fill with rounding.
        grams = TaskGrams(self._stage, self._index)
        squares: dict[str, Tensor] = {}
        for step, tokens in zip(steps, rows.batches, strict=True):
            check_inputs(self._stage, self._index, step.inputs)
            grams.add({name: x for name, x in step.inputs.items() if name not in self._norms}, tokens)
            for name, norm in self._norms.items():
                own = tokens[self._stage.weighting(self._index, name)]
                given = self._stage.arrange_tokens(step.inputs[name])
                square = normalised_sums(norm, given, own, self._stage.norm_offset)[1].double()
                squares[name] = squares[name] + square if name in squares else square
        self._groups = self._groups or grams.groups
        for group in self._groups:
            gram = grams.sum(group)
            # Linear maps: G_k and T_k G_k.
            self._add(str(group), gram, group.stack(vectors, "weight") @ gram)
        for name, square in squares.items():
            # Scales of norms: s_k and s_k T_k, entry by entry.
            self._add(name, square, square * vectors[f"{name}.weight"])

    def _add(self, name: str, weight: Tensor, moved: Tensor) -> None:
        old = self._sums.get(name)
        self._sums[name] = (weight, moved) if old is None else (old[0] + weight, old[1] + moved)

    def solve(self) -> dict[str, Tensor]:
        """Solve T of every linear map and of every scale, by name of the tensor inside the block.

        Raises:
            NumericalError: features that are not finite.
        """
        for name, sums in self._sums.items():
            if not all(map(all_finite, sums)):
                raise NumericalError(f"{name}: features are not finite")
        found: dict[str, Tensor] = {}
        for group in self._groups:
            found |= group.split(task_matrix(*self._sums[str(group)], self._eps), "weight")
        for name in self._norms:
            square, moved = self._sums[name]
            found[f"{name}.weight"] = moved / square.where(square > 0, 1)
        return found


def task_matrix(gram_sum: Float[Tensor, "d d"], moved_sum: Float[Tensor, "m d"], eps: float) -> Float[Tensor, "m d"]:
    """Return (sum_k T_k G_k) (sum_k G_k)^+.

    Args:
        gram_sum: positive semi-definite.
        eps: relative accuracy of the features; eigenvalues up to d * eps of the largest count as 0.
    """
    values, vectors = torch.linalg.eigh(gram_sum)
    seen = values > len(values) * eps * values[-1]
    # In directions that no sample has T is 0, so the base stays there.
    q = vectors[:, seen]
    found: Tensor = (moved_sum @ q / values[seen]) @ q.mT
    return found

"""Merge by RegMean (Jin et al., arXiv 2212.09849), or by RegMean++ (arXiv 2508.03121).

A linear map W should map the experts' inputs as the experts' own maps W_i do: it minimises sum_i tr((W - W_i) G~_i (W -
W_i)^T), hence W = (sum_i W_i G~_i) (sum_i G~_i)^-1. G_i is the mean of x x^T over all tokens but padding, G~_i is G_i
with its off-diagonal entries times `reduce`. Everything else is averaged: biases, norms, embeddings, and linear maps
outside the blocks.

In RegMean x are the features of the expert alone. In RegMean++ they are what the expert's block makes of the features
of the merged model so far, which is why its blocks are solved one after the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from featcal.baselines.common.averages import average_experts
from featcal.baselines.common.baseline import FitInputs, Made, Sampled
from featcal.baselines.common.task_grams import TaskGrams
from featcal.calibration.closed_form import SolveError
from featcal.calibration.linear_group import LinearGroup
from featcal.calibration.store import prefix_errors, to_stored
from featcal.calibration.token_rows import TaskRows, lane_rows
from featcal.family.opening import Family
from featcal.formats.weights import Overlay, Weights, all_finite
from featcal.models.adapter import Block, Stage, walking
from featcal.models.context import Run
from featcal.models.lane import BlockStep, ExpertPass
from featcal.models.walk import BlockwiseForward
from featcal.suite.methods import SAMPLES, register_method
from featcal.suite.options import option
from featcal.system.errors import NumericalError

# With its diagonal scaled to 1, sum G~ has a condition number of at most 1 + d reduce / (1 - reduce).
FLOAT64_ABOVE = 0.99
"""Value of `reduce` above which products are formed in float64."""


_REDUCE: Mapping[str, float] = {"pixels": 0.95, "seq2seq": 0.1, "causal": 0.6, "text": 0.1}
"""Default of `reduce` by modality ("causal" for every decoder): FusionBench's values for CLIP and GPT-2, and
RegMean's value for T5, which encoders of text share.
"""


@register_method(
    "regmean",
    "RegMean: the linear maps that are nearest to every expert's on its own features. The default of `reduce` is 0.95 "
    "for "
    "pictures, 0.1 for T5 and encoders of text, 0.6 for decoders, as in their code (on t5-mini 0.9 is ten points "
    "better than 0.1)",
    paper="2212.09849",
    needs=(SAMPLES,),
)
@dataclass(frozen=True)
class RegMean(Sampled):
    reduce: float = option(
        0.95,
        "factor of the off-diagonal entries of every Gram matrix: 1 is the plain regression, 0 a weighted average by "
        "the energy of every input",
        least=0,
        most=1,
    )
    streamed: ClassVar[bool] = False
    """True if features are those of the merged model so far."""

    @classmethod
    def defaults(cls, family: Family) -> dict[str, Any]:
        modality = "causal" if family.adapter.causal else family.adapter.modality
        return super().defaults(family) | {"reduce": _REDUCE[modality]}

    def make(self, given: FitInputs) -> Made:
        return regmean(given.run, given.experts, self), {}


def regmean(run: Run, experts: Mapping[str, ExpertPass], options: RegMean) -> Weights:
    """Merge the experts, in the base's dtype. Memory holds one block of one or two experts and of the merged model with
    the sums of that block, and the merged part: the whole tower in the end, because the model is returned and not
    written.

    Args:
        experts: one expert pass per task; their batches are the samples.

    Raises:
        NumericalError: features that are not finite, or too few samples for a `reduce` of 1; the message names the
            maps.
        InputError: an architecture that cannot be run block by block, or a map that is not given one row per token.
    """
    average = average_experts(run, experts)
    streamed = options.streamed
    own = {task: one.copy_for_one_walk(average) for task, one in experts.items()}
    solved: dict[str, Tensor] = {}
    with walking(run.adapter), run.seconds(options.kind):
        walk = BlockwiseForward(run, options.kind, own if streamed else experts, {})
        for stage in run.adapter.stages:
            walk.enter(stage)
            rows = lane_rows(stage, walk.experts, experts, options.counting)
            for index, block in walk.blocks(stage):
                sums = RegressionSums(stage, index, options.reduce)
                for task, tensors in _experts_at(run, walk, experts, block):
                    steps = walk.experts[task].walk(stage, block, tensors, inputs=block.linears, move=not streamed)
                    sums.count(steps, tensors, rows[task])
                merged = average.read(block.names)
                with prefix_errors(run.adapter.name_of(block)):
                    found = sums.solve(block.local(run.compute.move(merged)))
                found = merged | to_stored(block, merged, found)
                solved |= found
                if streamed:
                    walk.deploy_block(stage, block, found)
        walk.finish()
    return Overlay(f"merged model ({options.kind})", average, solved)


def _experts_at(
    run: Run, walk: BlockwiseForward, experts: Mapping[str, ExpertPass], block: Block
) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield every task with its expert's tensors of a block, whichever model is walked."""
    if all(walk.experts[task].weights is one.weights for task, one in experts.items()):
        yield from walk.experts_at(block)
        return
    for task, one in experts.items():
        yield task, block.local(run.compute.move(one.weights.read(block.names)))


class RegressionSums:
    """The sums over experts of G~ and of W G~ for the linear maps of one block."""

    def __init__(self, stage: Stage, index: int, reduce: float) -> None:
        self._stage, self._index, self._reduce = stage, index, reduce
        self._groups: list[LinearGroup] = []
        self._sums: dict[tuple[str, ...], tuple[Tensor, Tensor]] = {}

    def count(self, steps: Iterable[BlockStep], expert: Mapping[str, Tensor], rows: TaskRows) -> None:
        """Count one task.

        Args:
            steps: the expert's block on every batch of the task, with the inputs of its linear maps.
            expert: its tensors of the block, by name inside it.
        """
        grams = TaskGrams(self._stage, self._index, torch.float64 if self._reduce > FLOAT64_ABOVE else None)
        for step, tokens in zip(steps, rows.batches, strict=True):
            grams.add(step.inputs, tokens)
        self._groups = self._groups or grams.groups
        for group in self._groups:
            mean = grams.mean(group)
            # G~ between the diagonal alone (reduce 0) and G itself (1).
            scaled = torch.lerp(mean.diagonal().diag(), mean, self._reduce)
            answers = group.stack(expert, "weight") @ scaled
            old = self._sums.get(group.names)
            self._sums[group.names] = (scaled, answers) if old is None else (old[0] + scaled, old[1] + answers)

    def solve(self, average: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Solve the weights of every linear map, by name inside the block.

        Args:
            average: the mean of the experts' tensors of the block, which remains where no expert has features.
        """
        solved: dict[str, Tensor] = {}
        for group in self._groups:
            left, answers = self._sums.pop(group.names)
            if not (all_finite(left) and all_finite(answers)):
                raise NumericalError(f"{group}: features are not finite")
            try:
                weight = merged_weight(left, answers, group.stack(average, "weight"))
            except SolveError as error:
                raise NumericalError(f"{group}: {error}; lower reduce or use more samples") from error
            solved |= group.split(weight, "weight")
        return solved


def merged_weight(gram_sum: Tensor, answer_sum: Tensor, average: Tensor) -> Tensor:
    """Return the W nearest to `average` that minimises sum_i tr((W - W_i) G~_i (W - W_i)^T).

    Args:
        gram_sum: sum_i G~_i, `[d, d]`, positive semi-definite.
        answer_sum: sum_i W_i G~_i, `[m, d]`.
        average: `[m, d]`; its column stays for an input that is 0 in all samples.

    Raises:
        SolveError: the matrix is singular in other directions too.
    """
    # An input that is always 0 gets a 1 on the diagonal: its column of the average then stays.
    unused = gram_sum.diagonal() == 0
    factor, info = torch.linalg.cholesky_ex(gram_sum + unused.to(gram_sum).diag())
    # Share of an input that earlier ones do not determine: rounding alone lets Cholesky succeed.
    alone = factor.diagonal().square() / (gram_sum.diagonal() + unused)
    if int(info) != 0 or bool((alone < len(factor) * torch.finfo(factor.dtype).eps).any()):
        raise SolveError("the sum of the Gram matrices is singular: input features are linearly dependent")
    # The change from the average is solved for: where the right side is 0 the average stays exactly.
    return average + torch.cholesky_solve((answer_sum - average @ gram_sum).mT, factor).mT

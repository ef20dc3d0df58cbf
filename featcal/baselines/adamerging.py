"""Merge by AdaMerging, layer-wise: train one coefficient per task and tensor for confident predictions (Yang, Wang,
Shen, Liu, Guo, Wang, Tao, AdaMerging, arXiv 2310.02575).

    theta^k = theta_0^k + sum_i l_ik (theta_i^k - theta_0^k),

with l = 0.3 at first and steps of Adam on the entropy of the merged model's predictions: its mean over some unlabelled
samples of a task, summed over tasks. Of text the predictions are of the first token of the answer.

The published method does this on *test* inputs; that is `adamerging-test` here. `adamerging` sees calibration samples.
As in FusionBench there are 1000 steps with 16 samples of every task and coefficients are free; the authors' code takes
500 steps of two such batches and keeps coefficients within [0, 1].
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from featcal.baselines.common.averages import average_experts
from featcal.baselines.common.baseline import FitInputs, Made, Trained
from featcal.baselines.common.gradients import draw_batches, log_probabilities
from featcal.evaluation.evaluate import heads_of
from featcal.formats.weights import Overlay, Weights
from featcal.models.adapter import walking
from featcal.models.context import Run
from featcal.models.lane import ExpertPass
from featcal.models.model import Head
from featcal.models.whole_forward import Sample, batch_by_shape, final, samples_of
from featcal.suite.methods import SAMPLES, TRAINING, register_method
from featcal.system.errors import NumericalError

START = 0.3


@register_method(
    "adamerging",
    "AdaMerging, layer-wise: coefficients trained for a low entropy of predictions on calibration inputs; slow, since "
    "every step needs all layers",
    paper="2310.02575",
    needs=(
        SAMPLES,
        TRAINING,
    ),
    compared=("adamerging:steps=200,seed=42",),
)
@dataclass(frozen=True)
class AdaMerging(Trained):
    def make(self, given: FitInputs) -> Made:
        scored = dict.fromkeys(given.experts, given.family.base)
        return adamerging(given.run, given.experts, heads_of(given.family, scored, self.split), self)


def adamerging(
    run: Run, experts: Mapping[str, ExpertPass], heads: Mapping[str, Head | None], options: AdaMerging
) -> tuple[Weights, dict[str, Any]]:
    """Merge the experts; return the merge, the coefficients by task and tensor, and the entropy on all samples before
    and after.

    Memory holds the tower three times and once more for every expert: every step needs all layers and task vectors.

    Args:
        experts: one expert pass per task; their batches are the samples.
        heads: of `heads_of`, for a merged model.

    Raises:
        NumericalError: the entropy is not finite.
    """
    names = run.adapter.tower
    merge = Merge(run, experts)
    tasks = [samples_of(one) for one in experts.values()]
    samples = [one for own in tasks for one in own]
    optimizer = torch.optim.Adam([merge.coefficients], lr=options.rate)
    with walking(run.adapter), run.seconds(options.kind):
        before = _entropy(run, merge.tensors(), samples, heads)
        for step, few in enumerate(draw_batches(tasks, options.steps, options.batch, options.seed)):
            run.progress(options.kind, step, options.steps)
            tensors = {name: tensor.requires_grad_() for name, tensor in merge.tensors().items()}
            with torch.enable_grad():
                _entropy(run, tensors, [one for own in few for one in own], heads)
            # By hand, so that autograd keeps no graph from the coefficients to all merged tensors.
            merge.coefficients.grad = merge.gradient(tensors)
            optimizer.step()
        found = merge.tensors()
        after = _entropy(run, found, samples, heads)
        run.progress(options.kind, options.steps, options.steps)
    under = average_experts(run, experts)
    stored = {name: tensor.to(under.info[name].dtype) for name, tensor in found.items()}
    account = {
        "coefficients": {
            task: dict(zip(names, row, strict=True))
            for task, row in zip(experts, merge.coefficients.tolist(), strict=True)
        },
        "split": options.split,
        "entropy_before": before,
        "entropy": after,
    }
    return Overlay(f"merged model ({options.kind})", under, stored), account


class Merge:
    """A merge by coefficients, with the tensors for their gradient."""

    def __init__(self, run: Run, experts: Mapping[str, ExpertPass]) -> None:
        def load(weights: Weights) -> dict[str, Tensor]:
            return run.compute.place(weights.read(run.adapter.tower))

        self._base = load(run.base)
        self._vectors = [
            {name: tensor - self._base[name] for name, tensor in load(one.weights).items()} for one in experts.values()
        ]
        self.coefficients = torch.full((len(experts), len(self._base)), START, dtype=torch.float64)
        """`[tasks, tensors]`"""

    def tensors(self) -> dict[str, Tensor]:
        """Recompute the merged weights theta from the coefficients."""
        found = {}
        for k, (name, base) in enumerate(self._base.items()):
            found[name] = base.clone()
            for vectors, own in zip(self._vectors, self.coefficients[:, k].tolist(), strict=True):
                # In place: a new tensor per task would hold the tower once more.
                found[name].add_(vectors[name], alpha=own)
        return found

    def gradient(self, tensors: Mapping[str, Tensor]) -> Float[Tensor, "tasks tensors"]:
        """Return the gradient of the coefficients from that of the merged tensors; 0 if there is none."""
        found = torch.zeros_like(self.coefficients)
        for k, (name, tensor) in enumerate(tensors.items()):
            own = tensor.grad
            if own is not None:
                for i, vectors in enumerate(self._vectors):
                    # The chain rule: d theta^k / d l_ik is the task vector.
                    found[i, k] = float((vectors[name] * own).sum())
        return found


def _entropy(
    run: Run, tensors: Mapping[str, Tensor], samples: Sequence[Sample], heads: Mapping[str, Head | None]
) -> float:
    """Return the entropy of the predictions, its mean over the samples of a task, summed over tasks; if gradients are
    enabled, add its own to those of the tensors."""
    total, counts = 0.0, Counter(one.task for one in samples)
    for batch, some in batch_by_shape(samples):
        features, parts = final(run, tensors, batch), []
        for task, rows in groupby(range(len(some)), key=lambda row: some[row].task):
            logs = log_probabilities(run, tensors, features[[*rows]], heads[task])
            parts.append(-(logs.exp() * logs).sum() / counts[task])
        part = torch.stack(parts).sum()
        if part.requires_grad:
            # Batch by batch: the graph of one batch alone is in memory.
            torch.autograd.backward(part)
        total += float(part.detach())
    if not math.isfinite(total):
        raise NumericalError(f"adamerging: the entropy is {total}; lower the rate")
    return total

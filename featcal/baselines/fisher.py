"""Merge by Fisher merging: average every parameter of the experts by how much their predictions depend on it
(Matena, Raffel, Merging Models with Fisher-Weighted Averaging, arXiv 2111.09832).

    theta = sum_i F_i theta_i / sum_i F_i,    F_i = mean over x of E_{y ~ p_i(y | x)} (d log p_i(y | x) / d theta)^2,

entry by entry: the diagonal of the Fisher information, of every expert on samples of its own task. The expectation is
over the expert's own predictions, so no labels are needed; of text y is the first token of the answer. The gradient is
squared sample by sample and label by label. Where nothing depends on a parameter, in any expert, it is their mean.

Of up to `labels` labels the expectation is exact; of more, the most probable ones count with their probabilities, and
one that is drawn among the others stands for all of these, which leaves the estimate unbiased. The paper's weights of
the experts are 1 here. FusionBench squares one gradient per batch of 32, that of sum_x sum_y sqrt(p) log p, in which
products of different samples and labels stay; adds 1e-6; and divides by the norm of F_i, as `normalize` does here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from featcal.baselines.common.averages import average_experts
from featcal.baselines.common.baseline import FitInputs, Made, Sampled
from featcal.baselines.common.gradients import log_probabilities
from featcal.evaluation.evaluate import heads_of
from featcal.formats.weights import Overlay, Weights, all_finite
from featcal.models.adapter import walking
from featcal.models.context import Run
from featcal.models.lane import ExpertPass
from featcal.models.model import Head, map_features
from featcal.models.whole_forward import final, samples_of
from featcal.suite.methods import SAMPLES, register_method
from featcal.suite.options import option
from featcal.system.errors import NumericalError

_TOGETHER = 2**26
"""Bytes for the gradients of several labels together; in a larger tower labels are taken one by one."""


@register_method(
    "fisher",
    "Fisher merging: parameters averaged by how much the experts' own predictions depend on them, sample by sample",
    paper="2111.09832",
    needs=(SAMPLES,),
    compared=("fisher:seed=42",),
)
@dataclass(frozen=True)
class Fisher(Sampled):
    labels: int = option(
        16,
        "number of labels per sample whose gradients are taken; with no more labels than that, the expectation is "
        "exact",
        least=2,
    )
    calibrations: ClassVar[float] = 10.0
    normalize: bool = option(False, "divide every expert's information by its norm, so that none outweighs others")

    def make(self, given: FitInputs) -> Made:
        return fisher(given.run, given.experts, heads_of(given.family, given.family.experts, self.split), self), {}


def fisher(run: Run, experts: Mapping[str, ExpertPass], heads: Mapping[str, Head | None], options: Fisher) -> Weights:
    """Merge the experts, in the base's dtype.

    Memory holds the tower of one expert three times (weights, gradient, information), and mean and two sums over
    experts in float64.

    Args:
        experts: one expert pass per task; their batches are the samples.
        heads: of `heads_of`, for the experts.

    Raises:
        NumericalError: an expert's information is not finite.
    """
    average, names = average_experts(run, experts), run.adapter.tower
    mean = {name: tensor.to(run.compute.device, torch.float64) for name, tensor in average.read(names).items()}
    mass, moved = ({name: torch.zeros_like(tensor) for name, tensor in mean.items()} for _ in range(2))
    with walking(run.adapter), run.seconds(options.kind):
        for done, (task, one) in enumerate(experts.items()):
            run.progress(options.kind, done, len(experts))
            tensors = {
                name: t.detach().requires_grad_() for name, t in run.compute.place(one.weights.read(names)).items()
            }
            found = information(run, one, tensors, heads[task], options)
            if not all(all_finite(tensor) for tensor in found.values()):
                raise NumericalError(f"{options.kind}: the Fisher information of expert '{task}' is not finite")
            scale = _norm(found) if options.normalize else 1.0
            for name, values in found.items():
                weight = values.double() / (scale or 1.0)
                mass[name] += weight
                # Differences from the mean: where nothing depends on a parameter the sum is 0, and the mean stays.
                moved[name] += weight * (tensors[name].detach().double() - mean[name])
        run.progress(options.kind, len(experts), len(experts))
    stored = average.read(names)
    merged = {name: mean[name] + moved[name] / mass[name].where(mass[name] > 0, 1) for name in names}
    return Overlay(f"merged model ({options.kind})", average, {n: t.to(stored[n]) for n, t in merged.items()})


def information(
    run: Run, one: ExpertPass, tensors: Mapping[str, Tensor], head: Head | None, options: Fisher
) -> dict[str, Tensor]:
    """Measure F of one expert on its samples, by tensor.

    Args:
        tensors: of the expert's tower, in the form of the forward pass, with gradients.
    """
    total = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    generator = torch.Generator().manual_seed(options.seed)
    samples, wanted = samples_of(one), [*tensors.values()]
    together = max(1, _TOGETHER // sum(tensor.nbytes for tensor in wanted))
    for sample in samples:
        with torch.enable_grad():
            features = map_features(one.weights, one.task, final(run, tensors, sample.inputs))
            logs = log_probabilities(run, tensors, features, head)[0]
        # On the CPU in float64: every device draws the same labels.
        labels, shares = labels_of(logs.detach().double().exp().cpu(), options.labels, generator)
        for some, weights in zip(*(torch.split(one, together) for one in (labels, shares)), strict=True):
            chosen = torch.nn.functional.one_hot(some.to(logs.device), len(logs)).to(logs)
            gradients = torch.autograd.grad(
                logs, wanted, chosen, retain_graph=True, allow_unused=True, is_grads_batched=True
            )
            # Squared label by label: products of different samples and labels would not be F.
            weights = weights.to(logs) / len(samples)
            for name, gradient in zip(total, gradients, strict=True):
                if gradient is not None:
                    total[name] += torch.tensordot(weights, gradient.square_(), 1)
    return total


def labels_of(
    p: Float[Tensor, " c"], most: int, generator: torch.Generator
) -> tuple[Int[Tensor, " l"], Float[Tensor, " l"]]:
    """Choose labels, with their shares of an expectation over p: all, or the most probable ones and a sample of the
    others."""
    if len(p) <= most:
        return torch.arange(len(p)), p
    top = p.topk(most - 1).indices
    rest = p.index_fill(0, top, 0)
    mass = rest.sum()
    # One drawn label carries the mass of all others, so the estimate is unbiased.
    other = torch.multinomial(rest if mass > 0 else torch.ones_like(rest), 1, generator=generator)
    return torch.cat([top, other]), torch.cat([p[top], mass[None]])


def _norm(tensors: Mapping[str, Tensor]) -> float:
    return float(torch.stack([tensor.double().norm() for tensor in tensors.values()]).norm())

"""Calibrate singular values (arXiv 2602.05536): scale back directions in which task vectors add up, and others up.

For every matrix of a merged model the task vector is decomposed, D = W - W_0 = U S V^T. Along the left singular vector
u_r the model's response is a_r = u_r^T D, an expert with a_r^i = u_r^T (W_i - W_0), and s_r^i = <a_r, a_r^i> /
||a_r^i||^2 says how much of its answer is in the model's. The singular value is divided by the mean of max(alpha,
s_r^i) over the experts. No data are needed.

Experts that answer with nothing along u_r, such as those whose matrix is the base's, do not count there; the paper does
not say. FusionBench's code projects every expert on its own singular vectors, not on the model's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from featcal.baselines.common.baseline import Baseline, FitInputs, Made
from featcal.formats.weights import Overlay, Weights
from featcal.models.context import Run
from featcal.suite.methods import register_method
from featcal.suite.options import option


@register_method(
    "svc",
    "singular value calibration of a merged model: directions in which task vectors add up are scaled back",
    paper="2602.05536",
)
@dataclass(frozen=True)
class Svc(Baseline):
    alpha: float = option(
        0.1, "smallest share of an expert's response that counts; by default FusionBench's for Task Arithmetic", above=0
    )
    on_another: ClassVar[bool] = True

    def make(self, given: FitInputs) -> Made:
        return svc(given.run, given.family.experts, given.family.merged, self), {}


def svc(run: Run, experts: Mapping[str, Weights], model: Weights, options: Svc) -> Weights:
    """Calibrate every matrix of the tower of a model; other tensors stay.

    Memory holds one matrix of the base, the model and one expert in float64, and the calibrated part: the whole tower
    in the end, because the model is returned and not written.
    """
    shapes, found = run.adapter.shapes(), dict[str, Tensor]()
    matrices = [name for name in run.adapter.tower if len(shapes[name]) == 2]

    turned = run.adapter.transposed_weights

    def read(weights: Weights, name: str) -> Tensor:
        stored = weights.read([name])[name].to(run.compute.device, torch.float64)
        return stored.mT if name in turned else stored

    with run.seconds(options.kind), torch.no_grad():
        for done, name in enumerate(matrices):
            run.progress(options.kind, done, len(matrices))
            own = model.read([name])[name]
            theirs = (read(one, name) for one in experts.values())
            new = calibrate_matrix(read(run.base, name), read(model, name), theirs, options.alpha)
            found[name] = (new.mT if name in turned else new).to(own)
        run.progress(options.kind, len(matrices), len(matrices))
    return Overlay(f"{model.label}, {options.kind}", model, found)


def calibrate_matrix(
    base: Float[Tensor, "m d"], merged: Float[Tensor, "m d"], experts: Iterable[Float[Tensor, "m d"]], alpha: float
) -> Float[Tensor, "m d"]:
    """Calibrate the singular values of one matrix; the experts' matrices are read one at a time.

    >>> zero, one = torch.zeros(2, 2), torch.eye(2)
    >>> calibrate_matrix(zero, 2 * one, [one, one], alpha=0.1).tolist()  # two experts that agree were added up
    [[1.0, 0.0], [0.0, 1.0]]
    """
    delta = merged - base
    left: Tensor = torch.linalg.svd(delta, full_matrices=False).U
    own = left.mT @ delta
    total, counted = own.new_zeros(len(own)), own.new_zeros(len(own))
    for expert in experts:
        theirs = left.mT @ (expert - base)
        energy = theirs.square().sum(1)
        answers = energy > 0
        # s_r^i: how much of the expert's answer is in the model's.
        share = (own * theirs).sum(1) / energy.where(answers, 1)
        total += share.clamp_min(alpha) * answers
        counted += answers
    # The inverse of the mean; a direction in which no expert answers stays.
    factor: Tensor = torch.where(counted > 0, counted / total.where(counted > 0, 1), 1)
    # u_r a_r is the r-th component of D, so scaling a_r scales the singular value.
    return merged + left @ ((factor - 1)[:, None] * own)

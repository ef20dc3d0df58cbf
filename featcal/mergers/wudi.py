"""Merge by WUDI-Merging: find the task matrix whose differences from the experts' task matrices act least on the
experts' inputs (Cheng, Xiong, Wei, Zhu, Yuan, Whoever Started the Interference Should End It, arXiv 2503.08099).

For every matrix, minimise over t in R^{m x d}, with tau_i = theta_i - theta_0,

    L(t) = sum_i ||(t - tau_i) tau_i^T||^2 / ||tau_i||^2,

whose gradient is 2 (t A - B), A = sum_i K_i, B = sum_i tau_i K_i, K_i = tau_i^T tau_i / ||tau_i||^2. The
published method takes steps of Adam from t = sum_i tau_i. The result depends on the number of steps: an entry moves by
at most about steps * 1e-5, so the result lies between Task Arithmetic at scale 1 and the minimiser, and close to Task
Arithmetic if the experts moved much farther than that. `wudi_optimum` computes the minimiser itself; its numbers
differ.

Other tensors are averaged, as in FusionBench; the authors' code keeps the base's for them, and for every matrix outside
of attention and MLP. The method has no scale.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from featcal.mergers.common.merger import merger
from featcal.suite.methods import TRAINING
from featcal.suite.options import option

RATE = 1e-5


@merger(
    "wudi",
    "WUDI as published, for reference: steps of Adam from the summed task matrices towards the least interference",
    paper="2503.08099",
    needs=(TRAINING,),
    matrices=True,
)
def wudi(changes: Sequence[Tensor], *, steps: int = option(300, "steps of Adam", least=0)) -> Tensor:
    """Return the task matrix t after the given number of Adam steps at rate 1e-5 from the sum of the task matrices."""
    a, b = normal_equations(changes)
    # Of a single expert the sum is its own tensor, which Adam would change in place.
    t = sum(changes[1:], changes[0].clone())
    adam = torch.optim.Adam([t], lr=RATE)
    for _ in range(steps):
        # The gradient in closed form: nothing has to be differentiated.
        t.grad = 2 * (t @ a - b)
        adam.step()
    return t


def normal_equations(changes: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return A `[d, d]` and B `[m, d]`; a task matrix that is 0 adds nothing to them."""
    m, d = changes[0].shape
    a, b = changes[0].new_zeros(d, d), changes[0].new_zeros(m, d)
    for change in changes:
        mass = change.square().sum()
        if mass > 0:
            gram = change.T @ change / mass
            a += gram
            b += change @ gram
    return a, b

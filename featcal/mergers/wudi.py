"""WUDI-Merging: the task matrix whose differences from those of the experts act least on what these read (Cheng, Xiong,
Wei, Zhu, Yuan, Whoever Started the Interference Should End It, arXiv 2503.08099).

For every matrix, minimise over t in R^{m x d}, with tau_i = theta_i - theta_0,

    L(t) = sum_i ||(t - tau_i) tau_i^T||^2 / ||tau_i||^2,

whose gradient is 2 (t A - B), A = sum_i K_i, B = sum_i tau_i K_i, K_i = tau_i^T tau_i / ||tau_i||^2. `descend` is the
published method: steps of Adam from t = sum_i tau_i. It is defined by where it stops: an entry moves by at most about
steps * 1e-5, which leaves it between Task Arithmetic at scale 1 and the minimiser, and close to the former where the
experts moved much farther than that. `minimise` is the minimiser itself, in closed form, which is another merge with
other numbers: RegMean of the task matrices with the Gram matrices K_i.

What is no matrix is averaged, as in FusionBench; the authors' code leaves it, and every matrix outside of attention and
MLP, as in the base. There is no scale.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

DEFAULT_STEPS = 300
RATE = 1e-5
DEFAULT_TIME = 256.0


def descend(changes: Sequence[Tensor], steps: int | None) -> Tensor:
    """t after `steps` (300 when None) of Adam at rate 1e-5 from the sum of the task matrices, `[m, d]`."""
    a, b = normal_equations(changes)
    t = sum(changes[1:], changes[0].clone())
    adam = torch.optim.Adam([t], lr=RATE)
    for _ in range(DEFAULT_STEPS if steps is None else steps):
        t.grad = 2 * (t @ a - b)
        adam.step()
    return t


def minimise(changes: Sequence[Tensor]) -> Tensor:
    """The minimiser of L that is nearest to the sum of the task matrices, `[m, d]`.

    It is where the flow of `follow_flow` ends: in directions in which no task matrix reads anything, L does not depend
    on t, and t_0 stays.
    """
    return follow_flow(changes, math.inf, 1.0)


def follow_flow(changes: Sequence[Tensor], time: float | None, share: float | None) -> Tensor:
    """t at a time of the gradient flow from the sum of the task matrices, in the strongest directions alone, `[m, d]`.

    With A = Q diag(l) Q^T it is t_0 - (t_0 A - B) Q_K diag((1 - e^(-s l)) / l) Q_K^T. Eigenvalues up to d * eps of the
    largest are taken for 0: there the flow stands still.

    Args:
        time: s, >= 0, 256 when None; 0 is the sum of the task matrices, infinity the minimiser.
        share: of the d eigenvectors, those with the largest eigenvalues, that are followed, in [0, 1]; all when None.
    """
    a, b = normal_equations(changes)
    start = sum(changes[1:], changes[0])
    values, vectors = torch.linalg.eigh(a)
    kept = round(len(values) * (1.0 if share is None else share))
    seen = values > len(values) * torch.finfo(values.dtype).eps * values[-1]
    seen[: len(values) - kept] = False
    q, strength = vectors[:, seen], values[seen]
    moved = -torch.expm1(-strength * (DEFAULT_TIME if time is None else time)) / strength
    step: Tensor = ((start @ a - b) @ q * moved) @ q.T
    return start - step


def normal_equations(changes: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """A `[d, d]` and B `[m, d]`; a task matrix that is 0 asks for nothing."""
    m, d = changes[0].shape
    a, b = changes[0].new_zeros(d, d), changes[0].new_zeros(m, d)
    for change in changes:
        mass = change.square().sum()
        if mass > 0:
            gram = change.T @ change / mass
            a += gram
            b += change @ gram
    return a, b

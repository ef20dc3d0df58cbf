"""Merge by ACE-Merging: weight each task by the covariance of its inputs, estimated from its own task matrix (Xu, Wu,
Lin, Huang, Zhu, Shu, Qin, Data-Free Model Merging with Adaptive Covariance Estimation, CVPR 2026, arXiv 2603.02945).

With tau_t = theta_t - theta_0 in R^{m x d} of T tasks, the rows of tau_t less their mean, C_t (Eq. 5), are samples of
covariance S_t = C_t^T C_t (Eq. 6). Apart from a prior P the merge minimises sum_t tr((W - tau_t) R_t (W - tau_t)^T),
which makes it (Eqs. 11, 14)

    W = (sum_t tau_t R_t) (sum_t R_t + P)^-1,    P = 1 c^T,    c^T = 1^T (sum_t S~_t) / d.

Experts count as alike where Var_t[log ||tau_t||^2] <= 0.3 (E_t[log ||tau_t||^2])^2 (Eq. 7; the variance is that of
these T numbers). Then S~_t = S_t and R_t = S_t + eps I (Eqs. 10, 15). Where they are unlike (Eqs. 8, 9, 12, 13),

    S~_t = S_t / tr S_t,    R_t = S~_t + eps / tr S_t I,    and P is divided by the mean of ||tau_t||^2;

and with R the mean of R_t (Eq. 16) a second term is added to W: of W + sum_t tau_t (S~_t - R) = U S V^T (Eq. 17) the
strongest 0.3 of its directions, one at least, each with the mean of their singular values (Eqs. 18, 19).

P is not symmetric, and because of it W of a single expert is not the expert.

The paper leaves two cases open. A task that did not change a matrix is left out for that matrix; where no task changed
it, the result is 0. Where the rows of tau_t are all the same, to rounding, S_t has trace 0 and is not divided. Other
tensors are averaged. In the paper eps is 1e-5, but 4e-2 for GPT-2 and 2e-4 for RoBERTa-base. The method has no scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from featcal.mergers.common.merger import merger
from featcal.mergers.common.singular import largest_singular
from featcal.suite.options import option

UNLIKE = 0.3
"""Threshold tau of Eq. 7: experts whose relative variance of log norms is above it count as unlike."""
STRONGEST = 0.3
"""Share k_frac of the directions that are kept in the second term (Eq. 18)."""
_LINALG: Any = torch.linalg


@merger(
    "ace",
    "ACE-Merging: the closed form of RegMean, with covariances of inputs estimated from the task matrices",
    paper="2603.02945",
    matrices=True,
)
def ace(
    changes: Sequence[Tensor],
    *,
    scale: float = option(1.0, "factor of the merged task matrix"),
    eps: float = option(1e-5, "ridge strength, in the unit of the weights squared", above=0),
) -> Tensor:
    moved = [change for change in changes if bool(change.any())]
    if not moved:
        return torch.zeros_like(changes[0])
    apart, d = unlike(moved), moved[0].shape[1]
    covariances, answers, pulled = moved[0].new_zeros(d, d), torch.zeros_like(moved[0]), torch.zeros_like(moved[0])
    ridge = moved[0].new_zeros(())
    for change in moved:
        covariance, share = _covariance(change, apart)
        covariances += covariance
        # Eq. 14 with tau_t and not C_t: without a prior (Eq. 3) the experts' weights stand here.
        answers += change @ covariance
        ridge += eps * share
        pulled += eps * share * change
    # Beside a larger trace the ridge would be rounded away, and the system would be singular unnoticed.
    if not bool(ridge > d * torch.finfo(ridge.dtype).eps * covariances.trace()):
        raise _LINALG.LinAlgError(f"eps of {eps:g} is lost in rounding beside the covariances; raise it")
    prior = covariances.mean(0) / (_squares(moved).mean() if apart else 1)  # c: a row of P
    covariances.diagonal().add_(ridge)  # sum R_t from here on
    # Not Cholesky: P = 1 c^T makes the matrix unsymmetric (Eqs. 11, 14).
    merged: Tensor = torch.linalg.solve(covariances + prior, answers + pulled, left=False)
    if apart:
        # Eq. 17: `answers` is sum tau_t S~_t, and the mean of R_t times the sum of tau_t is taken from it.
        total = sum(moved[1:], moved[0])
        merged += strongest(merged + answers - total @ covariances / len(moved))
    return scale * merged


def unlike(changes: Sequence[Tensor]) -> bool:
    """Say whether the norms of task matrices, none of them 0, differ so much that
    covariances are normalised (Eq. 7).
    """
    logs = _squares(changes).log()
    return bool(logs.var(correction=0) > UNLIKE * logs.mean().square())


def strongest(matrix: Tensor) -> Tensor:
    """Return the strongest directions of a matrix `[m, d]`, each with the mean of their
    singular values (Eqs. 18-19).
    """
    u, s, vh = largest_singular(matrix)
    k = max(1, int(STRONGEST * len(s)))
    return s[:k].sum() / max(1, len(s[:k])) * (u[:, :k] @ vh[:k])


def _squares(changes: Sequence[Tensor]) -> Tensor:
    """Return the squared norms ||tau_t||^2 of the task matrices, `[t]`."""
    return torch.stack([change.square().sum() for change in changes])


def _covariance(change: Tensor, normalised: bool) -> tuple[Tensor, Tensor]:
    """Return the covariance S~ `[d, d]` of a task matrix, and the factor of eps in its ridge term."""
    centred = change - change.mean(0)
    trace = centred.square().sum()
    # A trace that is rounding alone must not be divided by: the rows are all the same.
    rounding = len(change) * torch.finfo(change.dtype).eps * change.norm()
    scale = trace if normalised and trace > rounding.square() else torch.ones_like(trace)
    return centred.mT @ (centred / scale), 1 / scale

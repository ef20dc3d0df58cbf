"""Solve the closed forms of FeatCal (Eqs. 11, 14, 17, 55, 59): pure functions of tensors, nothing else.

Conventions: a linear map has weight W `[m, d]`; features are columns in the paper and rows here; a sum over
tasks is already taken where an argument is called `…_sum`. Functions compute in the dtype of their arguments.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

Affine = tuple[Float[Tensor, " d"], Float[Tensor, " d"]]
"""Scale gamma and shift beta of a norm, or a pair of values for them."""


class SolveError(ArithmeticError):
    """The left matrix of Eq. (17) is not positive definite in this precision."""


def anchor(merged: Tensor, base: Tensor, rho: float) -> Tensor:
    """Return the anchor of the ridge, Eqs. (11) and (51): `rho * merged + (1 - rho) * base`; any real rho."""
    return torch.lerp(base, merged, rho)


def task_weight(gram_norm: Float[Tensor, ""], eps: float) -> Float[Tensor, ""]:
    """Return omega = 1 / max(||G||_F, eps), Eq. (14), which makes tasks count equally whatever the scale of their
    features; NaN for a norm that is not finite."""
    # 1 / inf would be 0: a task with broken features must not drop out without a word.
    return torch.where(gram_norm.isfinite(), 1.0 / gram_norm.clamp_min(eps), torch.nan)


def linear_weight(
    gram_sum: Float[Tensor, "d d"],
    target_sum: Float[Tensor, "m d"],
    anchor: Float[Tensor, "m d"],
    lam: float,
    eps: float,
) -> Float[Tensor, "m d"]:
    """Return the minimiser of the ridge objective of Eq. (15), that is Eq. (17).

    Several linear maps that share an input are solved together by stacking their rows.

    Args:
        gram_sum: sum over tasks of omega_i G_i; symmetric, positive semi-definite; its lower triangle is read.
        target_sum: sum over tasks of omega_i W_i C_i.
        anchor: see `anchor`.
        lam: ridge strength, >= 0.
        eps: stabiliser on the left matrix only, as in the paper; along directions without data the solution
            is therefore lam / (lam + eps) times the anchor.

    Raises:
        SolveError: the left matrix is not positive definite; no pseudo-inverse is ever substituted.

    >>> one = torch.eye(2, dtype=torch.float64)
    >>> linear_weight(3 * one, 7 * one, one, lam=1.0, eps=0.0).tolist()
    [[2.0, 0.0], [0.0, 2.0]]
    """
    return weight_by_factor(left_factor(gram_sum.clone, lam, eps), target_sum, anchor, lam)


def left_factor(left: Callable[[], Float[Tensor, "d d"]], lam: float, eps: float) -> Float[Tensor, "d d"]:
    """Return L, lower triangular, of the left matrix of Eq. (17): L L^T = sum of omega_i G_i + (lam + eps) I.

    Args:
        left: returns the sum of omega_i G_i, of which the lower triangle is read; L overwrites it in memory.

    Raises:
        SolveError: the left matrix is not positive definite.
    """
    ridged = left()
    ridged.diagonal().add_(lam + eps)
    # In place, as one more matrix of this size would be the most there is in memory: LAPACK stores by columns, so the
    # upper factor of the transpose lies where the lower one of the rows belongs.
    turned, info = ridged.mT, torch.empty((), dtype=torch.int32, device=ridged.device)
    # `_ex` reports failure as a number, so that the error can say which lam would do.
    torch.linalg.cholesky_ex(turned, upper=True, out=(turned, info))
    if int(info) != 0 or not bool(torch.isfinite(ridged.diagonal().sum())):
        raise SolveError(f"not positive definite with lam={lam:g}, eps={eps:g}: {_spectrum(left(), lam, eps)}")
    return ridged


def weight_by_factor(
    factor: Float[Tensor, "d d"], target_sum: Float[Tensor, "m d"], anchor: Float[Tensor, "m d"], lam: float
) -> Float[Tensor, "m d"]:
    """Return the solution of Eq. (17), given the `left_factor`."""
    return divide_by_factor(torch.add(target_sum, anchor, alpha=lam), factor)


def divide_by_factor(right: Float[Tensor, "m d"], factor: Float[Tensor, "d d"]) -> Float[Tensor, "m d"]:
    """Return `right` times the inverse of L L^T, given L, lower triangular."""
    # Eq. (17) multiplies by the inverse from the right: first by that of L^T, then by that of L.
    half = torch.linalg.solve_triangular(factor.mT, right, upper=True, left=False)
    found: Tensor = torch.linalg.solve_triangular(factor, half, upper=False, left=False)
    return found


def _spectrum(left: Float[Tensor, "d d"], lam: float, eps: float) -> str:
    """Describe the eigenvalues of a left matrix, given without its ridge, that cannot be factored, and name a
    sufficient lam."""
    left.diagonal().add_(lam + eps)
    found = torch.linalg.eigvalsh(left.double()) if bool(torch.isfinite(left.tril()).all()) else left.new_zeros(1)
    low, high = float(found[0]), float(found[-1])
    if high <= 0:
        return "it is zero, or not finite"
    condition = f"condition about {high / low:.1e}" if low > 0 else "singular"
    # With a condition of 1 / sqrt(eps) half the digits of the solution are left.
    enough = high * torch.finfo(left.dtype).eps ** 0.5 - min(low - lam, 0.0)
    return f"eigenvalues from {low:.1e} to {high:.1e}, {condition}; lam={enough:.1e} would do"


def linear_bias(
    target_sum: Float[Tensor, " m"],
    mean_sum: Float[Tensor, " d"],
    weight: Float[Tensor, "m d"],
    anchor: Float[Tensor, " m"],
    omega_sum: float | Float[Tensor, ""],
    lam: float,
) -> Float[Tensor, " m"]:
    """Return the second-stage bias with the calibrated weight fixed, Eq. (55).

    Args:
        target_sum: sum over tasks of omega_i (b_i + W_i mu_i^tgt).
        mean_sum: sum over tasks of omega_i mu_i^cal.
        weight: the solution of Eq. (17).
        omega_sum: sum over tasks of omega_i, > 0.
    """
    return (target_sum - weight @ mean_sum.to(weight.dtype) + lam * anchor) / (omega_sum + lam)


def layernorm_affine(
    square_sum: Float[Tensor, " d"],
    mean_sum: Float[Tensor, " d"],
    target_sums: Affine,
    anchor: Affine,
    tasks: int,
    lam: float,
    eps: float,
) -> Affine:
    """Return scale and shift of a LayerNorm, Eqs. (58)-(59): a 2x2 ridge regression per coordinate.

    Args:
        square_sum: sum over tasks of q_i, the second moments of the normalised features.
        mean_sum: sum over tasks of their means.
        target_sums: sums over tasks of q_i gamma_i + mean_i beta_i and of mean_i gamma_i + beta_i.
        tasks: number of tasks N; they have equal weights, without omega.
        eps: floor of the determinant.
    """
    a11 = square_sum + lam
    a12 = mean_sum
    a22 = tasks + lam
    to_scale, to_shift = (total + lam * own for total, own in zip(target_sums, anchor, strict=True))
    # Cramer's rule for every coordinate at once, as Eq. (59) writes it.
    determinant = (a22 * a11 - a12 * a12).clamp_min(eps)
    return (a22 * to_scale - a12 * to_shift) / determinant, (a11 * to_shift - a12 * to_scale) / determinant


def rmsnorm_scale(
    square_sum: Float[Tensor, " d"], scale_target_sum: Float[Tensor, " d"], anchor: Float[Tensor, " d"], lam: float
) -> Float[Tensor, " d"]:
    """Return the scale of an RMSNorm: Eq. (59) without a shift, one ridge regression per coordinate. Our extension.

    Args:
        square_sum: sum over tasks of q_i, the second moments of the normalised features; `square_sum + lam` > 0.
        scale_target_sum: sum over tasks of q_i gamma_i.
    """
    return (scale_target_sum + lam * anchor) / (square_sum + lam)

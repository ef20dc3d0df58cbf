"""The closed forms against the gradients of the objectives they solve (Eqs. 15, 53, 57)."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from featcal.calibration import closed_form

TASKS, OUT, IN, TOKENS = 3, 5, 4, 40


def problem(seed: int, alpha: float = 0.3) -> dict[str, Tensor]:
    """Random features and weights of a linear map with a bias, float64; features are rows."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    own, expert = random(TASKS, TOKENS, IN), random(TASKS, TOKENS, IN)
    return {
        "cal": own,
        "target": alpha * expert + (1 - alpha) * own,
        "weight": random(TASKS, OUT, IN),
        "bias": random(TASKS, OUT),
        "anchor": random(OUT, IN),
        "anchor_bias": random(OUT),
    }


def omegas(p: dict[str, Tensor]) -> list[float]:
    return [float(closed_form.task_weight(torch.linalg.matrix_norm(x.mT @ x / TOKENS), 0.0)) for x in p["cal"]]


def solve_weight(p: dict[str, Tensor], lam: float) -> Tensor:
    grams = [x.mT @ x / TOKENS for x in p["cal"]]
    crosses = [t.mT @ x / TOKENS for t, x in zip(p["target"], p["cal"], strict=True)]
    gram_sum = sum((w * g for w, g in zip(omegas(p), grams, strict=True)), torch.zeros(IN, IN, dtype=torch.float64))
    target_sum = sum(
        (w * weight @ c for w, weight, c in zip(omegas(p), p["weight"], crosses, strict=True)),
        torch.zeros(OUT, IN, dtype=torch.float64),
    )
    return closed_form.linear_weight(gram_sum, target_sum, p["anchor"], lam, 0.0)


def weight_objective(p: dict[str, Tensor], weight: Tensor, lam: float) -> Tensor:
    """Eq. (15), written from the paper."""
    fit = sum(
        omega / TOKENS * ((x @ weight.mT - t @ own.mT) ** 2).sum()
        for omega, x, t, own in zip(omegas(p), p["cal"], p["target"], p["weight"], strict=True)
    )
    return fit + lam * ((weight - p["anchor"]) ** 2).sum()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("lam", [0.0, 1e-5, 0.05, 3.0])
def test_weight_is_stationary_point_of_eq_15(seed: int, lam: float) -> None:
    p = problem(seed)
    weight = solve_weight(p, lam).requires_grad_()
    (gradient,) = torch.autograd.grad(weight_objective(p, weight, lam), weight)
    assert gradient.abs().max() < 1e-12


def test_weight_beats_every_neighbour() -> None:
    p = problem(0)
    best = solve_weight(p, 0.05)
    value = weight_objective(p, best, 0.05)
    for seed in range(5):
        step = 0.01 * torch.randn(OUT, IN, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        assert weight_objective(p, best + step, 0.05) > value


@pytest.mark.parametrize("lam", [0.0, 0.05, 3.0])
def test_bias_is_stationary_point_of_eq_53(lam: float) -> None:
    p = problem(1)
    weight = solve_weight(p, 0.05)
    omega = omegas(p)
    means = [x.mean(0) for x in p["cal"]]
    targets = [own @ t.mean(0) + b for own, t, b in zip(p["weight"], p["target"], p["bias"], strict=True)]
    bias = closed_form.linear_bias(
        sum((w * t for w, t in zip(omega, targets, strict=True)), torch.zeros(OUT, dtype=torch.float64)),
        sum((w * m for w, m in zip(omega, means, strict=True)), torch.zeros(IN, dtype=torch.float64)),
        weight,
        p["anchor_bias"],
        sum(omega),
        lam,
    ).requires_grad_()
    objective = (
        sum(w * ((weight @ m + bias - t) ** 2).sum() for w, m, t in zip(omega, means, targets, strict=True))
        + lam * ((bias - p["anchor_bias"]) ** 2).sum()
    )
    (gradient,) = torch.autograd.grad(objective, bias)
    assert gradient.abs().max() < 1e-12


@pytest.mark.parametrize("lam", [1e-3, 0.05, 3.0])
def test_layernorm_is_stationary_point_of_eq_57(lam: float) -> None:
    generator = torch.Generator().manual_seed(2)
    z = torch.randn(TASKS, TOKENS, IN, generator=generator, dtype=torch.float64) + 0.3
    scales, shifts = torch.randn(2, TASKS, IN, generator=generator, dtype=torch.float64)
    anchor_scale, anchor_shift = torch.randn(2, IN, generator=generator, dtype=torch.float64)
    mean, square = z.mean(1), z.square().mean(1)
    scale, shift = closed_form.layernorm_affine(
        square.sum(0),
        mean.sum(0),
        ((square * scales + mean * shifts).sum(0), (mean * scales + shifts).sum(0)),
        (anchor_scale, anchor_shift),
        TASKS,
        lam,
        0.0,
    )
    scale, shift = scale.requires_grad_(), shift.requires_grad_()
    fit = ((scale * z + shift) - (scales[:, None] * z + shifts[:, None])) ** 2
    objective = (
        fit.mean(1).sum() + lam * ((scale - anchor_scale) ** 2).sum() + lam * ((shift - anchor_shift) ** 2).sum()
    )
    for gradient in torch.autograd.grad(objective, (scale, shift)):
        assert gradient.abs().max() < 1e-12


def test_huge_lam_gives_the_anchor() -> None:
    p = problem(3)
    torch.testing.assert_close(solve_weight(p, 1e12), p["anchor"], rtol=1e-10, atol=1e-10)


def test_one_task_without_ridge_is_least_squares() -> None:
    p = problem(4, alpha=1.0)
    x, y = p["cal"][0], p["target"][0] @ p["weight"][0].mT
    gram, cross = x.mT @ x / TOKENS, y.mT @ x / TOKENS
    omega = closed_form.task_weight(torch.linalg.matrix_norm(gram), 0.0)
    ours = closed_form.linear_weight(omega * gram, omega * cross, p["anchor"], 0.0, 0.0)
    torch.testing.assert_close(ours, torch.linalg.lstsq(x, y).solution.mT, rtol=1e-10, atol=1e-12)


def test_eps_shrinks_directions_without_data() -> None:
    anchor = torch.ones(1, 2, dtype=torch.float64)
    nothing = torch.zeros(2, 2, dtype=torch.float64)
    ours = closed_form.linear_weight(nothing, torch.zeros(1, 2, dtype=torch.float64), anchor, lam=1e-5, eps=1e-8)
    torch.testing.assert_close(ours, anchor * 1e-5 / (1e-5 + 1e-8), rtol=1e-12, atol=0)


def test_singular_system_is_refused_not_pseudo_inverted() -> None:
    rank_one = torch.ones(3, 3, dtype=torch.float64)
    with pytest.raises(closed_form.SolveError, match="not positive definite") as caught:
        closed_form.linear_weight(rank_one, rank_one, rank_one, lam=0.0, eps=0.0)
    low, high, enough = (
        float(one) for one in re.findall(r"from (\S+) to (\S+), .*lam=(\S+) would", str(caught.value))[0]
    )
    assert abs(low) < 1e-15
    assert high == 3
    assert enough == pytest.approx(3 * 2**-26, rel=0.05)
    closed_form.linear_weight(rank_one, rank_one, rank_one, lam=enough, eps=0.0)


@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_a_matrix_without_a_spectrum_is_refused_too(value: float) -> None:
    none = torch.full((2, 2), value, dtype=torch.float64)
    with pytest.raises(closed_form.SolveError, match="zero, or not finite"):
        closed_form.linear_weight(none, none, none, lam=0.0, eps=0.0)


def test_task_weight_has_a_floor() -> None:
    assert closed_form.task_weight(torch.zeros((), dtype=torch.float64), 1e-8) == 1e8


def test_a_norm_that_overflows_gives_no_weight_of_zero() -> None:
    assert closed_form.task_weight(torch.tensor(torch.inf), 1e-8).isnan()


def test_the_factor_takes_the_place_of_its_matrix() -> None:
    """The largest matrix there is need not be held twice."""
    p = problem(5)
    gram = p["cal"][0].mT @ p["cal"][0]
    made = gram.tril()
    factor = closed_form.left_factor(lambda: made, 0.1, 0.01)
    assert factor.data_ptr() == made.data_ptr()
    assert int(factor.triu(1).count_nonzero()) == 0
    ridge = 0.11 * torch.eye(len(gram), dtype=gram.dtype)
    torch.testing.assert_close(factor @ factor.mT, gram + ridge, rtol=1e-12, atol=1e-12)

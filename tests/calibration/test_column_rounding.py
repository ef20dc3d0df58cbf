"""Rounding solved weights to a grid: held against the conditional minimiser of every column, without any factor."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from featcal.calibration import closed_form
from featcal.calibration.column_rounding import round_columns, round_to_nearest
from featcal.formats.grid import QuantizationGrid

ROWS, COLUMNS, TOKENS = 6, 24, 60


def problem(seed: int, lam: float) -> tuple[Tensor, Tensor]:
    """A weight, and the left matrix of inputs whose directions differ a hundredfold in length; float64."""
    generator = torch.Generator().manual_seed(seed)
    turned = torch.randn(COLUMNS, COLUMNS, generator=generator, dtype=torch.float64)
    lengths = torch.logspace(0, -2, COLUMNS, dtype=torch.float64)
    rows = torch.randn(TOKENS, COLUMNS, generator=generator, dtype=torch.float64) @ (lengths[:, None] * turned)
    gram = rows.T @ rows
    left = gram / gram.norm() + lam * torch.eye(COLUMNS, dtype=torch.float64)
    return torch.randn(ROWS, COLUMNS, generator=generator, dtype=torch.float64), left


def loss(error: Tensor, left: Tensor) -> float:
    """Return tr(E H E^T), by which the objective of the calibration grows."""
    return float(torch.trace(error @ left @ error.T))


def step_by_step(weight: Tensor, left: Tensor, grid: QuantizationGrid, found: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Round column by column from the last on; each time all columns that are free stand at the minimum of tr(E H E^T)
    given those that are rounded, found by a solve of its own.

    Args:
        found: decides ties, such as the value that its scale is made of: either neighbour is right there.
    """
    rounded, size, scales = weight.clone(), grid.columns(COLUMNS), []
    for j in reversed(range(COLUMNS)):
        free, fixed = slice(0, j + 1), slice(j + 1, COLUMNS)
        error = weight[:, fixed] - rounded[:, fixed]
        best = weight[:, free] + torch.linalg.solve(left[free, free], (error @ left[fixed, free]).T).T
        if (j + 1) % size == 0:
            values = best[:, j + 1 - size :] if grid.group else weight
            scales.insert(0, values.abs().amax(1, keepdim=True) / ((2**grid.bits - 1) / 2))
        exact = best[:, j] / scales[0][:, 0]
        tied = ((exact - exact.floor()) - 0.5).abs() < 1e-9
        whole = (
            torch.where(tied, found[:, j] / scales[0][:, 0], exact)
            .round()
            .clamp(-(2 ** (grid.bits - 1)), 2 ** (grid.bits - 1) - 1)
        )
        rounded[:, j] = whole * scales[0][:, 0]
    return rounded, scales


@pytest.mark.parametrize(
    "grid", [QuantizationGrid(4, 8), QuantizationGrid(4, 0), QuantizationGrid(8, 12), QuantizationGrid(8, 0)], ids=str
)
def test_every_column_takes_the_best_value_given_those_behind_it(grid: QuantizationGrid) -> None:
    for seed in range(3):
        weight, left = problem(seed, lam=1e-3)
        factor = closed_form.left_factor(left.clone, 0.0, 0.0)
        rounded, scale = round_columns(weight, factor, grid, torch.float64)
        expected, scales = step_by_step(weight, left, grid, rounded)
        torch.testing.assert_close(scale, torch.cat(scales, dim=1), rtol=1e-9, atol=0)
        torch.testing.assert_close(rounded, expected, rtol=1e-9, atol=1e-12)


def test_columns_share_products_without_changing_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one scale per row the width of a part is free."""
    weight, left = problem(0, lam=1e-2)
    factor = closed_form.left_factor(left.clone, 0.0, 0.0)
    whole, scale = round_columns(weight, factor, QuantizationGrid(4, 0), torch.float64)
    monkeypatch.setattr("featcal.calibration.column_rounding._TOGETHER", 7)
    parts, same = round_columns(weight, factor, QuantizationGrid(4, 0), torch.float64)
    torch.testing.assert_close(parts, whole, rtol=1e-9, atol=1e-12)
    assert same.equal(scale)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("lam", [1e-5, 1e-3, 1e-1])
def test_the_objective_grows_less_than_by_rounding_to_nearest(bits: int, lam: float) -> None:
    """On every problem of the family; how much less depends on how different the directions of the inputs are."""
    shares = []
    for seed in range(15):
        weight, left = problem(seed, lam)
        factor = closed_form.left_factor(left.clone, 0.0, 0.0)
        for grid in (QuantizationGrid(bits, 8), QuantizationGrid(bits, 0)):
            ours, _ = round_columns(weight, factor, grid, torch.float64)
            nearest, _ = round_to_nearest(weight, grid, torch.float64)
            shares.append(loss(weight - ours, left) / loss(weight - nearest, left))
    assert max(shares) < 1, max(shares)


def test_inputs_without_correlation_leave_nothing_to_gain() -> None:
    """A diagonal left matrix: every column is rounded for itself."""
    weight, _ = problem(1, 0.0)
    factor = torch.diag(torch.linspace(1, 2, COLUMNS, dtype=torch.float64))
    grid = QuantizationGrid(4, 8)
    ours, nearest = round_columns(weight, factor, grid, torch.float32), round_to_nearest(weight, grid, torch.float32)
    assert ours[0].equal(nearest[0])
    assert ours[1].equal(nearest[1])


def test_a_grid_holds_its_largest_value_and_zeros() -> None:
    grid = QuantizationGrid(4, 0)
    weight = torch.tensor([[7.5, -7.5, 0.4], [0.0, 0.0, 0.0]], dtype=torch.float64)
    scale = grid.scale(weight)
    assert scale.tolist() == [[1.0], [1.0]]
    # 7.5 would be 8, which 4 bits do not have above 0.
    assert grid.round(weight, scale).tolist() == [[7.0, -8.0, 0.0], [0.0, 0.0, 0.0]]

"""Symmetric sums in strips are the whole matrix; token rows leave out what does not count."""

from __future__ import annotations

import threading

import pytest
import torch

from featcal.calibration import gram
from featcal.calibration.gram import Gram, add_gram_product
from featcal.calibration.precision import product_dtype, solve_dtype, sum_dtype
from featcal.calibration.token_rows import TokenRows
from featcal.models.compute import computing
from featcal.suite.calibration_options import CalibrationConfig


@pytest.mark.parametrize("side", [3, 8, 19])
def test_strips_are_the_whole_matrix(side: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gram, "STRIP", 8)
    x, y = (torch.randn(30, side, dtype=torch.float64) for _ in range(2))
    one, two = (Gram.zeros(side, x.device, x.dtype) for _ in range(2))
    one.add_rows(x)
    one.add_rows(y)
    two.add_rows(y)
    whole = x.mT @ x + y.mT @ y
    torch.testing.assert_close(one.full(x.dtype), whole)
    torch.testing.assert_close(one.lower(x.dtype).tril(), whole.tril())
    torch.testing.assert_close(one.norm(), torch.linalg.matrix_norm(whole))
    one.add(two, torch.tensor(-1.0, dtype=x.dtype))
    torch.testing.assert_close(one.full(x.dtype), x.mT @ x)


def test_bfloat16_products_are_summed_in_float32() -> None:
    """A thousand products of 1 are 1000; bfloat16 sums would stop at 256."""
    total, one = torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bfloat16)
    for _ in range(1000):
        add_gram_product(total, one, one)
    assert float(total) == 1000


def test_rows_that_do_not_count_are_never_read() -> None:
    features = torch.tensor([[[1.0], [torch.nan]], [[3.0], [5.0]]])
    rows = TokenRows.from_weights(torch.tensor([[1.0, 0.0], [0.5, 1.0]]), 4)
    assert (rows.count, rows.total) == (3, 2.5)
    assert rows.take(features).tolist() == [[1.0], [3.0], [5.0]]
    assert float(rows.sum(rows.take(features))) == 1 + 1.5 + 5
    alike = TokenRows.from_weights(torch.tensor([[1.0, 0.0], [1.0, 1.0]]), 4)
    assert alike.weights is None
    whole = TokenRows.from_weights(torch.ones(2, 2), 4)
    assert (whole.index, whole.weights, whole.total) == (None, None, 4.0)


@pytest.mark.parametrize(
    ("features", "lam", "expected"),
    [
        (torch.float32, 0.05, (torch.float32, torch.float32, torch.float64)),
        (torch.float32, 1e-5, (torch.float64, torch.float64, torch.float64)),
        (torch.float64, 0.05, (torch.float64, torch.float64, torch.float64)),
        (torch.bfloat16, 0.05, (torch.bfloat16, torch.float32, torch.float32)),
        (torch.bfloat16, 1e-3, (torch.float32, torch.float32, torch.float64)),  # of "refined" and "informed"
        (torch.bfloat16, 1e-5, (torch.float32, torch.float32, torch.float64)),
    ],
)
def test_dtypes_of_products_sums_and_solve(
    features: torch.dtype, lam: float, expected: tuple[torch.dtype, torch.dtype, torch.dtype]
) -> None:
    products = product_dtype(features, CalibrationConfig(lam=lam))
    assert (products, sum_dtype(products), solve_dtype(products)) == expected


def test_float32_products_stay_float32_and_settings_come_back() -> None:
    before = torch.backends.mkldnn.matmul.fp32_precision, torch.backends.cuda.matmul.fp32_precision  # type: ignore[attr-defined]
    value = 1 + 2.0**-12
    with computing, computing:
        product = torch.full((256, 256), value) @ torch.full((256, 256), value)
        assert torch.backends.cuda.matmul.fp32_precision == "ieee"
    assert float((product / (256 * value**2) - 1).abs().max()) < 1e-6
    after = torch.backends.mkldnn.matmul.fp32_precision, torch.backends.cuda.matmul.fp32_precision  # type: ignore[attr-defined]
    assert after == before


def test_the_last_thread_puts_the_settings_back() -> None:
    before = torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]
    inside, leave = threading.Barrier(2), threading.Event()

    def first() -> None:
        with computing:
            inside.wait()
        leave.set()

    thread = threading.Thread(target=first)
    thread.start()
    with computing:
        during = torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]
        inside.wait()
        assert leave.wait(5)
        assert torch.backends.mkldnn.matmul.fp32_precision == during  # type: ignore[attr-defined]
    thread.join()
    assert torch.backends.mkldnn.matmul.fp32_precision == before  # type: ignore[attr-defined]

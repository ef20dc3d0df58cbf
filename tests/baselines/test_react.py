"""Surgery in closed form: an optimum, what its ends are, and the heads that it is multiplied into."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiny_clip import TASKS
from torch import Tensor

from featcal.baselines.common.fit import fit
from featcal.baselines.react import AffineMap, React, regression
from featcal.evaluation.evaluate import task_features
from featcal.family.opening import Family, batches_of
from featcal.formats.weights import Weights
from featcal.models.model import Model
from featcal.session.model_ref import resolve_model
from featcal.system.errors import InputError

RIDGE = 0.3


def drawn(seed: int, n: int = 30, k: int = 6) -> tuple[Tensor, Tensor]:
    """Features of a model and an expert, neither of them centred."""
    generator = torch.Generator().manual_seed(seed)
    own, noise = (torch.randn(n, k, generator=generator, dtype=torch.float64) for _ in range(2))
    return own * torch.arange(1.0, k + 1) + 3, own @ torch.randn(k, k, generator=generator).double() + noise - 2


def objective(turn: Tensor, own: Tensor, wanted: Tensor) -> Tensor:
    """||X M - Y||^2 / n + l ||M - I||^2 of centred features."""
    x, y = own - own.mean(0), wanted - wanted.mean(0)
    pull = RIDGE * (x.mT @ x / len(x)).diagonal().mean()
    return (x @ turn - y).square().sum() / len(x) + pull * (turn - torch.eye(len(turn))).square().sum()


def test_it_is_the_optimum_of_its_objective() -> None:
    own, wanted = drawn(0)
    found = regression(own, wanted, RIDGE)
    turn = found.weight.mT.clone().requires_grad_()
    objective(turn, own, wanted).backward()
    assert turn.grad is not None
    assert float(turn.grad.abs().max()) < 1e-12
    free = torch.eye(6, dtype=torch.float64).requires_grad_()
    optimizer = torch.optim.LBFGS(
        [free], max_iter=500, tolerance_grad=1e-12, tolerance_change=0, line_search_fn="strong_wolfe"
    )

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = objective(free, own, wanted)
        value.backward()
        return value

    optimizer.step(loss)
    torch.testing.assert_close(found.weight.mT, free.detach(), rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(found(own), (own - own.mean(0)) @ free.detach() + wanted.mean(0), rtol=1e-6, atol=1e-6)


def test_its_ends() -> None:
    """A large ridge leaves the shift of the mean, a small one the plain regression, and equal features stay."""
    own, wanted = drawn(1)
    shifted = own - own.mean(0) + wanted.mean(0)
    torch.testing.assert_close(regression(own, wanted, 1e14)(own), shifted, rtol=1e-9, atol=1e-9)
    design = torch.cat([own, torch.ones(len(own), 1).double()], dim=1)
    plain = design @ torch.linalg.lstsq(design, wanted).solution
    torch.testing.assert_close(regression(own, wanted, 1e-14)(own), plain, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(regression(own, own, RIDGE)(own), own, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(regression(own[:1], wanted[:1], RIDGE)(own[:1]), wanted[:1])  # one sample: a shift


def test_units_do_not_matter() -> None:
    own, wanted = drawn(2)
    other = regression(100 * own, 100 * wanted, RIDGE)(100 * own)
    torch.testing.assert_close(other, 100 * regression(own, wanted, RIDGE)(own), rtol=1e-9, atol=1e-9)


def test_without_a_shift_it_goes_through_the_origin() -> None:
    own, wanted = drawn(3)
    found = regression(own, wanted, RIDGE, shifts=False)
    assert found.bias is None
    assert not bool(found(torch.zeros_like(own)).any())
    pull = RIDGE * (own - own.mean(0)).square().mean()
    turn = found.weight.mT.clone().requires_grad_()
    loss = (own @ turn - wanted).square().sum() / len(own) + pull * (turn - torch.eye(6)).square().sum()
    loss.backward()
    assert turn.grad is not None
    assert float(turn.grad.abs().max()) < 1e-11


def features(family: Family, model: Weights, task: str) -> Tensor:
    own = family.samples(task, "calibration", 12, 42)
    return task_features(family, model, task, batches_of(own, 12, family.compute.device))


def test_a_model_of_it(tiny: Family) -> None:
    """The map of every task is the regression of its own features; weights stay."""
    found = fit(tiny, React(samples=12, ridge=RIDGE))
    assert isinstance(found.weights, Model)
    for task in TASKS:
        own, wanted = features(tiny, tiny.merged, task), features(tiny, tiny.experts[task], task)
        module = found.weights.maps[task]
        assert isinstance(module, AffineMap)
        torch.testing.assert_close(module(own), regression(own, wanted, RIDGE)(own), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(features(tiny, found.weights, task), module(own))
    assert found.record["loss"] < 0.9 * found.record["loss_before"]
    for name, tensor in found.weights.read(tiny.adapter.tower).items():
        assert tensor.equal(tiny.merged.read([name])[name])


def test_names(tiny: Family) -> None:
    assert resolve_model("react@tsv-m", tiny).name == "react:samples=256,seed=42,ridge=0.1@tsv-m"
    with pytest.raises(InputError, match="react: ridge is 0"):
        replace(React(), ridge=0.0)
    operated = fit(tiny, React(samples=12)).weights
    with pytest.raises(InputError, match=r"react: merged model .* already has maps or heads for"):
        fit(tiny.with_merged(operated, "operated"), React())

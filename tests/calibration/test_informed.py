"""The recipe "informed": its prior in closed form, what it is where parts of it are taken away, what it costs a mixture
and an adapter. Its tensors are held against an independent computation in the tests of every architecture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from clip_config import clip_config
from lora_files import write_adapter
from safetensors.torch import load_file, save_file
from tiny_decoders import ROWS, tiny_decoder
from torch import Tensor

from featcal import CalibrationConfig, InputError, NumericalError, calibrate, load_suite, open_family
from featcal.calibration import closed_form
from featcal.calibration.calibrate import calibrate_family as calibrate_family
from featcal.calibration.calibrate import config_for, expert_passes
from featcal.calibration.config import resolve_options
from featcal.calibration.prior import Factors, Prior
from featcal.family.opening import Family
from featcal.formats.weights import Overlay
from featcal.mergers.wudi_optimum import wudi_optimum
from featcal.models.compute import computing
from featcal.models.lane import WalkCache
from featcal.suite.calibration_options import RECIPES
from featcal.testing.trial import write_trial

INFORMED = clip_config(recipe="informed", samples=8, batch_size=4)


def noise(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def prior_of(vectors: Sequence[Tensor | Factors], outputs: int, inputs: int, base: Tensor | None = None) -> Prior:
    prior = Prior.zeros(outputs, inputs, torch.device("cpu"), torch.float64)
    for tau in vectors:
        prior.add(tau, torch.zeros(outputs, inputs) if base is None else base)
    return prior


def tensors(family: Family, config: CalibrationConfig) -> dict[str, Tensor]:
    return dict(calibrate(family, config).weights.read(family.adapter.tower))


def test_the_same_numbers_at_every_number_of_samples(tiny: Family) -> None:
    for samples in (4, 64, 256):
        own = config_for(tiny, recipe="informed", samples=samples)
        assert (own.lam, own.rho, own.alpha, own.beta, own.mu) == (0.001, 2.0, 0.6, 0.5, 0.1)
        assert own == resolve_options(
            CalibrationConfig(recipe="informed", samples=samples), tiny.adapter, tiny.suite.tasks
        )


def test_a_recipe_brings_its_numbers_in_python_as_on_the_command_line(tiny: Family) -> None:
    for recipe in RECIPES:
        asked = CalibrationConfig(recipe=recipe, samples=64)
        assert calibrate(tiny, asked).config == config_for(tiny, recipe=recipe, samples=64)
    refined = resolve_options(CalibrationConfig(recipe="refined", samples=64), tiny.adapter, tiny.suite.tasks)
    assert (refined.lam, refined.alpha, refined.beta, refined.mu) == (0.001, 0.6, 0.5, 0.0)
    assert CalibrationConfig(recipe="refined", beta=0.0).beta == 0


@pytest.mark.parametrize("recipe", ["paper", "refined"])
def test_a_prior_belongs_to_this_recipe(recipe: str) -> None:
    with pytest.raises(InputError, match=r"mu is 0\.5; it belongs to the recipe 'informed'"):
        CalibrationConfig(recipe=recipe, mu=0.5)


@pytest.mark.parametrize("outputs", [3, 8])
@computing
def test_the_solution_minimises_the_objective(outputs: int) -> None:
    """The data's part, mu sum_i ||(W - W_0 - rho tau_i) K_i^(1/2)||^2 and the ridge: gradient 0."""
    inputs, lam, rho, mu = 5, 0.01, 1.7, 0.3
    base, anchor = noise(0, outputs, inputs), noise(1, outputs, inputs)
    taus = [0.1 * noise(2 + i, outputs, inputs) for i in range(3)]
    rows, wanted = noise(7, 40, inputs), noise(8, 40, outputs)
    prior = prior_of(taus, outputs, inputs)
    left = rows.T @ rows + mu * prior.gram.full(torch.float64)
    solved = closed_form.linear_weight(left, wanted.T @ rows + mu * prior.target(base, rho), anchor, lam, 0.0)
    solved.requires_grad_()
    total = (rows @ solved.T - wanted).square().sum() + lam * (solved - anchor).square().sum()
    for tau in taus:
        gram = tau.T @ tau / torch.linalg.matrix_norm(tau.T @ tau)
        apart = solved - base - rho * tau
        total = total + mu * torch.trace(apart @ gram @ apart.T)
    (slope,) = torch.autograd.grad(total, solved)
    assert float(slope.norm()) < 1e-11


@computing
def test_without_samples_it_is_wudi() -> None:
    """With rho 1, a vanishing ridge, and task vectors whose Frobenius norm and trace have one ratio, so that dividing
    by either is the same."""
    base, inputs, rank = noise(0, 6, 8), 8, 4
    taus = [
        (1 + i) * torch.linalg.qr(noise(1 + i, 6, rank))[0] @ torch.linalg.qr(noise(9 + i, inputs, rank))[0].T
        for i in range(3)
    ]
    prior = prior_of(taus, 6, inputs)
    left, right = prior.gram.full(torch.float64), prior.target(base, 1.0)
    solved = closed_form.linear_weight(left, right, base, 1e-12, 0.0)
    torch.testing.assert_close(solved - base, wudi_optimum(taus), rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("outputs", [3, 9])
@computing
def test_factors_give_what_the_dense_task_vector_gives(outputs: int) -> None:
    """Also where there are fewer outputs than directions; up to rho 1 whatever their size, beyond if they are small."""
    pairs, base = [(noise(i, outputs, 4), 0.1 * noise(5 + i, 4, 7)) for i in range(2)], noise(9, outputs, 7)
    thin, small = (prior_of(pairs, outputs, 7, scale * base) for scale in (0.1, 100.0))
    dense = prior_of([left @ right for left, right in pairs], outputs, 7)
    torch.testing.assert_close(thin.gram.full(torch.float64), dense.gram.full(torch.float64), rtol=1e-10, atol=1e-12)
    for rho, found in ((0.5, thin), (1.0, thin), (0.5, small), (2.0, small)):
        torch.testing.assert_close(found.target(base, rho), dense.target(base, rho), rtol=1e-10, atol=1e-12)
    assert float((thin.target(base, 2.0) - dense.target(base, 2.0)).norm()) > 0.1


@computing
def test_a_large_adapter_is_followed_and_not_extrapolated() -> None:
    """Every one to its own rho_i, from the dense matrices of the definition; whole experts to rho; in any order."""
    outputs, inputs, rho, base = 5, 7, 1.8, noise(9, 5, 7)
    left, right = noise(0, outputs, 3), noise(5, 3, inputs)
    taus: list[Tensor | Factors] = [(left, size * right) for size in (0.5, 0.2, 0.01)]
    taus.append(noise(20, outputs, inputs))
    expected, shares = torch.zeros(outputs, inputs, dtype=torch.float64), []
    for tau in taus:
        whole = tau if isinstance(tau, Tensor) else tau[0] @ tau[1]
        gram = whole.T @ whole / torch.linalg.matrix_norm(whole.T @ whole)
        q = (torch.trace(whole @ gram @ whole.T) / torch.trace(base @ gram @ base.T)).sqrt()
        shares.append(1.0 if isinstance(tau, Tensor) else float((1 / q - 1).clamp(0, 1)))
        expected += (base + (1 + (rho - 1) * shares[-1]) * whole) @ gram
    assert shares[0] == 0
    assert 0 < shares[1] < 1
    assert shares[2:] == [1, 1]
    for order in (taus, taus[::-1]):
        torch.testing.assert_close(prior_of(order, outputs, inputs, base).target(base, rho), expected)
    first, second = (prior_of(some, outputs, inputs, base) for some in (taus[3:], taus[:3]))
    first.merge(second)
    torch.testing.assert_close(first.target(base, rho), expected)


def test_small_task_vectors_do_not_vanish_in_float32() -> None:
    """Squares of their squares are below what it holds."""
    tau = noise(0, 5, 4).float()
    for scale in (1.0, 1e-12):
        prior = prior_of([tau * scale], 5, 4)
        assert float(prior.gram.norm()) == pytest.approx(1, abs=1e-6)
        torch.testing.assert_close(prior.pull / scale, prior_of([tau], 5, 4).pull, rtol=1e-5, atol=1e-6)


@computing
def test_a_task_that_changed_nothing_says_nothing() -> None:
    tau = noise(0, 5, 4)
    with_it, without = prior_of([tau, torch.zeros(5, 4, dtype=torch.float64)], 5, 4), prior_of([tau], 5, 4)
    assert with_it.pull.equal(without.pull)
    assert with_it.gram.full(torch.float64).equal(without.gram.full(torch.float64))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rounding_of_a_map_that_was_not_trained_is_no_task_vector(tiny: Family, dtype: torch.dtype) -> None:
    base, trained = tiny.base.read(tiny.adapter.tower), {}
    for number, task in enumerate(tiny.experts):
        moved = {name: one.clone() for name, one in base.items()}
        for name in (name for name in base if name.endswith("q_proj.weight")):
            moved[name] += 0.05 * noise(number, *moved[name].shape).float()
        trained[task] = moved
    found = []
    for stored in (torch.float32, dtype):
        experts = {
            task: Overlay(task, tiny.base, {name: tensor.to(stored) for name, tensor in own.items()})
            for task, own in trained.items()
        }
        found.append(tensors(replace(tiny, experts=experts), INFORMED))
    whole, half = found
    apart = {name: float((half[name] - whole[name]).norm() / whole[name].norm()) for name in whole}
    assert max(apart.values()) < 30 * torch.finfo(dtype).eps


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_task_vector_that_is_not_finite_is_an_error(bad: float) -> None:
    """Also where no token would show it, as in an expert of a mixture to which none comes."""
    with pytest.raises(NumericalError, match="the task vector is not finite"):
        prior_of([torch.full((3, 4), bad, dtype=torch.float64)], 3, 4)


def test_without_weight_it_is_the_refined_recipe(tiny: Family) -> None:
    """To the last bit."""
    without = tensors(tiny, replace(INFORMED, mu=0.0))
    refined = tensors(tiny, replace(INFORMED, recipe="refined", mu=0.0))
    assert all(tensor.equal(refined[name]) for name, tensor in without.items())
    moved = [name for name, tensor in tensors(tiny, INFORMED).items() if not tensor.equal(without[name])]
    linears = [f"{block.stored_name(name)}.weight" for block in tiny.adapter.blocks() for name in block.linears]
    assert {*linears} <= {*moved}


def test_a_prior_that_counts_alone_makes_the_start_irrelevant(tiny64: Family) -> None:
    """Of one task it gives that expert back, where its task vector spans all directions."""
    config = replace(INFORMED, mu=1e9, lam=1e-3, rho=1.0, biases=False, layernorms=False, tasks=("pets",))
    ours, expert = tensors(tiny64, config), tiny64.experts["pets"]
    for block in tiny64.adapter.blocks():
        for name in (f"{block.stored_name(name)}.weight" for name in block.linears):
            weight = expert.read([name])[name]
            if len(weight) >= weight.shape[1]:
                assert float((ours[name] - weight).norm()) < 1e-4 * float(weight.norm()), name


def test_adapters_and_the_same_experts_in_full_are_calibrated_alike(
    own_suite_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 8 over a base of width 16, and small; the prior of an adapter is made of its factors."""
    thin: list[bool] = []
    original = Prior.add
    monkeypatch.setattr(
        Prior, "add", lambda own, tau, base: (thin.append(not isinstance(tau, Tensor)), original(own, tau, base))[1]
    )
    names = write_experts_of_rank_8(own_suite_file.parent)
    content, found = yaml.safe_load(own_suite_file.read_text()), {}
    for kind in ("whole", "adapters"):
        for task, own in content["tasks"].items():
            own["expert"] = f"experts/{task}" if kind == "whole" else f"base+adapters/{task}"
        own_suite_file.write_text(yaml.safe_dump(content))
        thin.clear()
        found[kind] = tensors(open_family(load_suite(own_suite_file), "cpu"), INFORMED)
        assert thin == len(content["tasks"]) * len(names) * [kind == "adapters"]
    for name, tensor in found["whole"].items():
        assert float((found["adapters"][name] - tensor).norm()) <= 1e-4 * float(tensor.norm())


@pytest.mark.slow
def test_priors_stay_with_the_expert_passes_while_options_move(tiny: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[Tensor | Factors] = []
    original = Prior.add
    monkeypatch.setattr(Prior, "add", lambda own, tau, base: (counted.append(tau), original(own, tau, base))[1])
    moved = [replace(INFORMED, lam=0.01, rho=1.5, mu=0.3, alpha=0.7, beta=0.2), replace(INFORMED, biases=False)]
    alone = [tensors(tiny, config) for config in (INFORMED, *moved)]
    counted.clear()
    passes = expert_passes(tiny, INFORMED, WalkCache(2**28))
    together, counts = list[dict[str, Tensor]](), list[int]()
    for config in (INFORMED, *moved, replace(INFORMED, lam=1e-4), replace(INFORMED, mu=0.0), INFORMED):
        weights = calibrate_family(tiny, config, experts=passes).weights
        together.append(dict(weights.read(tiny.adapter.tower)))
        counts.append(len(counted))
    whole = len(tiny.suite.tasks) * sum(len(block.linears) for block in tiny.adapter.blocks())
    # A small lam asks for products in float64, which are not those in float32; what it counts lies beside theirs.
    assert counts == [whole, whole, whole, 2 * whole, 2 * whole, 2 * whole]
    for ours, theirs in zip((*together[:3], together[5]), (*alone, alone[0]), strict=True):
        assert all(tensor.equal(ours[name]) for name, tensor in theirs.items())


@pytest.mark.slow
def test_priors_of_another_base_or_other_tasks_are_counted_anew(tiny: Family) -> None:
    passes, start = expert_passes(tiny, INFORMED, WalkCache(2**28)), tiny.base.read(tiny.adapter.tower)
    other = Overlay("another base", tiny.base, {name: 1.1 * tensor for name, tensor in start.items()})
    for family, config in (
        (tiny, INFORMED),
        (replace(tiny, base=other), INFORMED),
        (tiny, replace(INFORMED, tasks=("pets",))),
    ):
        ours = calibrate_family(family, config, experts=passes).weights.read(family.adapter.tower)
        assert all(tensor.equal(ours[name]) for name, tensor in tensors(family, config).items())


@pytest.mark.slow
def test_priors_that_find_no_room_are_counted_every_time(tiny: Family) -> None:
    passes = expert_passes(tiny, INFORMED, WalkCache(0))
    found = [calibrate_family(tiny, INFORMED, experts=passes).weights.read(tiny.adapter.tower) for _ in range(2)]
    assert all(tensor.equal(found[1][name]) for name, tensor in found[0].items())
    room = next(iter(passes.values())).kept
    assert room is not None
    assert (room.left, room.spared_bytes) == (0, 0)


def write_experts_of_rank_8(root: Path) -> list[str]:
    """Experts of the suite in `root`, each as a whole model and as an adapter; returns the maps that they change."""
    base, names = load_file(root / "base" / "model.safetensors"), list[str]()
    for seed, folder in enumerate(sorted((root / "experts").iterdir())):
        whole, factors = load_file(folder / "model.safetensors"), {}
        whole = {name: base[name] for name in whole}
        names = [name.removesuffix(".weight") for name in whole if ".layers." in name and whole[name].ndim == 2]
        for place, name in enumerate(names):
            rows, columns = base[f"{name}.weight"].shape
            right, left = noise(100 * seed + place, 8, columns).float(), 0.01 * noise(300 + place, rows, 8).float()
            factors |= {f"{name}.lora_A.weight": right, f"{name}.lora_B.weight": left}
            whole[f"{name}.weight"] = (base[f"{name}.weight"] + left.double() @ right.double()).float()
        save_file(whole, folder / "model.safetensors", {"format": "pt"})
        (root / "adapters").mkdir(exist_ok=True)
        write_adapter(root / "adapters" / folder.name, factors, r=8, lora_alpha=8)
    return names


def test_starved_experts_of_a_mixture_are_solved(tmp_path: Path) -> None:
    trial = write_trial(tiny_decoder(ROWS["qwen3_moe"]), ROWS["qwen3_moe"], tmp_path)
    refined, informed = (calibrate(trial.family, trial.config(recipe=recipe)) for recipe in ("refined", "informed"))
    assert refined.record["starved"]
    assert "starved" not in informed.record or not informed.record["starved"]
    json.dumps(informed.record)

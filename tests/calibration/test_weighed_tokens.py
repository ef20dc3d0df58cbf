"""Tokens that weigh by what the expert's task vector does to them: s_t itself, and what a calibration makes of it.

Whole calibrations of CLIP and T5 are held against the independent computation in `test_reference_clip` and
`test_reference_t5`, mixtures here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lanes import rows
from several import check_alike
from tiny_decoders import fresh
from tiny_text import write_text_suite
from torch import Tensor

from featcal import CalibrationConfig, calibrate, calibrate_to_folder, load_suite, open_family
from featcal.calibration.calibrate import config_for
from featcal.calibration.prior import Factors, spanning_rows
from featcal.calibration.token_rows import TokenRows
from featcal.calibration.weighed_tokens import FLOOR, LEAST, MOST, TaskVectorEffect, weigh
from featcal.family.opening import Family
from featcal.suite.calibration_options import INFORMED, REFINED
from featcal.system.distributed import ALONE
from featcal.system.errors import InputError, NumericalError
from featcal.testing.checks import CLOSE, _compare_calibration

CONFIG = CalibrationConfig(recipe=REFINED, lam=1e-2, alpha=0.6, beta=0.5, samples=8, batch_size=3, weigh_tokens=True)


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def seen(acting: TaskVectorEffect, batches: list[tuple[Tensor, Tensor | None]]) -> TaskVectorEffect:
    for given, weights in batches:
        total = float(len(given) if weights is None else weights.sum())
        acting.see(given, TokenRows(len(given), total, None, weights))
    return acting


def test_the_weight_of_a_token_by_its_formula() -> None:
    """With tokens beyond both ends of the range, one of which the base makes nothing, and weights of their own."""
    given, before = noise(40, 5), torch.diag(torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0], dtype=torch.float64))
    given[:3, 4] = torch.tensor([1e3, 1e-9, 7.0])
    given[2, :4] = 0.0
    change, own = noise(3, 5, seed=1), noise(40, seed=2).exp()
    (rows,) = weigh([seen(TaskVectorEffect(change, before), [(given[:25], own[:25]), (given[25:], own[25:])])], ALONE)

    def mean(values: Tensor) -> Tensor:
        return (own * values).sum() / own.sum()

    kept = (given @ before.mT).square().sum(1)
    ratio = (given @ change.mT).square().sum(1) / (kept + FLOOR * mean(kept))
    relative = ratio / mean(ratio)
    assert float(relative.min()) < LEAST
    expected = relative.clamp(LEAST, MOST).sqrt()
    found = torch.cat([one.weights for one in rows if one.weights is not None])
    torch.testing.assert_close(found, own * expected / mean(expected), rtol=1e-12, atol=0)
    assert sum(one.total for one in rows) == pytest.approx(float(own.sum()), rel=1e-12)
    assert [one.count for one in rows] == [25, 15]


def test_one_token_may_hold_nearly_all_and_no_more() -> None:
    given = torch.cat([torch.full((500, 1), 1e-3), torch.ones(1, 1)]).double()
    mostly = torch.cat([given, torch.ones_like(given)], dim=1)
    one = torch.ones(1, 1, dtype=torch.float64)
    acting = TaskVectorEffect(torch.cat([one, 0 * one], 1), torch.cat([0 * one, one], 1))
    (rows,) = weigh([seen(acting, [(mostly, None)])], ALONE)
    weights = rows[0].weights
    assert weights is not None
    assert float(weights[-1] / weights[0]) == pytest.approx((MOST / LEAST) ** 0.5, rel=1e-12)


def test_a_token_that_the_base_makes_nothing_of_is_held_against_a_millionth_of_the_mean() -> None:
    """2e-6 over 1e-6 of 1/2 is 4, the other token's ratio 1; the weights are as the roots."""
    along, across = torch.eye(2, dtype=torch.float64).split(1)
    given = torch.tensor([[2e-6**0.5, 0.0], [1.0, 1.0]], dtype=torch.float64)
    (rows,) = weigh([seen(TaskVectorEffect(along, across), [(given, None)])], ALONE)
    weights = rows[0].weights
    assert weights is not None
    assert float(weights[0] / weights[1]) == pytest.approx(2, rel=1e-5)


def test_an_expert_that_is_the_base_weighs_all_alike() -> None:
    own, given = noise(6, seed=3).exp(), noise(6, 4)
    still, moved = (
        TaskVectorEffect(torch.zeros(2, 4).double(), noise(2, 4)),
        TaskVectorEffect(noise(2, 4, seed=5), noise(2, 4)),
    )
    first, other = weigh([seen(still, [(given, own)]), seen(moved, [(given, own)])], ALONE)
    assert first[0].weights is not None
    assert other[0].weights is not None
    assert first[0].weights.equal(own)
    assert not other[0].weights.allclose(own)


def test_features_that_are_not_finite_weigh_nothing() -> None:
    """They do not all count alike, as those of an expert that is the base do."""
    given = noise(9, 4)
    given[3, 1] = torch.nan
    with pytest.raises(NumericalError, match="tokens cannot be weighed"):
        weigh([seen(TaskVectorEffect(noise(2, 4, seed=5), noise(2, 4)), [(given, None)])], ALONE)


def test_factors_of_low_rank_act_as_their_product() -> None:
    left, right = noise(12, 3), noise(3, 9, seed=1)
    pair: Factors = (left, right)
    small, base, given = spanning_rows(pair)[0], noise(12, 9, seed=2), noise(30, 9, seed=3)
    assert small.shape == (3, 9)
    by_factors, dense = weigh(
        [seen(TaskVectorEffect(one, base), [(given, None)]) for one in (small, left @ right)], ALONE
    )
    torch.testing.assert_close(by_factors[0].weights, dense[0].weights, rtol=1e-10, atol=0)


@pytest.mark.parametrize("kind", rows(["mixtral", "qwen3_moe"], quick=(), slow=("qwen3_moe",)))
def test_every_tensor_of_a_mixture(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trial = fresh(kind, tmp_path)
    found = _compare_calibration(trial, trial.config(recipe=REFINED, beta=0.5, weigh_tokens=True, routers=True))
    assert max(found.values()) <= CLOSE
    plain = calibrate(trial.exact, trial.config(recipe=REFINED, beta=0.5))
    moved = calibrate(trial.exact, trial.config(recipe=REFINED, beta=0.5, weigh_tokens=True))
    name = next(n for n in trial.family.adapter.tower if ".experts." in n and n not in _as_merged(trial.exact, plain))
    assert not moved.weights.read([name])[name].allclose(plain.weights.read([name])[name], rtol=1e-6)


def _as_merged(family: Family, made: Any) -> set[str]:
    names = family.adapter.tower
    ours, merged = made.weights.read(names), family.merged.read(names)
    return {name for name in names if ours[name].equal(merged[name])}


@pytest.mark.parametrize("recipe", [REFINED, INFORMED])
def test_batches_change_nothing_and_the_option_does(recipe: str, tiny64: Family) -> None:
    made = {
        (size, on): calibrate(tiny64, config_for(tiny64, recipe=recipe, samples=8, batch_size=size, weigh_tokens=on))
        for size, on in ((8, True), (3, True), (8, False))
    }
    names = [f"{block.name}.mlp.fc2.weight" for block in tiny64.adapter.blocks()]
    whole, parts, plain = (one.weights.read(names) for one in made.values())
    for name in names:
        torch.testing.assert_close(parts[name], whole[name], rtol=1e-9, atol=1e-11)
        assert not plain[name].allclose(whole[name], rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(2,), (3, 4)])
def test_ranks_share_the_means_of_a_task(sizes: tuple[int, ...], tiny64: Family, tmp_path: Path) -> None:
    """Two have a task each; three and four share the samples of one."""
    check_alike(tiny64, CONFIG, tmp_path, sizes, most=1e-12)


@pytest.mark.slow
def test_ranks_share_the_means_of_a_member_of_a_mixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("featcal.calibration.calibrate._generation", lambda *_: {})
    trial = fresh("qwen3_moe", tmp_path)
    config = trial.config(recipe=REFINED, beta=0.5, weigh_tokens=True, routers=True)
    check_alike(trial.exact, config, tmp_path / "ranks", (3,), most=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("kind", rows(["t5", "llama"], quick=("llama",), slow=("t5",)))
def test_a_budget_changes_no_bit(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    family = open_family(load_suite(write_text_suite(tmp_path / "suite", kind)), "cpu")
    config = config_for(family, batch_size=3, recipe=INFORMED, weigh_tokens=True)
    free = calibrate_to_folder(family, config, tmp_path / "free")
    monkeypatch.setattr("featcal.calibration.calibrate.state_budget", lambda *_: 2000)
    monkeypatch.setattr("featcal.calibration.calibrate.can_reload", lambda *_: True)
    bound = calibrate_to_folder(family, config, tmp_path / "bound", max_memory=1)
    assert bound["spilled_bytes"] > free["spilled_bytes"] == 0
    files = [tmp_path / out / "model.safetensors" for out in ("free", "bound")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_the_paper_s_recipe_has_none(tiny: Family) -> None:
    with pytest.raises(InputError, match="weigh_tokens belongs to the recipe 'refined' or 'informed'"):
        config_for(tiny, weigh_tokens=True)
    advised = tiny.suite.calibration.model_copy(update={"recipe": "informed", "weigh_tokens": True})
    family = replace(tiny, suite=tiny.suite.model_copy(update={"calibration": advised}))
    assert config_for(family).weigh_tokens
    assert not config_for(family, recipe="paper").weigh_tokens

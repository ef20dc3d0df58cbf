"""Proposition 8: both forms of the excess, its bounds, and which source costs nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from clip_config import clip_config
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_clip import BLOCKS
from torch import Tensor, nn

from featcal.calibration.calibrate import calibrate_family, calibrate_to_folder, config_for, expert_passes
from featcal.calibration.linear_group import LinearGroup
from featcal.calibration.token_rows import TokenRows
from featcal.drift.source import (
    DEPLOYED,
    INSIDE,
    SOURCES,
    Objective,
    SourceExcess,
    _Book,
    compare_sources,
    excess_frame,
    measure_sources,
)
from featcal.family.opening import Family, ensure_family
from featcal.models.lane import WalkCache
from featcal.session.session import Session
from featcal.suite.calibration_options import CalibrationConfig
from featcal.system.errors import InputError, NumericalError

CONFIG = clip_config(samples=10, batch_size=4)


def test_an_objective_without_one_minimiser_is_named(tiny64: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    passes = expert_passes(tiny64, CONFIG, WalkCache(2**24))
    calibrated = calibrate_family(tiny64, CONFIG, experts=passes).weights
    singular = torch.zeros(2, 2, dtype=torch.float64)
    unsolved = Objective(singular, singular, 0.0, singular, 0.0, 0.0)
    monkeypatch.setattr(_Book, "_objective", lambda *_: unsolved)
    with pytest.raises(NumericalError, match=r"block 0: self_attn.*, source 'prefix': not positive .* more samples"):
        measure_sources(tiny64, calibrated, CONFIG, passes)


@pytest.fixture(scope="module")
def found(tiny64: Family) -> list[SourceExcess]:
    passes = expert_passes(tiny64, CONFIG, WalkCache(2**24))
    calibrated = calibrate_family(tiny64, CONFIG, experts=passes).weights
    return measure_sources(tiny64, calibrated, CONFIG, passes)


def test_every_group_and_source_is_there(found: list[SourceExcess]) -> None:
    frame = excess_frame(found)
    assert set(frame["source"]) == {*SOURCES, INSIDE}
    groups = frame.groupby("block")["modules"].nunique().tolist()
    assert groups == [4] * (BLOCKS - 1) + [5]  # the last block weighs the query's tokens apart


def test_both_forms_agree_and_are_not_negative(found: list[SourceExcess]) -> None:
    for one in found:
        assert one.excess >= -1e-10
        assert one.excess_norm >= 0
        assert one.excess == pytest.approx(one.excess_norm, rel=1e-8, abs=1e-10)


def test_the_chain_of_bounds_holds(found: list[SourceExcess]) -> None:
    for one in found:
        assert one.excess <= one.middle + 1e-9
        assert one.middle <= one.supremum + 1e-9


def test_prefix_calibrated_source_costs_nothing(found: list[SourceExcess]) -> None:
    for one in found:
        if one.source == DEPLOYED:
            assert (one.excess, one.middle, one.coupling) == (0.0, 0.0, 0.0)


def test_other_sources_cost_something(found: list[SourceExcess]) -> None:
    later = [one for one in found if one.block != "block 0"]
    for source in ("stale", "merged", "expert"):
        assert all(one.excess > 0 and one.coupling > 0 for one in later if one.source == source), source
    first = [one for one in found if one.block == "block 0"]
    assert all(one.excess == 0 for one in first if one.source in ("stale", "merged"))
    inside = {one.modules: one for one in first if one.source == INSIDE}
    assert all(one.excess > 0 for one in inside.values())


@pytest.mark.parametrize(
    ("config", "tolerance"),
    [(replace(CONFIG, eps=0.1), 1e-8), (replace(CONFIG, lam=0.0, samples=1), 1e-5)],
    ids=["large eps", "eps alone"],
)
def test_the_deployed_minimiser_is_the_calibrated_weight(
    tiny64: Family, config: CalibrationConfig, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the source study calls W_dep is what Algorithm 1 stored, also of fewer tokens than features without lam."""
    from featcal.drift import source

    right: list[Tensor] = []

    def spy(deployed: Objective, other: Objective) -> dict[str, float]:
        right.append(deployed.minimiser())
        return compare_sources(deployed, other)

    monkeypatch.setattr(source, "compare_sources", spy)
    passes = expert_passes(tiny64, config, WalkCache(2**24))
    model = calibrate_family(tiny64, config, experts=passes).weights
    rows = measure_sources(tiny64, model, config, passes)
    prefixes = {name: prefix for prefix, name in tiny64.adapter.block_names().items()}
    for one, weight in zip(rows, right, strict=True):
        if one.source == DEPLOYED:
            names = [f"{prefixes[one.block]}.{name}.weight" for name in one.modules.split(", ")]
            stored = torch.cat([model.read([name])[name] for name in names])
            torch.testing.assert_close(weight, stored, rtol=tolerance, atol=tolerance / 100)


def test_coupling_is_the_mean_distance_of_inputs_and_targets() -> None:
    """The expert's share of a target is the same from every source, so targets differ by (1 - alpha) W (u - u')."""
    group = LinearGroup(["q"], "all", {"q": nn.Linear(1, 1, bias=False)})
    book, own = _Book(group, replace(CONFIG, alpha=0.25)), {"q.weight": torch.tensor([[4.0]])}
    deployed, other = torch.tensor([[[1.0], [1.0]]]), torch.tensor([[[4.0], [2.0]]])
    seen = {source: {"q": other if source == "expert" else deployed} for source in (*SOURCES, INSIDE)}
    book.update(seen, {"q": torch.ones(1, 2, 1)}, own, TokenRows.from_weights(None, 2))
    book.end_task(own)
    found = {one.source: one.coupling for one in book.close("block 0", own, own)}
    assert found["expert"] == pytest.approx(2 * 10**0.5)  # distances 3 and 1, and 0.75 * 4 times as far in the target
    assert found["stale"] == 0


@given(seed=st.integers(0, 2**31), lam=st.floats(1e-3, 10))
@settings(max_examples=40)
def test_excess_on_random_objectives(seed: int, lam: float) -> None:
    generator = torch.Generator().manual_seed(seed)

    def objective(anchor: Tensor) -> Objective:
        u = torch.randn(20, 4, generator=generator, dtype=torch.float64)
        y = torch.randn(20, 3, generator=generator, dtype=torch.float64)
        return Objective(u.mT @ u / 20, y.mT @ u / 20, float(y.square().sum() / 20), anchor, lam, 1e-3)

    anchor = torch.randn(3, 4, generator=generator, dtype=torch.float64)
    numbers = compare_sources(objective(anchor), objective(anchor))
    assert numbers["excess"] >= -1e-12
    assert numbers["excess"] == pytest.approx(numbers["excess_norm"], rel=1e-9, abs=1e-12)
    assert numbers["excess"] <= numbers["middle"] + 1e-12
    assert numbers["middle"] <= numbers["supremum"] + 1e-12


def test_objective_is_the_weighted_squared_error() -> None:
    u, y = torch.randn(50, 4, dtype=torch.float64), torch.randn(50, 3, dtype=torch.float64)
    weight, anchor = torch.randn(2, 3, 4, dtype=torch.float64)
    objective = Objective(u.mT @ u / 50, y.mT @ u / 50, float(y.square().sum() / 50), anchor, 0.1, 0.2)
    direct = (u @ weight.mT - y).square().sum() / 50 + 0.1 * (weight - anchor).square().sum()
    direct += 0.2 * weight.square().sum()
    assert objective(weight) == pytest.approx(float(direct), rel=1e-12)


def test_batches_change_nothing(tiny64: Family, found: list[SourceExcess]) -> None:
    config = replace(CONFIG, batch_size=10)
    passes = expert_passes(tiny64, config, WalkCache(2**24))
    again = measure_sources(tiny64, calibrate_family(tiny64, config, experts=passes).weights, config, passes)
    for one, other in zip(found, again, strict=True):
        assert one.excess == pytest.approx(other.excess, rel=1e-6, abs=1e-9)
        assert one.coupling == pytest.approx(other.coupling, rel=1e-8, abs=1e-12)


@pytest.mark.slow
def test_a_fast_calibration_is_measured_in_its_own_precision(tiny: Family, tmp_path: Path) -> None:
    """A suite that asks for `fast` is measured as it is calibrated, whether from its options or from a folder."""
    options = tiny.suite.calibration.model_copy(update={"precision": "fast", "batch_size": 4})
    suite = tiny.suite.model_copy(update={"calibration": options})
    fast = replace(tiny, suite=suite)
    found = Session(fast).fit.sources(config_for(fast, samples=6))
    exact = Session(tiny).fit.sources(config_for(tiny, samples=6))
    assert [one.source for one in found] == [one.source for one in exact]
    apart = [abs(one.relative - other.relative) for one, other in zip(found, exact, strict=True)]
    assert 0 < sum(apart) / len(apart) < 0.05
    calibrate_to_folder(fast, config_for(fast, samples=6), tmp_path / "out")
    assert [one.source for one in Session(fast).fit.sources(str(tmp_path / "out"))] == [one.source for one in found]
    config = config_for(fast, samples=6)
    passes = expert_passes(ensure_family(fast, precision="exact"), config)
    with pytest.raises(InputError, match="another precision"):
        measure_sources(fast, fast.merged, config, passes)


@pytest.mark.slow
def test_what_was_calibrated_is_the_anchor(tiny: Family, tmp_path: Path) -> None:
    """A calibration of another model than the suite's is held against that one, whether it is named or in a folder."""
    session, config = Session(tiny), config_for(tiny, samples=6)
    other = session.fit.family_with("task-arithmetic:scale=0.7")
    calibrate_to_folder(other, config, tmp_path / "out")
    passes = expert_passes(tiny, config)
    expected = measure_sources(other, calibrate_family(other, config).weights, config, passes)
    named = session.fit.sources("calibrated:samples=6@task-arithmetic:scale=0.7")
    folder = session.fit.sources(str(tmp_path / "out"))
    for one, by_name, in_folder in zip(expected, named, folder, strict=True):
        assert by_name.minimum == pytest.approx(one.minimum, rel=1e-6)
        assert in_folder.minimum == pytest.approx(one.minimum, rel=1e-4)  # the folder's weights are rounded
        assert in_folder.coupling == pytest.approx(one.coupling, rel=1e-2, abs=1e-6)
    with pytest.raises(InputError, match="'merged' is not a calibration"):
        session.fit.sources("merged")

"""What the models of a study share is made once, changes no number, and is a part of the cost of each."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from featcal.family.opening import Family
from featcal.models.lane import WalkCache
from featcal.models.walk import BlockwiseForward
from featcal.session import fits, measurements, open_suite
from featcal.session.session import Session
from featcal.studies import maker
from featcal.studies.compare import compare_methods
from featcal.studies.maker import SHARED, Passes
from featcal.studies.plan import StudyPlan
from featcal.studies.runner import Row
from featcal.studies.store import Rows
from featcal.system import progress
from featcal.system.progress import Timing

METHODS = ["merged", "calibrated", "regmean", "svc@calibrated", "react@calibrated", "react", "calibrated:rho=1@ties"]
SEEDS = (42, 43)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often functions were called that the work of a study consists of."""
    found: Counter[str] = Counter()

    def count(place: Any, name: str) -> None:
        original = getattr(place, name)

        def counted(*args: Any, **options: Any) -> Any:
            found[name] += 1
            return original(*args, **options)

        monkeypatch.setattr(place, name, counted)

    for place, name in (
        (open_suite, "expert_passes"),
        (fits, "calibrate_family"),
        (measurements, "reach_features"),
        (measurements, "measure_total_drift"),
    ):
        count(place, name)
    return found


def table(family: Family, methods: list[str], seeds: tuple[int, ...], folder: Path) -> list[Row]:
    return list(compare_methods(Session(family), StudyPlan(methods, seeds, samples=8, rows=Rows(folder))).rows)


def numbers(row: Row) -> dict[str, Any]:
    return {name: row.to_json()[name] for name in ("model", "scores", "drift", "cosine", "failure")}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEATCAL_CACHE", str(tmp_path / "cache"))


@pytest.mark.slow
def test_what_rows_share_is_made_once_and_changes_no_number(tiny: Family, tmp_path: Path, calls: Counter[str]) -> None:
    together = table(tiny, METHODS, SEEDS, tmp_path / "together")
    tasks = len(tiny.experts)
    # Samples of every seed are drawn once; every calibration is run once, also where others act on it.
    assert (calls["expert_passes"], calls["calibrate_family"]) == (len(SEEDS), 2 * len(SEEDS))
    # Two affine maps a seed stand after models that are scored anyway, and nothing is run for them.
    towers = len(together) - 2 * len(SEEDS)
    assert calls["reach_features"] == towers * tasks
    assert calls["measure_total_drift"] == towers - 1  # the experts' own drift is 0
    for number, row in enumerate(together):
        if row.point.seed in (None, SEEDS[0]):
            seeds = (42,) if row.point.seed is None else (row.point.seed,)
            alone = table(tiny, [row.method], seeds, tmp_path / str(number))[-1]
            assert numbers(alone) == numbers(row)
            assert not row.found.failure


@pytest.mark.slow
def test_a_row_costs_what_it_costs_alone(tiny: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing samples takes 0.3 s more here, and every model 0.2 s: a part of every row that needs them."""
    draw, hold = open_suite.expert_passes, maker._hold

    def slow_draw(*args: Any, **options: Any) -> Any:
        time.sleep(0.3)
        return draw(*args, **options)

    def slow_hold(weights: Any, names: Any) -> Any:
        time.sleep(0.2)
        return hold(weights, names)

    monkeypatch.setattr(open_suite, "expert_passes", slow_draw)
    monkeypatch.setattr(maker, "_hold", slow_hold)
    rows = {row.method: row.found for row in table(tiny, ["ties", "regmean", "calibrated@ties"], (42,), tmp_path)}
    wall = {name: one.seconds["make"].wall for name, one in rows.items()}
    assert wall["ties"] >= 0.2
    assert wall["regmean"] >= 0.5
    assert wall["calibrated@ties"] >= wall["ties"] + 0.5
    assert SHARED not in rows["regmean"].stages
    assert rows["calibrated@ties"].stages[SHARED] >= wall["ties"] + 0.3


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds by which costs are measured; what a test adds is what passes, half of it the processor's."""
    found = [0.0]
    clocks = SimpleNamespace(perf_counter=lambda: found[0], process_time=lambda: found[0] / 2)
    monkeypatch.setattr(progress, "time", clocks)
    return found


def test_passes_that_a_start_has_paid_for_are_not_paid_twice(clock: list[float]) -> None:
    passes, made = Passes(), []

    def make() -> dict[str, Any]:
        made.append(1)
        clock[0] += 0.5
        return {}

    def cost(paid: frozenset[Any], *keys: str) -> float:
        passes.begin(paid)
        for key in keys:
            passes.get_or_make(key, make)
        return passes.sum_found().wall

    assert cost(frozenset(), "a") == 0  # it is in what was measured
    assert cost(frozenset(), "a", "a") == 0.5  # once
    assert cost(frozenset("a"), "a") == 0
    assert passes.used == {"a"}
    assert len(made) == 1


def test_what_a_walk_finds_counts_as_it_took(tiny: Family) -> None:
    room = WalkCache(2**28)
    one = tiny.expert_pass(tiny.samples(next(iter(tiny.experts)), "calibration", 4, 42), 4, room)
    run = tiny.run()

    def walk() -> None:
        with torch.no_grad():
            through = BlockwiseForward(run, "walk", {one.task: one}, {})
            for stage in run.adapter.stages:
                through.enter(stage)
                for _, block in through.blocks(stage):
                    through.pass_experts(stage, block)
            through.finish()

    walk()
    assert room.spared == Timing()
    assert room.spared_bytes == 0
    walk()
    assert room.spared_bytes == 2**28 - room.left  # all that was kept
    once = room.spared.wall
    assert once > 0
    walk()
    assert room.spared.wall == pytest.approx(2 * once)


def test_what_is_done_with_a_thing_is_no_part_of_making_it(clock: list[float]) -> None:
    def slow() -> Iterator[int]:
        for number in range(2):
            clock[0] += 0.5
            yield number

    effort = Timing()
    for _ in effort.time_each(slow()):
        clock[0] += 2
    assert (effort.wall, effort.cpu) == (1.0, 0.5)

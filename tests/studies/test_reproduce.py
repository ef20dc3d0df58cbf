"""A suite beside its table of the paper: the interval, the verdict of every score, a killed study, and the page."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import Run, document
from scipy import stats

from featcal import evaluate
from featcal.family.opening import Family
from featcal.session.session import Session
from featcal.studies import paper, reproduce
from featcal.studies.maker import Maker
from featcal.studies.paper import PaperRow, PaperTable, PrintedScores, printed_scores
from featcal.studies.plan import StudyPlan
from featcal.suite.schema import Suite, load_suite
from featcal.suite.views import EvaluationSamples
from featcal.system.errors import InputError


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEATCAL_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch, tiny_suite: Suite) -> PrintedScores:
    """A table of the tiny suite as if the paper had printed one: its second row has two cells in the wrong order."""
    rows = (
        PaperRow("Pre-trained", (75.0, 0.0), average=50.0),
        PaperRow("Task Arithmetic w/ FEATCAL", (None, 33.3), average=40.0, probable=(None, 50.0), notes=("turned",)),
        PaperRow("Traditional MTL", (90.0, 90.0), average=90.0),
    )
    table = PaperTable(1, "tiny", ("Pets", "Signs"), rows, {"": "tiny"}, ("pets", "signs"))
    monkeypatch.setattr(paper, "paper_tables", lambda: (table,))
    monkeypatch.setattr(reproduce, "load_suite", lambda name: tiny_suite)
    return printed_scores("tiny")


def plan(*models: str, **options: Any) -> StudyPlan:
    return StudyPlan(models or ("base", "calibrated"), **{"seeds": (42, 43, 44), "samples": 4, **options})


def test_intervals_are_those_of_scipy() -> None:
    wilson = stats.binomtest(1363, 1880).proportion_ci(method="wilson")
    assert reproduce.share_interval(1363 / 1880, 1880) == pytest.approx((wilson.low, wilson.high))
    assert reproduce.share_interval(0.0, 20)[0] == pytest.approx(0, abs=1e-12)
    half = stats.norm.ppf(0.975) * math.sqrt(1.06 / 1497)
    low, high = reproduce.correlation_interval(0.887, 1500)
    assert (np.arctanh(low), np.arctanh(high)) == pytest.approx((np.arctanh(0.887) - half, np.arctanh(0.887) + half))
    assert reproduce.correlation_interval(1.0, 1500) == (1.0, 1.0)
    assert reproduce.correlation_interval(0.5, 3) == (-1.0, 1.0)


@pytest.mark.slow
def test_scores_stand_beside_the_printed_ones(tiny: Family, printed: PrintedScores) -> None:
    found = reproduce.reproduce(Session(tiny), plan(seeds=range(42, 48)), printed)
    cells = {(one.model, one.task): one for one in found.cells}
    assert [*cells] == [(model, task) for model in ("base", "calibrated") for task in ("average", "pets", "signs")]
    base = evaluate(tiny, "base", samples=None).tasks
    for task in ("pets", "signs"):  # nothing is drawn: Wilson's interval alone
        cell = cells["base", task]
        wilson = stats.binomtest(round(12 * base[task].value), 12).proportion_ci(method="wilson")
        assert (cell.measured, cell.low, cell.high) == pytest.approx(
            (base[task].value, wilson.low, wilson.high), abs=1e-6
        )
    seen = [evaluate(tiny, f"calibrated:samples=4,seed={seed}").tasks["signs"].value for seed in range(42, 48)]
    mean = float(np.mean(seen))
    draw = stats.t.ppf(0.975, 5) * np.std(seen, ddof=1) * math.sqrt(7 / 6)  # one more run, beside the mean of six
    below, above = (math.hypot(end - mean, draw) for end in reproduce.share_interval(mean, 12))
    cell = cells["calibrated", "signs"]
    assert 0.1 < draw < above < 1 - mean  # the seeds differ here
    assert mean < below  # so that the interval ends at 0
    assert (cell.measured, cell.low, cell.high) == pytest.approx((mean, 0.0, mean + above), abs=1e-6)
    assert cell.printed == 0.5  # what was probably meant
    assert (cells["calibrated", "pets"].agrees, cells["calibrated", "pets"].verdict) == (None, "")
    average, pets, signs = (cells["base", task] for task in ("average", "pets", "signs"))
    assert average.measured == pytest.approx((pets.measured + signs.measured) / 2)
    halves = [one.high - one.measured for one in (pets, signs)]
    assert average.high - average.measured == pytest.approx(math.hypot(*halves) / 2)
    assert found.missing == ("Traditional MTL: there is no published model of it",)


def test_two_seeds_give_no_verdict_where_samples_are_drawn(tiny: Family, printed: PrintedScores) -> None:
    found = reproduce.reproduce(Session(tiny), plan(seeds=(42, 43)), printed)
    cells = {(one.model, one.task): one for one in found.cells}
    drawn, fixed = cells["calibrated", "signs"], cells["base", "signs"]
    seen = [evaluate(tiny, f"calibrated:samples=4,seed={seed}").tasks["signs"].value for seed in (42, 43)]
    assert (drawn.measured, drawn.low, drawn.high) == (pytest.approx(np.mean(seen)), None, None)
    assert (drawn.agrees, drawn.verdict) == (None, "")
    assert fixed.agrees is not None
    (told,) = [one for one in found.departures if "seeds" in one]
    assert told.startswith("2 calibration seeds are too few for an interval")


@pytest.mark.parametrize(
    ("printed_at", "agrees", "verdict"),
    [(0.6004, True, "agrees"), (0.6006, False, "differs by 10.1 points"), (0.3996, True, "agrees")],
)
def test_a_printed_score_agrees_within_the_interval_and_its_rounding(
    printed_at: float, agrees: bool, verdict: str
) -> None:
    cell = reproduce.TableCell("Pre-trained", "base", "pets", printed_at, 0.5, 0.4, 0.6)
    assert (cell.agrees, cell.verdict) == (agrees, verdict)


def test_a_killed_study_goes_on(tiny: Family, printed: PrintedScores, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    make = Maker.make
    monkeypatch.setattr(
        Maker, "make", lambda self, of, named, way: made.append(named.name) or make(self, of, named, way)
    )

    def kill(label: str, done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        reproduce.reproduce(Session(tiny), plan(progress=kill), printed)
    assert len(made) == 2
    found = reproduce.reproduce(Session(tiny), plan(), printed)
    assert len(made) == len({*made}) == 4
    assert reproduce.reproduce(Session(tiny), plan(), printed).cells == found.cells
    assert len(made) == 4


def test_what_is_not_as_in_the_paper_is_said(tiny: Family, printed: PrintedScores, monkeypatch: Any) -> None:
    on = StudyPlan(("base",), on=plan().on._replace(scores=EvaluationSamples(5, "validation"))).on
    found = reproduce.reproduce(Session(tiny), plan("base", on=on), printed)
    assert found.departures == (
        "4 calibration samples per task, in the paper 256",
        "scored on 5 samples per task, in the paper on all",
        "scored on the validation split, in the paper on the test split",
    )
    monkeypatch.setattr(reproduce, "load_suite", lambda name: tiny.suite.model_copy(update={"vocabulary": "base"}))
    found = reproduce.reproduce(Session(tiny), plan("base", samples=256), printed)
    assert found.departures == ("the suite file is not the one of this name that comes with featcal",)


def test_rows_that_are_not_there_are_refused(tiny: Family, printed: PrintedScores) -> None:
    with pytest.raises(InputError, match=r"Table 1: tiny has no row of model 'ties'; it has base, calibrated"):
        reproduce.reproduce(Session(tiny), plan("base", "ties"), printed)
    other = replace(printed, table=replace(printed.table, tasks=("pets", "cars")))
    with pytest.raises(InputError, match=r"has the tasks pets, cars; the suite has pets, signs"):
        reproduce.reproduce(Session(tiny), plan(), other)


def test_the_command_prints_and_writes_a_page(
    run: Run, tiny_suite_file: Path, printed: PrintedScores, tmp_path: Path
) -> None:
    page = tmp_path / "page.md"
    asked = ("study", "paper", tiny_suite_file, "--samples", "4", "--seeds", "42", "--model", "base")
    code, out, err = run(*asked, "--out", page)
    assert code == 0
    assert "note: 4 calibration samples per task, in the paper 256" in err
    (pets,) = [re.split("  +", line) for line in out.splitlines() if "  pets" in line]
    found = document(run(*asked, "--json"))
    cell = found["cells"][1]
    assert (cell["task"], cell["printed"]) == ("pets", 0.75)
    numbers = [f"{100 * cell[name]:.1f}" for name in ("measured", "printed", "low", "high")]
    assert pets[:5] == ["Pre-trained", "pets", *numbers[:2], " to ".join(numbers[2:])]
    assert f"| {' | '.join(pets)} |" in page.read_text().splitlines()
    assert "- Traditional MTL: there is no published model of it" in page.read_text()
    assert found["study"] == "paper"
    assert found["table"] == "Table 1: tiny"
    assert run(*asked, "--out", page)[0] == 1


def test_a_suite_without_a_table_is_refused_with_those_that_have_one(run: Run) -> None:
    code, _, err = run("study", "paper", "clip-mini")
    assert code == 1
    assert "prints no scores of the tasks of suite 'clip-mini'; it does of clip-vit-base-patch32-ta8" in err


def test_every_row_of_the_paper_has_a_model_but_for_joint_training() -> None:
    for table in paper.paper_tables():
        for suite in table.suites.values() if table.tasks else ():
            load_suite(suite)
            rows = {one.row.method: one.model for one in printed_scores(suite).rows}
            assert {name for name, model in rows.items() if not model} <= {"Traditional MTL"}
            assert rows["Task Arithmetic w/ FEATCAL"] == "calibrated"
            assert rows.get("WUDI-Merging w/ Surgery", "surgery@wudi:steps=400") == "surgery@wudi:steps=400"

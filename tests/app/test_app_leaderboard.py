"""The Leaderboard page without a browser: what was measured, and the paper's tables beside it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import streamlit as st
from app_pages import assert_shown_as_text, button, charts, control, healthy, hostile, opened
from lanes import rows
from streamlit.testing.v1 import AppTest

from app import jobs
from featcal.family.opening import Family
from featcal.figures import study_tables
from featcal.figures.names import shorten_models
from featcal.server.kinds import KINDS, Work
from featcal.session.session import Session
from featcal.studies import budget, library
from featcal.studies.compare import compare_methods, every_method
from featcal.studies.history import suite_hash
from featcal.studies.paper import paper_tables
from featcal.studies.plan import StudyPlan
from featcal.studies.study import Study, read_study
from featcal.suite.methods import NEEDS
from featcal.suite.schema import load_suite
from featcal.system.formatting import duration, percent
from featcal.system.progress import silent
from featcal.system.resources import data_path

pytestmark = [pytest.mark.usefixtures("instant_maps"), pytest.mark.filterwarnings("ignore")]
SHIPPED = ("clip-mini", "lm-mini", "t5-mini")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEATCAL_CACHE", str(tmp_path / "cache"))


def frames(app: AppTest) -> dict[str, Any]:
    """The tables of the page: of the suite, across suites, of the paper."""
    found = {}
    for one in app.dataframe:
        columns = {*one.value.columns}
        if "method" not in columns or "recipe" in columns:  # of runs
            continue
        kind = "methods" if "CPU s" in columns else "paper" if "misprint or oddity" in columns else "suites"
        found[kind] = one.value
    return found


def study_of_tiny(tiny: Family, *methods: str) -> Study:
    return compare_methods(Session(tiny), StudyPlan(methods, (42,), 8))


@pytest.mark.slow
@pytest.mark.parametrize("suite", rows(SHIPPED, quick=["lm-mini"], slow=["clip-mini", "t5-mini"]))
def test_the_tables_of_the_embedded_suites_are_there_at_once(suite: str) -> None:
    app = opened(suite, "methods")
    assert healthy(app)
    assert charts(app) == 1  # runs and methods are points of one plot
    tables = frames(app)
    table = tables["methods"]
    assert [one.proto.placeholder for one in app.dataframe][:2] == ["–", "–"]  # and not "None"
    study = read_study(data_path(suite, "compare.json"))
    assert {*table["method"]} == {*shorten_models(one.method for one in study.summaries())}
    scored = table["average"].dropna().tolist()
    assert scored == sorted(scored, reverse=True)
    assert [name for name in NEEDS if name not in table] == []
    by_name = table.set_index("method")
    assert by_name.loc["calibrated, refined", "average"] > by_name.loc["calibrated", "average"]
    others = by_name["average"].drop("base")
    assert others.min() < by_name.loc["merged", "average"]  # what makes it worse stays
    assert {*tables["suites"].columns} == {"method", *SHIPPED}
    assert len(tables["paper"]) == 19
    assert any("featcal compare" in one.value for one in app.code)
    wall = sum(spent.wall for row in study.rows for spent in row.found.seconds.values())
    assert any(f"took {duration(wall)} for {len(study.rows)} models" in one.value for one in app.markdown)


@pytest.mark.parametrize("suite", SHIPPED)
def test_what_is_shipped_is_of_the_suite_as_it_is(suite: str) -> None:
    """Three seeds where none is said, all test samples; a changed suite has to be measured anew."""
    study = read_study(data_path(suite, "compare.json"))
    assert study.suite_hash == suite_hash(load_suite(suite))
    assert study.on["scores"] == {"split": "test", "samples": None, "seed": 42}
    methods = {one.method: one for one in study.summaries()}
    assert methods.keys() == {*every_method(Session(_family(suite)))}
    drawn = [one for name, one in methods.items() if "samples" in one.needs and "seed=" not in name]
    seeds = {one.seeds for one in drawn if not one.failure}
    assert seeds == {(42, 43, 44)}
    assert json.loads(study.text()) == json.loads(data_path(suite, "compare.json").read_text())


def test_every_shipped_study_is_of_its_suite_as_it_is() -> None:
    studies = library.shipped_studies()
    assert {(one.kind, one.suite) for one in studies} >= {("compare", suite) for suite in SHIPPED}
    for study in studies:
        assert study.suite_hash == suite_hash(load_suite(study.suite))
        assert study.kind in library.KINDS


def _family(suite: str) -> Family:
    from featcal.family.opening import open_family

    return open_family(load_suite(suite), device="cpu")


def test_a_suite_without_results_says_so(tiny_suite_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "shipped_studies", list)
    app = opened(tiny_suite_file, "methods")
    assert healthy(app)
    assert charts(app) == 1  # of runs
    assert any("Nothing of this suite was measured yet" in one.value for one in app.info)
    assert frames(app).keys() == {"paper"}
    assert any(f"featcal compare {tiny_suite_file} --model all" in one.value for one in app.code)


@pytest.mark.slow
def test_own_results_are_found(tiny_suite_file: Path, tiny: Family) -> None:
    assert library.keep_study(study_of_tiny(tiny, "merged", "calibrated")) == ""
    app = opened(tiny_suite_file, "methods")
    assert healthy(app)
    assert charts(app) == 1
    table = frames(app)["methods"].set_index("method")
    assert {*table.index} == {"expert", "merged", "calibrated"}
    study = study_of_tiny(tiny, "merged", "calibrated")
    average = next(one.average for one in study.summaries() if one.method == "calibrated")
    assert average is not None
    assert table.loc["calibrated", "average"] == pytest.approx(100 * average.mean)
    assert {*frames(app)["suites"].columns} == {"method", "tiny", *SHIPPED}
    library.keep_study(study_of_tiny(tiny, "merged", "calibrated"))  # the same: in place of the first
    library.keep_study(study_of_tiny(tiny, "merged"))
    app = opened(tiny_suite_file, "methods")
    (choice,) = [one for one in app.selectbox if one.key == "which-table"]
    assert len(choice.options) == 2
    assert len(frames(app)["methods"]) == 2  # the newest first
    choice.set_value(1).run()
    assert len(frames(app)["methods"]) == 3


def test_a_row_is_the_model_that_it_measured(tiny: Family) -> None:
    """With its samples and seed: the bare name of a method would be the page's own options."""
    study = study_of_tiny(tiny, "merged", "calibrated")
    named = {one.method: one.model for one in study.summaries()}
    assert named == {"expert": "expert", "merged": "merged", "calibrated": "calibrated:samples=8,seed=42"}
    named = {one.method: one.model for one in read_study(data_path("clip-mini", "compare.json")).summaries()}
    assert named["calibrated:recipe=refined"] == "calibrated:recipe=refined,samples=64,seed=42"


@pytest.mark.slow
def test_lists_of_models_know_scores(tiny_suite_file: Path, tiny: Family) -> None:
    study = study_of_tiny(tiny, "merged", "ties", "tsv-m")
    library.keep_study(study)
    st.cache_data.clear()  # of other tests with this suite
    scores = {one.method: one.average.mean for one in study.summaries() if one.average is not None}
    app = opened(tiny_suite_file, "cosines", merge="ties", beside="tsv-m", n="8")
    merges = [one for one in control(app, "merge").options if " · merge" in one]
    best, worst = sorted(("ties", "tsv-m"), key=lambda name: -scores[name])
    assert merges[:2] == [f"{name} · merge, {percent(scores[name])} %" for name in (best, worst)]
    assert all("%" not in one for one in merges[2:])
    assert healthy(app)
    assert (control(app, "merge").value, control(app, "beside").value) == ("ties", "tsv-m")


@pytest.mark.slow
def test_measuring_is_a_job_whose_result_the_page_finds(
    tiny_suite_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, dict[str, Any], bool]] = []
    monkeypatch.setattr(jobs, "follow_jobs", lambda *given: asked.append(given) if given[0] == "compare" else None)
    app = opened(tiny_suite_file, "methods")
    assert asked == []  # nobody asked for it
    button(app, "Start").click().run()
    ((kind, args, start),) = asked
    assert (args["methods"], args["seeds"], args["samples"], start) == (["all"], [42, 43, 44], 64, True)
    few = {**args, "methods": ["merged", "calibrated"], "seeds": [42], "samples": 8}
    document = KINDS[kind](Work(str(tiny_suite_file), json.loads(json.dumps(few)), tmp_path, silent))
    app.run()
    assert healthy(app)
    table = frames(app)["methods"].set_index("method")
    expected = {one["method"]: one["average"]["mean"] for one in document["methods"]}
    assert table["average"].to_dict() == pytest.approx({name: 100 * one for name, one in expected.items()})


@pytest.mark.slow
def test_other_studies_are_lines_over_their_places(tiny_suite_file: Path, tiny: Family) -> None:
    library.keep_study(budget.study_budget(Session(tiny), StudyPlan(["merged", "calibrated"], (42,), 8), (4, 8)))
    app = opened(tiny_suite_file, "methods")
    assert healthy(app)
    _, chart = app.get("plotly_chart")
    lines = {one["name"]: one["x"] for one in json.loads(chart.proto.spec)["data"]}
    assert lines == {name: ["4", "8"] for name in ("expert", "merged", "calibrated")}
    table = frames(app)["methods"]
    assert table["n"].tolist() == [4, 4, 4, 8, 8, 8]
    assert any("4 and 8 calibration samples per task; calibration seeds 42;" in one.value for one in app.caption)
    assert "tiny" not in frames(app)["suites"]  # of method tables alone


@pytest.mark.slow
def test_corrupted_pictures_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    clean = read_study(data_path("clip-mini", "compare.json"))
    rows = [
        replace(row, point=replace(row.point, at={"corruption": kind, "severity": severity}))
        for kind, severity in (("clean", 0), ("fog", 3))
        for row in clean.rows[:3]
    ]
    monkeypatch.setattr(library, "shipped_studies", lambda: [replace(clean, kind="corrupt", rows=tuple(rows))])
    app = opened("clip-mini", "methods")
    assert healthy(app)
    assert [len(group.proto.imgs) for group in app.get("image")] == [6, 6]
    assert charts(app) == 2


def test_failures_are_said_and_damaged_files_are_named(tiny_suite_file: Path, tiny: Family, tmp_path: Path) -> None:
    library.keep_study(study_of_tiny(tiny, "merged", "regmean:reduce=2"))
    (tmp_path / "cache" / "studies" / "finished" / "broken.json").write_text("{")
    app = opened(tiny_suite_file, "methods")
    assert not app.exception
    assert any("broken.json" in one.value for one in app.warning)
    assert any("reduce is 2" in one.value for one in app.caption)


def test_names_are_text(tiny_suite_file: Path, tiny: Family) -> None:
    study = study_of_tiny(tiny, "merged", "./**nowhere** <b>b</b>")
    rows = [{**row.to_json(), "method": hostile(row.method)} for row in study.rows]
    document = {**study.to_json(), "suite": hostile("suite"), "rows": rows}
    file = Path(library._folder()) / "x.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(document))
    app = opened(tiny_suite_file, "methods")
    assert charts(app) == 1
    assert_shown_as_text(app)


def test_the_paper_is_as_printed_and_apart() -> None:
    tables = {one.table: one for one in paper_tables()}
    assert [*tables] == [*range(1, 15)]
    first = {row.method: row for row in tables[1].rows}
    assert first["Task Arithmetic w/ FEATCAL"].average == 85.5
    assert first["Task Arithmetic"].values == (57.0, 55.7, 64.7, 73.3, 77.9, 68.5, 96.1, 47.1)
    for table in tables.values():
        assert all(len(row.values) == len(table.columns) for row in table.rows)
        assert all(len(row.probable) in (0, len(table.columns)) for row in table.rows)
        for suite in map(load_suite, table.suites.values()):
            assert table.tasks in ((), tuple(suite.tasks))


def test_every_average_that_is_not_that_of_its_cells_is_marked() -> None:
    """Printed cells have one decimal; what is further off is a misprint and says so."""
    for table in paper_tables():
        for row in table.rows:
            if row.mean is not None and abs(row.mean - (row.average or 0)) > 0.3:
                assert row.notes, (table.table, row.method)
    frame = study_tables.paper_table(next(one for one in paper_tables() if one.table == 10)).set_index("method")
    odd = frame.loc["Simple Averaging w/ FEATCAL"]
    assert (odd["average, printed"], odd["mean of the cells"]) == (87.3, 73.15)
    assert "impossible" in odd["misprint or oddity"]

"""The Runs page without a browser: what was tried is there, in every session, and can be gone back to."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import streamlit as st
from app_pages import button, charts, control, drain, go, healthy, opened, shown_model
from click.testing import CliRunner
from streamlit.testing.v1 import AppTest

from app import jobs, leaderboard, runs, state, sweep
from app.selection import HOME, PageSelection
from featcal.cli import featcal_command
from featcal.family.opening import Family
from featcal.server.kinds import KINDS, Work
from featcal.server.queue import QUEUED, Queue
from featcal.session import session
from featcal.session.session import Session
from featcal.studies.history import History, HistoryEntry, Looks, RunMeasurement
from featcal.studies.recording import hash_of
from featcal.studies.sweep import Grid, baselines, run_sweep, sweep_json
from featcal.suite.calibration_options import CalibrationConfig
from featcal.suite.name_grammar import model_name
from featcal.suite.views import EvaluationSamples
from featcal.system.resources import bundle_root

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("instant_maps", "own_history"),
    pytest.mark.filterwarnings("ignore"),
]
FEW = {"n": "8", "samples": "8"}
ONE = {"sweep_lam": "0.05", "sweep_alpha": "0.3"}
ONE_LAM = {**ONE, "sweep_rho": "1.5, 2"}


@pytest.fixture
def jobs_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs that are done as soon as somebody looks at them."""
    monkeypatch.setattr(jobs, "ensure_manager", drain)


@pytest.fixture
def own_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache folder of the test's own."""
    monkeypatch.setenv("FEATCAL_CACHE", str(tmp_path / "cache"))


def recorded() -> dict[float, HistoryEntry]:
    """Calibrated runs in the history, by rho."""
    return {run.options["rho"]: run for run in History().runs() if run.options}


def spec(app: AppTest) -> dict[str, Any]:
    """The chart of mean against worst task."""
    (chart,) = app.get("plotly_chart")
    figure: dict[str, Any] = json.loads(chart.proto.spec)
    return figure


def listed(app: AppTest) -> Any:
    return next(one.value for one in app.dataframe if "measured on" in one.value)


def test_every_position_is_kept_and_found_again_after_a_restart(tiny_suite_file: Path) -> None:
    app = opened(tiny_suite_file, "calibrate", rho="1.5", **FEW)
    control(app, "rho").set_value(2.5).run()
    go(app, "cosines")
    go(app, "calibrate")
    control(app, "rho").set_value(0.5).run()
    assert set(recorded()) == {1.5, 2.5, 0.5}
    st.cache_resource.clear()
    app = opened(tiny_suite_file, "runs", n="8")
    assert healthy(app)
    assert charts(app) == 1
    assert sorted(re.findall(r"rho=([\d.]+)", " ".join(listed(app)["model"]))) == ["0.5", "1.5", "2.5"]
    assert [run.find_measured("features", "validation", 8, 42) is not None for run in recorded().values()] == [True] * 3


def test_numbers_are_those_of_a_single_calibration(tiny_suite_file: Path, tiny: Family) -> None:
    opened(tiny_suite_file, "calibrate", rho="1.5", **FEW)
    alone = Session(tiny).measure.quick_scores(CalibrationConfig(samples=8, rho=1.5), EvaluationSamples(8))
    found = recorded()[1.5].find_measured("features", "validation", 8, 42)
    assert isinstance(found, RunMeasurement)
    assert {task: one.value for task, one in found.scores.items()} == {t: one.value for t, one in alone.tasks.items()}


def test_a_sweep_is_a_job_and_is_that_of_the_library(tiny_suite_file: Path, tiny: Family, tmp_path: Path) -> None:
    app = opened(tiny_suite_file, "methods", **ONE_LAM, **FEW)
    assert any("2 calibrations (1 new" in one.value for one in app.caption)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(jobs, "ensure_manager", lambda _: None)  # nobody works on it yet
        button(app, "Run the sweep").click().run()
        assert healthy(app)
        (job,) = Queue().jobs()
        assert button(app, "Cancel")
        go(app, "drift")
        assert [one.state for one in Queue().jobs()] == [QUEUED]
        # Another visit, with other values in its fields.
        assert button(opened(tiny_suite_file, "methods", **FEW), "Cancel")
        app.session_state["jobs"] = True  # its card stands in the list of jobs too
        app.switch_page(str(bundle_root() / "pages" / "calibrate.py")).run()
        assert healthy(app)
        assert len([one for one in app.button if one.label == "Cancel"]) == 2
        assert button(app, "Run the sweep").disabled
    drain(Queue())
    app.run()
    assert healthy(app)
    assert any("2 calibrations (0 new)" in one.value for one in app.caption)
    assert button(app, "Run the sweep").disabled
    grid = Grid((0.05,), (1.5, 2.0), (0.3,), CalibrationConfig(samples=8))
    points = run_sweep(Session(tiny), grid, on=EvaluationSamples(8), history=History(tmp_path / "other"))
    drawn = {run for trace in spec(app)["data"] for run in trace.get("customdata", ())}
    assert drawn == {point.run.id for point in points}
    assert len(points) == len(baselines(grid, True)) + 2
    kept = {run.id: run.find_measured("features", "validation", 8, 42) for run in History().runs()}
    assert {i: one.scores for i, one in kept.items() if one} == {p.run.id: p.found.scores for p in points}
    document, library = Queue().result(job.order), sweep_json(Session(tiny), points, EvaluationSamples(8))
    assert document is not None
    assert document["front"] == library["front"]
    measured = [[point["measured"][0]["drift"] for point in one["points"]] for one in (document, library)]
    assert measured[0] == measured[1]


def test_a_sweep_that_was_ended_shows_its_points_and_goes_on(tiny_suite_file: Path) -> None:
    app = opened(tiny_suite_file, "methods", **ONE_LAM, **FEW)
    made: list[int] = []

    def die_halfway(queue: Queue) -> None:
        """Tell of a manager that is stopped after twelve points."""
        job = queue.claim()
        if job is None:
            return

        def report(label: str, done: int, total: int) -> None:
            made.append(done)
            if done == 12:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            KINDS["sweep"](Work(job.order.suite, job.order.args, job.folder, report))
        queue.end_all("the computer or the manager of jobs was stopped while it ran; start it again")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(jobs, "ensure_manager", die_halfway)
        button(app, "Run the sweep").click().run()
        app.run()
    assert any("This died" in one.value for one in app.warning)
    drawn = {run for trace in spec(app)["data"] for run in trace.get("customdata", ())}
    assert len(drawn) == 13  # and the model of the sliders
    assert any("2 calibrations (1 new" in one.value for one in app.caption)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(jobs, "ensure_manager", drain)
        button(app, "Run the sweep").click().run()
        app.run()
    assert healthy(app)
    assert not app.warning
    assert any("2 calibrations (0 new)" in one.value for one in app.caption)


@pytest.mark.usefixtures("jobs_at_once")
def test_a_click_on_a_point_is_compared_on_every_page(tiny_suite_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    app = opened(tiny_suite_file, "methods", **ONE_LAM, **FEW)
    button(app, "Run the sweep").click().run()
    app.run()
    run = recorded()[1.5]
    go(app, "runs")
    control(app, "run").set_value(run.id).run()
    button(app, "Show it on every page").click().run()
    assert healthy(app)
    assert shown_model(app) == "λ 0.05 · ρ 1.5 · α 0.3 · n 8"
    assert shown_model(go(app, "drift")) == "λ 0.05 · ρ 1.5 · α 0.3 · n 8"
    go(app, "runs")
    (anchor,) = (run for run in History().runs() if run.model == "anchor:rho=1.5")
    control(app, "run").set_value(anchor.id).run()
    button(app, "Show it on every page").click().run()
    assert control(go(app, "drift"), "beside").value == "anchor:rho=1.5"
    assert healthy(app)


def test_clicks_choose_by_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """What plotly and the table hand over, which no test without a browser can click."""
    chosen: list[str] = []
    selections: list[dict[str, Any]] = []
    monkeypatch.setattr(runs, "choose_run", chosen.append)
    monkeypatch.setattr(state, "look_at", lambda **changed: selections.append(changed))
    for points in ([{"customdata": "a" * 16}], [{"x": 1.0}], [], [{"customdata": "expert"}], [{"customdata": "tsv-m"}]):
        selected = SimpleNamespace(selection=SimpleNamespace(points=points))
        monkeypatch.setattr(st, "session_state", {"sweep-chart": selected})
        sweep._choose("sweep-chart")
    assert chosen == ["a" * 16]
    assert selections == [{"beside": "tsv-m"}]  # a method of the table
    selections.clear()
    for rows in ([1], []):
        table = SimpleNamespace(selection=SimpleNamespace(rows=rows))
        monkeypatch.setattr(st, "session_state", {"runs-list": table, "runs-listed": ["a", "b"]})
        runs._choose_row()
    subject, beside = leaderboard.SUBJECT, leaderboard.BESIDE
    for rows, which in (([1], beside), ([1], subject), ([2], beside), ([0], beside), ([], beside)):
        table = SimpleNamespace(selection=SimpleNamespace(rows=rows))
        known = {
            leaderboard._ROWS: table,
            leaderboard._LISTED: ["expert", "tsv-m", "calibrated@ties"],
            leaderboard._AS: which,
        }
        monkeypatch.setattr(st, "session_state", known)
        leaderboard._choose_row()
    assert selections == [
        {"run": "b"},
        {"beside": "tsv-m"},
        {"merge": "tsv-m"},
        {"merge": "ties", "beside": "calibrated@ties"},
    ]


@pytest.mark.slow
def test_pinned_runs_whose_titles_are_cut_alike_are_told_apart(tiny_suite_file: Path) -> None:
    """A list chooses by what it shows: of two equal labels the last one would always be meant."""
    for samples in ("4", "8"):
        opened(tiny_suite_file, "calibrate", rho="1.5", n="8", samples=samples)
    runs = [run for run in History().runs() if run.model.startswith("calibrated:")]
    assert len(runs) == 2
    for run in runs:
        History().mark(run.id, "pinned", True)
    for run in runs:
        app = opened(tiny_suite_file, "drift", n="8", beside="nothing")
        (label,) = [one for one in control(app, "beside").options if run.id[:6] in one]
        assert label.endswith("pinned run")
        control(app, "beside").set_value(run.model).run()
        assert app.session_state["selection"].beside == run.model


def test_a_run_is_named_pinned_and_deleted(tiny_suite_file: Path) -> None:
    opened(tiny_suite_file, "calibrate", rho="1.5", **FEW)
    run = recorded()[1.5]
    app = opened(tiny_suite_file, "runs", n="8")
    app.text_input(key=f"name-{run.id}").set_value("**the best** <b>").run()
    assert History().get(run.id).name == "**the best** <b>"
    assert listed(app)["name"].tolist() == ["**the best** <b>"]
    button(app, "Pin").click().run()
    assert History().get(run.id).pinned
    assert button(app, "Delete").disabled
    assert "unpin it first" in button(app, "Delete").help
    app.session_state["selection"] = app.session_state["selection"].change(beside="nothing")  # no run of its own
    go(app, "drift")
    offered = control(app, "beside").options
    # With its score, where another test has made a table of this suite.
    merges = [place for place, name in enumerate(offered) if name.startswith("ties · merge")]
    assert offered.index("**the best** <b> · pinned run") < merges[0]
    control(app, "beside").set_value(run.model).run()
    assert app.session_state["selection"].beside == run.model
    assert healthy(go(app, "runs"))
    button(app, "Unpin").click().run()
    button(app, "Delete").click().run()
    assert healthy(app)
    assert recorded() == {}
    assert any("No run yet" in one.value for one in app.info)
    button(app, "Bring it back").click().run()
    assert healthy(app)
    assert recorded()[1.5] == replace(run, name="**the best** <b>")
    assert not [one for one in app.button if one.label == "Bring it back"]


def test_two_runs_are_held_against_each_other(tiny_suite_file: Path, tiny: Family) -> None:
    app = opened(tiny_suite_file, "calibrate", rho="1.5", **FEW)
    control(app, "rho").set_value(0.5).run()
    a, b = recorded()[1.5], recorded()[0.5]
    app = opened(tiny_suite_file, "runs", n="8", run=a.id, against=b.id)
    told = next(one.value for one in app.dataframe if "option" in one.value)
    assert told.to_dict("records") == [{"option": "rho", "A": "1.5", "B": "0.5"}]
    compared = next(one.value for one in app.dataframe if "B − A, points" in one.value).set_index("task")
    first, second = (run.find_measured("features", "validation", 8, 42) for run in (a, b))
    assert first is not None
    assert second is not None
    assert compared.loc["mean", "A, %"] == 100 * first.mean
    assert compared.loc["mean", "B − A, drift"] == second.mean_drift - first.mean_drift
    button(app, "Which samples flip?").click().run()
    flips = next(one.value for one in app.dataframe if "fixed" in one.value).set_index("task")
    for task, one in first.scores.items():
        net = flips.loc[task, "fixed"] - flips.loc[task, "broken"]
        assert net == round(8 * (second.scores[task].value - one.value))
    button(app, "Compare both on every page").click().run()
    assert healthy(app)
    assert control(app, "merge").value == a.model
    assert (control(go(app, "drift"), "merge").value, control(app, "beside").value) == (a.model, "calibrated")
    assert healthy(app)


def test_looks_at_the_test_split_are_counted_once_per_session(tiny_suite_file: Path, tiny: Family) -> None:
    def said(app: AppTest) -> list[str]:
        return [one.value.split(".")[0] for one in app.caption if one.value.startswith("Test split evaluated")]

    st.cache_resource.clear()  # another test may have scored these models already
    session._open.clear()
    app = opened(tiny_suite_file, "accuracy", beside="calibrated", **FEW)
    assert said(app) == ["Test split evaluated 3 times, on 3 models"]
    button(app, "test split").click().run()
    assert said(app) == ["Test split evaluated 4 times, on 4 models"]
    go(app, "drift")
    go(app, "accuracy")
    assert History().looks(hash_of(Session(tiny))) == Looks(4, 4)
    st.cache_resource.clear()
    session._open.clear()  # another process
    opened(tiny_suite_file, "accuracy", **FEW)
    assert History().looks(hash_of(Session(tiny))) == Looks(7, 4)


def test_a_history_that_cannot_be_written_is_a_warning(
    tiny_suite_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FEATCAL_CACHE", str(tmp_path / "file"))
    app = opened(tiny_suite_file, "calibrate", **ONE_LAM, **FEW)
    assert healthy(app)
    assert any("is not kept" in one.value for one in app.warning)
    go(app, "methods")
    assert healthy(app)
    button(app, "Run the sweep").click().run()
    assert not app.exception
    assert any("jobs cannot be stored" in one.value for one in app.error)


def test_a_broken_record_is_named_and_the_others_shown(tiny_suite_file: Path, tiny: Family) -> None:
    app = opened(tiny_suite_file, "calibrate", rho="1.5", **FEW)
    control(app, "rho").set_value(0.5).run()
    broken = History().folder / hash_of(Session(tiny)) / f"{recorded()[1.5].id}.json"
    broken.write_text("{")
    go(app, "runs")
    assert healthy(app)
    assert len(listed(app)) == 1
    assert any(broken.name in one.value.replace("\\", "") for one in app.warning)
    assert broken.read_text() == "{"


def test_runs_are_filtered_grouped_and_drawn_by_any_option(
    tiny_suite_file: Path, tiny: Family, offered: dict[str, Any]
) -> None:
    """And what is downloaded is what the list shows."""
    grid = Grid((0.05, 0.5), (1.5, 2.0), (0.3,), CalibrationConfig(samples=8))
    points = {point.run.id: point for point in run_sweep(Session(tiny), grid, on=EvaluationSamples(8))}

    def drawn(app: AppTest) -> set[str]:
        return {run for trace in spec(app)["data"] for run in trace.get("customdata", ())}

    app = opened(tiny_suite_file, "methods", **FEW)
    assert drawn(app) >= {*points}
    assert [one["name"] for one in spec(app)["data"] if one["name"].startswith("here: ")] == [
        *("here: merged", "here: calibrated"),
    ]
    control(app, "across").set_value("λ").run()
    control(app, "runs_colour").set_value("ρ").run()
    assert healthy(app)
    named = {one["name"]: one["customdata"] for one in spec(app)["data"] if "customdata" in one}
    assert [points[run].run.options["lam"] for run in named["ρ 1.5"]] == [0.05, 0.5]
    control(app, "across").set_value("cost").run()
    assert healthy(app)
    assert drawn(app) >= {run for run, one in points.items() if one.run.options}
    assert drawn(app).isdisjoint(run for run, one in points.items() if not one.run.options)
    go(app, "runs")
    table = listed(app).set_index("run")
    assert {run: table.loc[run, ["λ", "ρ"]].tolist() for run, one in points.items() if one.kind == "calibrated"} == {
        run: [one.run.options["lam"], one.run.options["rho"]] for run, one in points.items() if one.kind == "calibrated"
    }
    assert spec(app)["data"][0]["type"] == "parcoords"
    chosen = next(one for one in app.multiselect if one.label == "Show only")
    chosen.set_value(["method: calibrated", "ρ: 1.5"]).run()
    assert healthy(app)
    kept = {run for run, one in points.items() if one.run.options.get("rho") == 1.5}
    assert set(listed(app)["run"]) == kept
    assert {run["id"] for run in json.loads(offered["featcal-runs.json"]())["runs"]} == kept
    assert len(pd.read_csv(BytesIO(offered["featcal-runs.csv"]()))) == len(kept)
    lines = {one["label"]: len(one["values"]) for one in spec(app)["data"][0]["dimensions"]}
    assert lines["λ"] == 2
    control(app, "runs_group").set_value("λ").run()
    groups = next(one.value for one in app.dataframe if "lowest" in one.value)
    assert sorted(groups["λ"]) == [0.05, 0.5]
    assert healthy(go(app, "drift"))


def test_what_is_typed_and_is_no_list_is_said(tiny_suite_file: Path) -> None:
    app = opened(tiny_suite_file, "methods", sweep_lam="much", **FEW)
    assert [one.value for one in app.error] == ["λ: give numbers between commas, such as 0.01, 0.05"]
    app.text_input(key="calibrate-sweep_lam").set_value("0.1").run()
    assert healthy(app)
    assert app.session_state["selection"].sweep_lam == "0.1"


def test_another_suite_forgets_what_meant_something_here() -> None:
    chosen = PageSelection(sweep_lam="1", sweep_rho="1", sweep_alpha="1", run="a" * 16, against="b" * 16)
    assert chosen.change(suite="t5-mini") == HOME.change(suite="t5-mini")


@pytest.mark.usefixtures("jobs_at_once")
@pytest.mark.parametrize("a", ["merged", "ties"])
def test_command_and_python_give_the_points_of_the_page(
    a: str, tiny_suite_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = opened(
        tiny_suite_file, "methods", merge=a, layernorms="false", seed="7", rho="1.5", sweep_rho="-1, 1.5", **ONE, **FEW
    )
    button(app, "Run the sweep").click().run()
    expected = {run.id: run.measured[0].scores for run in History().runs()}
    assert {model_name(run.model).of for run in History().runs() if run.options} == {a}
    bash, lines = (one.value for one in app.code[:2])
    monkeypatch.setenv("FEATCAL_CACHE", str(tmp_path / "by command"))
    done = CliRunner().invoke(featcal_command, [*shlex.split(bash)[1:], "--json"])
    assert done.exit_code == 0, done.output
    assert {one["id"] for one in json.loads(done.stdout)["points"]} == set(expected)
    assert {run.id: run.measured[0].scores for run in History().runs()} == expected
    monkeypatch.setenv("FEATCAL_CACHE", str(tmp_path / "by python"))
    exec(lines, {})
    assert {run.id: run.measured[0].scores for run in History().runs()} == expected


@pytest.mark.usefixtures("jobs_at_once")
@pytest.mark.parametrize("a", ["merged", "ties"])
def test_a_sweep_has_the_switches_and_parts_of_the_page(a: str, tiny_suite_file: Path) -> None:
    app = opened(tiny_suite_file, "methods", merge=a, biases="false", blocks="block 1", **ONE_LAM, **FEW)
    button(app, "Run the sweep").click().run()
    app.run()
    assert healthy(app)
    of = " of ties" * (a == "ties")
    assert any(f"2 calibrations{of} (0 new)" in one.value for one in app.caption)
    assert {(run.options["biases"], *run.options["blocks"]) for run in recorded().values()} == {(False, "block 1")}
    go(app, "runs")
    control(app, "run").set_value(recorded()[1.5].id).run()
    button(app, "Show it on every page").click().run()
    assert healthy(app)
    chosen = app.session_state["selection"]
    assert (chosen.merge, chosen.beside, chosen.rho, chosen.biases) == (a, "calibrated", 1.5, False)

"""A sweep is many single calibrations: the same numbers, none of them computed twice."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from clip_config import clip_config
from hypothesis import given
from hypothesis import strategies as st
from lanes import cases_by_message
from safetensors.torch import load_file, save_file
from tiny_clip import TASKS

import featcal
from featcal import calibrate, load_suite, measure_drift, open_family
from featcal.family.opening import Family
from featcal.figures import run_tables, sweep_charts
from featcal.session import fits
from featcal.session.model_names import weights_of
from featcal.session.session import Session
from featcal.studies.history import History, Looks, RunMeasurement, TaskValue, new_run
from featcal.studies.recording import hash_of
from featcal.studies.sweep import (
    KINDS,
    Grid,
    SweepPoint,
    baselines,
    comparable_points,
    front,
    missing,
    numbers,
    run_sweep,
    sweep_json,
)
from featcal.suite.calibration_options import CalibrationConfig
from featcal.suite.views import EvaluationSamples
from featcal.system.errors import InputError

pytestmark = pytest.mark.slow

OPTIONS = clip_config(samples=8, layernorms=False)
GRID = Grid((0.05, 0.5), (1.0, 2.0), (0.3,), OPTIONS)
FEW = EvaluationSamples(8)


class Stopped(Exception):
    """Whoever waited for the sweep has gone."""


@pytest.fixture(scope="module")
def own(tiny: Family) -> Session:
    """Computes the points of a sweep once for all tests that do not ask what is computed."""
    return Session(tiny)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[CalibrationConfig]:
    """Every calibration that a session computes."""
    calibrations: list[CalibrationConfig] = []
    real = fits.calibrate_family

    def counted(family: Family, config: CalibrationConfig, **more: Any) -> Any:
        calibrations.append(config)
        return real(family, config, **more)

    monkeypatch.setattr(fits, "calibrate_family", counted)
    return calibrations


def test_points_are_single_calibrations_to_the_last_bit(tiny: Family, own: Session, tmp_path: Path) -> None:
    points = run_sweep(own, GRID, on=FEW, history=History(tmp_path))
    other = Session(tiny)
    calibrated = [point for point in points if point.kind == "calibrated"]
    assert [clip_config(**point.run.options) for point in calibrated] == GRID.configs()
    for point, config in zip(calibrated, GRID.configs(), strict=True):
        alone = calibrate(tiny, config)
        drift = measure_drift(other, alone, samples=8)
        assert dict(point.found.drift) == {t: one.layers[-1].relative_drift for t, one in drift.tasks.items()}
        scores = other.measure.quick_scores(alone, FEW)
        assert {t: one.value for t, one in point.found.scores.items()} == {
            task: one.value for task, one in scores.tasks.items()
        }
        assert point.found.mean == scores.average


def test_a_suite_is_opened_where_no_session_is_given(
    tiny: Family, tiny_suite_file: Path, own: Session, tmp_path: Path
) -> None:
    grid = replace(GRID, rho=GRID.rho[:1])
    suite = load_suite(tiny_suite_file)
    found, expected = (
        run_sweep(of, grid, on=FEW, history=History(tmp_path / name), device="cpu")
        for of, name in ((suite, "suite"), (own, "session"))
    )
    assert [one.found.drift for one in found] == [one.found.drift for one in expected]
    config = grid.configs()[0]
    ours, theirs = (featcal.calibrate(of, config, device="cpu").weights for of in (own, suite))
    for name in tiny.adapter.tower:
        assert torch.equal(ours.read([name])[name], theirs.read([name])[name])


def test_baselines_are_the_models_they_are_called(tiny: Family, own: Session, tmp_path: Path) -> None:
    points = {one.run.model: one for one in run_sweep(own, GRID, on=FEW, history=History(tmp_path))}
    other = Session(tiny)
    others = [name for name in baselines(GRID, True) if name != "expert"]
    assert len(points) == len(baselines(GRID, True)) + 4
    assert {points[name].kind for name in ("anchor:rho=2", "simple-averaging", "base")} == {"anchor", "merger", "base"}
    assert "anchor:rho=1" not in points  # the merged model
    for name in others:
        drift = measure_drift(other, weights_of(name, tiny), samples=8)
        assert dict(points[name].found.drift) == {t: one.layers[-1].relative_drift for t, one in drift.tasks.items()}
    assert points["task-arithmetic:scale=0.5"].found.scores == points["merged"].found.scores  # the suite's own recipe
    expert = other.measure.quick_scores("expert", FEW)
    assert points["expert"].found.mean == expert.average
    assert dict(points["expert"].found.drift) == {}


def test_another_merge_is_swept_by_its_name(tiny: Family, own: Session, tmp_path: Path) -> None:
    grid, history = replace(GRID, of="ties"), History(tmp_path)
    points = {one.run.model: one for one in run_sweep(own, grid, on=FEW, history=history)}
    assert {"ties", "anchor:rho=2@ties", "merged"} < {*points}
    found = [one for one in points.values() if one.kind == "calibrated"]
    alone = Session(tiny)
    for config, point in zip(grid.configs(), found, strict=True):
        model = alone.resolve(config, "ties")
        assert point.run.model == model.name
        tasks = alone.measure.features(model, FEW).tasks
        assert dict(point.found.drift) == {task: one.layers[-1].relative_drift for task, one in tasks.items()}
    assert missing(own, grid, FEW, history.runs()) == ([], [])
    new, others = missing(own, GRID, FEW, history.runs())
    assert ([one.config for one in new], [one.name for one in others]) == (GRID.configs(), ["anchor:rho=2"])


def test_a_folder_with_other_weights_is_swept_anew(tiny: Family, own: Session, tmp_path: Path) -> None:
    """Its name is the same; what was measured of the weights before is not said of these."""
    folder, history = tmp_path / "mine", History(tmp_path / "history")
    featcal.merge(tiny, "ties").save(folder)
    grid = replace(GRID, lam=(0.05,), rho=(2.0,), of=str(folder))

    def sweep(kept: History) -> dict[str, dict[str, float]]:
        return {one.run.model: dict(one.found.drift) for one in run_sweep(Session(tiny), grid, on=FEW, history=kept)}

    before = sweep(history)
    assert len(missing(own, grid, FEW, history.runs())[0]) == 0
    file = folder / "model.safetensors"
    moved = {name: one * 1.3 if one.ndim > 1 else one for name, one in load_file(file).items()}
    save_file(moved, file, {"format": "pt"})
    assert len(missing(own, grid, FEW, history.runs())[0]) == 1
    after = sweep(history)
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {name for name in before if str(folder) in name}
    assert after == sweep(History(tmp_path / "empty"))


def test_nothing_is_computed_twice(tiny: Family, tmp_path: Path, made: list[CalibrationConfig]) -> None:
    history = History(tmp_path)
    first = run_sweep(Session(tiny), GRID, on=FEW, history=history)
    assert made == GRID.configs()
    again = run_sweep(Session(tiny), GRID, on=FEW, history=History(tmp_path))
    assert len(made) == 4
    assert [point.found for point in again] == [point.found for point in first]
    larger = replace(GRID, alpha=(0.3, 0.6))
    assert len(missing(Session(tiny), larger, FEW, history.runs())[0]) == 4
    run_sweep(Session(tiny), larger, on=FEW, history=history)
    assert [config.alpha for config in made[4:]] == [0.6] * 4
    assert len(missing(Session(tiny), larger, FEW, history.runs())[0]) == 0
    assert len(missing(Session(tiny), larger, EvaluationSamples(4), history.runs())[0]) == 8
    run_sweep(Session(tiny), replace(GRID, options=replace(OPTIONS, seed=7)), on=FEW, history=history)
    assert len(made) == 12


def test_a_sweep_that_was_ended_goes_on(
    tiny: Family, own: Session, tmp_path: Path, made: list[CalibrationConfig]
) -> None:
    at_once = run_sweep(own, GRID, on=FEW, history=History(tmp_path / "new"))
    made.clear()
    steps: list[tuple[int, int]] = []

    def until_the_second(label: str, done: int, total: int) -> None:
        assert label == "sweep"
        steps.append((done, total))
        if len(made) == 2:
            raise Stopped

    history = History(tmp_path)
    with pytest.raises(Stopped):
        run_sweep(Session(tiny), GRID, until_the_second, on=FEW, history=history)
    before = len(baselines(GRID, True))
    assert steps[-1] == (before + 1, before + 4)  # within a calibration, not after it
    assert len([run for run in history.runs() if run.options]) == 1
    points = run_sweep(Session(tiny), GRID, on=FEW, history=history)
    assert made == [GRID.configs()[0], *GRID.configs()[1:2], *GRID.configs()[1:]]
    assert [(p.run.id, p.found.scores, p.found.drift) for p in points] == [
        (p.run.id, p.found.scores, p.found.drift) for p in at_once
    ]


def test_experts_run_once_for_a_whole_sweep(tiny: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[tuple[str, str]] = []
    real = Family.samples

    def counted(family: Family, task: str, split: str, *more: Any, **options: Any) -> Any:
        drawn.append((task, split))
        return real(family, task, split, *more, **options)

    monkeypatch.setattr(Family, "samples", counted)
    run_sweep(Session(tiny), GRID, on=FEW, history=History(tmp_path))
    assert sorted(drawn) == sorted((task, split) for task in TASKS for split in ("calibration", "validation"))


def test_a_history_that_cannot_be_written_costs_no_point(own: Session, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    history = History(tmp_path / "file")
    points = run_sweep(own, GRID, on=FEW, history=history)
    kept = run_sweep(own, GRID, on=FEW, history=History(tmp_path / "kept"))
    assert [point.found.scores for point in points] == [point.found.scores for point in kept]
    assert len(history.problems) == 1


def test_every_run_on_the_same_samples_is_a_point(own: Session, tmp_path: Path) -> None:
    history = History(tmp_path)
    swept = run_sweep(own, GRID, on=FEW, history=history)
    run_sweep(own, replace(GRID, lam=(0.05,), rho=(2.0,)), on=EvaluationSamples(4), history=history)
    history.add(new_run(("tiny", hash_of(own)), "calibrated:unmeasured", {"lam": 1.0}, {}))
    assert {point.run.id for point in comparable_points(own, FEW, history.runs())} == {point.run.id for point in swept}
    assert len(comparable_points(own, EvaluationSamples(4), history.runs())) == len(baselines(GRID, True)) + 1
    assert comparable_points(own, EvaluationSamples(5), history.runs()) == []


def a_point(model: str, mean: float, worst: float) -> SweepPoint:
    scores = {"a": TaskValue("accuracy", worst, 10), "b": TaskValue("accuracy", 2 * mean - worst, 10)}
    return SweepPoint(new_run(("s", "0" * 16), model, {}, {}), RunMeasurement("features", "test", 8, 42, scores, {}))


def test_the_front_is_what_nothing_beats() -> None:
    places = {"base": (0.5, 0.5), "merged": (0.75, 0.25), "calibrated:lam=1": (0.75, 0.5), "expert": (1.0, 1.0)}
    points = [a_point(model, *place) for model, place in places.items()]
    assert [point.run.model for point in front(points)] == ["calibrated:lam=1"]
    twin = a_point("calibrated:lam=2", 0.75, 0.5)
    edge = a_point("anchor:rho=2", 0.625, 0.625)
    assert [one.run.model for one in front([*points, twin, edge])] == [
        "anchor:rho=2",
        "calibrated:lam=1",
        "calibrated:lam=2",
    ]
    assert front([]) == []


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=12))
def test_no_point_beats_one_of_the_front_and_every_other_is_beaten(places: list[tuple[int, int]]) -> None:
    points = [a_point(f"calibrated:lam={i}", (x + 4) / 8, y / 8) for i, (x, y) in enumerate(places)]
    best = front(points)

    def beaten(one: SweepPoint) -> bool:
        mine = (one.found.mean, one.found.worst)
        return any(
            o.found.mean >= mine[0] and o.found.worst >= mine[1] and (o.found.mean, o.found.worst) != mine
            for o in points
        )

    assert {id(one) for one in points if not beaten(one)} == {id(one) for one in best}


WRONG = {
    "lam, rho: a sweep needs at least one value of each": {"lam": (), "rho": ()},
    "30 lam × 20 rho × 1 alpha are more than 500 calibrations": {
        "lam": tuple(float(i) for i in range(30)),
        "rho": tuple(float(i) for i in range(20)),
    },
    "lam is -1; it is at least 0 and finite": {"lam": (0.1, -1.0)},
    "alpha is 1.5": {"alpha": (1.5,)},
}


@pytest.mark.parametrize(("values", "message"), cases_by_message(WRONG))
def test_a_grid_that_cannot_be_is_refused_at_once(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as error:
        replace(GRID, **values)
    assert message in str(error.value)


def test_what_a_recipe_does_not_allow_is_refused_before_anything_is_computed(
    tiny: Family, tmp_path: Path, made: list[CalibrationConfig]
) -> None:
    """beta is the recipe's own, and above 0 it needs alpha above 0."""
    grid = replace(GRID, alpha=(0.3, 0.0), options=CalibrationConfig(recipe="refined", samples=8))
    with pytest.raises(InputError, match="alpha is 0: beta above 0 needs"):
        run_sweep(Session(tiny), grid, on=FEW, history=History(tmp_path / "h"))
    assert made == []
    assert not (tmp_path / "h").exists()


def test_values_that_stand_twice_count_once() -> None:
    assert len(Grid((0.1, 0.1), (1.0, 1.0), (0.3,), OPTIONS).configs()) == 1


def test_lists_of_numbers_as_they_are_typed() -> None:
    assert numbers(" 0.01,0.05 ; 1e-3,", "lam") == (0.01, 0.05, 0.001)
    assert numbers("", "lam") == ()
    for text in ("a", "1,,b", "1 2", "nan", "1,inf"):
        with pytest.raises(InputError, match="lam: "):
            numbers(text, "lam")


def test_what_cannot_be_scored_is_not_swept(edit_suite: Callable[..., Path], tmp_path: Path) -> None:
    def without_labels(content: dict[str, Any]) -> None:
        for task in content["tasks"].values():
            del task["validation"]["labels"]

    own = Session(open_family(load_suite(edit_suite(without_labels)), "cpu"))
    with pytest.raises(InputError, match="labels"):
        run_sweep(own, GRID, on=FEW, history=History(tmp_path / "h"))
    assert not (tmp_path / "h").exists()


def test_the_chart_carries_every_run_and_rings_the_front(own: Session, tmp_path: Path) -> None:
    points = run_sweep(own, GRID, on=FEW, history=History(tmp_path))
    frame = run_tables.sweep_table(points, front(points))
    shown = points[-1].run.id
    figure = sweep_charts.runs_as_points(frame, "worst", "accuracy", {shown: "calibrated"})
    drawn = {run: (x, y) for t in figure.data if t.customdata for run, x, y in zip(t.customdata, t.x, t.y, strict=True)}
    assert drawn == {p.run.id: (100 * p.found.worst, 100 * p.found.mean) for p in points}
    rings = next(trace for trace in figure.data if trace.name == sweep_charts.FRONT)
    assert list(rings.y) == [100 * point.found.mean for point in front(points)]
    (here,) = (trace for trace in figure.data if trace.name.startswith("here: "))
    assert (here.x[0], here.y[0]) == drawn[shown]
    assert {"base", "merged", "calibrated", "anchor only"} <= {trace.name for trace in figure.data}
    assert set(frame["kind"]) <= set(KINDS)


def test_names_of_runs_are_text_in_the_chart() -> None:
    point = a_point("calibrated:lam=1", 0.5, 0.5)
    point = replace(point, run=replace(point.run, name="<b>x</b>"))
    figure = sweep_charts.runs_as_points(run_tables.sweep_table([point], [point]), "worst", "accuracy", {})
    (said,) = figure.data[-1].text
    assert "&lt;b&gt;x&lt;/b&gt;" in said
    assert "<b>" not in said


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def own_history(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Let commands keep runs where nobody else does."""
    monkeypatch.setenv("FEATCAL_CACHE", str(tmp_path / "cache"))


@pytest.mark.usefixtures("own_history")
def test_the_command_line_sweeps_and_keeps_runs(run: Run, tiny_suite_file: Path, tiny: Family) -> None:
    given = ("--lam", "0.05,0.5", "--rho", "1, 2", "--alpha", 0.3, "--samples", 8, "--eval-samples", 8)
    code, out, err = run("study", "sweep", tiny_suite_file, *given, "--json")
    assert code == 0, err
    document = json.loads(out)
    own = Session(tiny)
    grid = Grid((0.05, 0.5), (1.0, 2.0), (0.3,), clip_config(samples=8))
    points = run_sweep(own, grid, on=FEW, history=History())
    assert document == json.loads(json.dumps(sweep_json(own, points, FEW)))
    assert len(document["points"]) == len(baselines(grid, True)) + 4
    code, out, _ = run("study", "sweep", tiny_suite_file, *given)
    assert code == 0
    assert out.splitlines()[0].split() == ["run", "model", "mean", "worst", "worst", "task", "drift", "front"]
    assert len(out.splitlines()) == len(points) + 1

    code, out, _ = run("history", "list", "--json")
    listed = json.loads(out)["runs"]
    assert {one["id"] for one in listed} == {point.run.id for point in points}
    assert json.loads(run("history", "list", "--suite", "other", "--json")[1]) == {"runs": []}
    frame = pd.read_csv(StringIO(run("history", "list", "--csv", "--suite", "tiny")[1]))
    assert len(frame) == len(points)
    assert sorted(frame["lam"].dropna()) == [0.05, 0.05, 0.5, 0.5]

    chosen = listed[0]["id"]
    assert run("history", "rename", chosen, "the best")[0] == 0
    assert run("history", "pin", chosen)[0] == 0
    code, out, err = run("history", "delete", chosen)
    assert (code, "is pinned" in err) == (1, True)
    assert "the best" in run("history", "list")[1]
    assert run("history", "pin", chosen, "--off")[0] == 0
    assert run("history", "delete", chosen, listed[1]["id"])[0] == 0
    assert len(json.loads(run("history", "list", "--json")[1])["runs"]) == len(points) - 2
    assert run("history", "delete", "nothing")[0] == 1


@pytest.mark.usefixtures("own_history")
def test_evaluating_on_test_is_a_look(run: Run, tiny_suite_file: Path, tiny: Family) -> None:
    for model, count in (("merged", 1), ("merged", 1), ("calibrated:samples=8", 2)):
        code, _, err = run("evaluate", tiny_suite_file, "--model", model)
        assert code == 0
        assert f"at {count} model(s)" in err
    _, _, err = run("evaluate", tiny_suite_file, "--split", "validation")
    assert "looks" not in err
    assert History().looks(hash_of(Session(tiny))) == Looks(3, 2)


@pytest.mark.usefixtures("own_history")
def test_wrong_values_are_named(run: Run, tiny_suite_file: Path) -> None:
    for option, text, said in (("--lam", "a", "lam: give numbers"), ("--alpha", "0.3,2", "alpha is 2")):
        code, _, err = run("study", "sweep", tiny_suite_file, option, text)
        assert (code, said in err) == (1, True), err

"""Runs as points: a score against any option, all options side by side, filters and groups of the list."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
import pytest

from featcal.figures import run_tables, study_tables, sweep_charts
from featcal.studies.checkpoints import WrittenModel
from featcal.studies.history import RunMeasurement, TaskValue, new_run
from featcal.studies.study import read_study
from featcal.studies.sweep import SweepPoint, front
from featcal.system.resources import data_path


def a_point(model: str, mean: float, **options: Any) -> SweepPoint:
    scores = {"a": TaskValue("accuracy", mean - 0.1, 10), "b": TaskValue("accuracy", mean + 0.1, 10)}
    cpu = 3.0 if options.get("lam") == 0.005 and options["rho"] == 1.5 else None
    found = RunMeasurement("features", "validation", 8, 42, scores, {"a": 1 - mean}, None, cpu)
    return SweepPoint(new_run(("s", "0" * 16), model, options, {}), found)


def of_paper(lam: float, rho: float, mean: float, **more: Any) -> SweepPoint:
    options = {"recipe": "paper", "lam": lam, "rho": rho, "alpha": 0.3, "beta": 0.0, "mu": 0.0, "samples": 64}
    return a_point(f"calibrated:lam={lam},rho={rho}", mean, **{**options, "seed": 42, **more})


@pytest.fixture
def points() -> list[SweepPoint]:
    """A merge, the experts, a grid of six, and one calibration of another merge by another recipe."""
    grid = [of_paper(lam, rho, 0.5 + lam / 10 + rho / 100) for lam, rho in product((0.005, 0.05, 0.5), (1.5, 2.0))]
    other = of_paper(0.01, 2.0, 0.8, recipe="informed", beta=0.5, mu=0.25)
    other = SweepPoint(new_run(("s", "0" * 16), "calibrated:recipe=informed@ties", other.run.options, {}), other.found)
    return [a_point("merged", 0.4), a_point("expert", 0.9), *grid, other]


@pytest.fixture
def frame(points: list[SweepPoint]) -> pd.DataFrame:
    return run_tables.sweep_table(points, front(points))


def drawn(figure: Any) -> dict[str, tuple[float, float]]:
    """Every point of a chart by its run."""
    return {run: (x, y) for t in figure.data if t.customdata for run, x, y in zip(t.customdata, t.x, t.y, strict=True)}


def test_every_option_has_a_column_where_its_recipe_has_it(frame: pd.DataFrame) -> None:
    merged, expert, first, *_, last = frame.to_dict("records")
    assert (merged["method"], expert["method"], first["method"]) == ("merged", "expert", "calibrated")
    assert [first[name] for name in ("merge", "recipe", "λ", "ρ", "α", "n", "seed")] == [
        *("merged", "paper", 0.005, 1.5, 0.3, 64, 42),
    ]
    assert math.isnan(first["β"])  # 0 in the record, but the paper's recipe has none
    assert [last[name] for name in ("merge", "recipe", "β", "μ")] == ["ties", "informed", 0.5, 0.25]


def test_a_score_stands_against_an_option_and_lines_join_what_is_alike_but_for_it(
    frame: pd.DataFrame, points: list[SweepPoint]
) -> None:
    figure = sweep_charts.runs_as_points(frame, "λ", "accuracy", {}, "ρ")
    calibrated = [one for one in points if one.run.options]
    assert drawn(figure) == {one.run.id: (one.run.options["lam"], 100 * one.found.mean) for one in calibrated}
    lines = [(list(one.x), [round(y, 6) for y in one.y]) for one in figure.data if one.mode == "lines"]
    assert lines == [([0.005, 0.05, 0.5], [51.55, 52.0, 56.5]), ([0.005, 0.05, 0.5], [52.05, 52.5, 57.0])]
    assert [one.name for one in figure.data if one.customdata] == ["ρ 1.5", "ρ 2"]
    assert figure.layout.xaxis.type == "log"
    assert [round(one.y0, 6) for one in figure.layout.shapes] == [40.0, 90.0]
    linear = sweep_charts.runs_as_points(frame, "ρ", "accuracy", {}).layout.xaxis
    assert (linear.type, list(linear.tickvals)) == (None, [1.5, 2.0])
    assert sweep_charts.runs_as_points(frame, "recipe", "accuracy", {}).layout.xaxis.type == "category"


def test_no_line_joins_runs_that_differ_in_what_no_column_shows_or_models_of_other_kinds() -> None:
    several = [of_paper(0.005, 2.0, 0.5), of_paper(0.05, 2.0, 0.4, biases=False), of_paper(0.5, 2.0, 0.6)]
    points = [*several, *(a_point(f"task-arithmetic:scale={scale}", 0.3) for scale in (0.2, 1))]
    frame = run_tables.sweep_table(points, front(points))
    figure = sweep_charts.runs_as_points(frame, "λ", "accuracy", {})
    assert [list(one.x) for one in figure.data if one.mode == "lines"] == [[0.005, 0.5]]
    figure = sweep_charts.runs_as_points(frame, "method", "accuracy", {})
    assert [one for one in figure.data if one.mode == "lines"] == []


def test_runs_and_methods_are_points_of_one_plot(frame: pd.DataFrame, points: list[SweepPoint]) -> None:
    methods = study_tables.method_points(read_study(data_path("clip-mini", "compare.json")).summaries())
    assert [*methods["kind"][:4]] == ["expert", "base", "merged", "merger"]
    here = points[3].run.id
    figure = sweep_charts.runs_as_points(frame, "worst", "accuracy", {here: "calibrated"}, "", methods)
    named = {one.name: one for one in figure.data}
    every = drawn(figure)
    assert {one.run.id: every[one.run.id] for one in points} == {
        one.run.id: (100 * one.found.worst, 100 * one.found.mean) for one in points
    }
    assert (named["here: calibrated"].x[0], named["here: calibrated"].y[0]) == every[here]
    hollow = named[sweep_charts.METHODS]
    assert [*hollow.customdata] == [*methods["model"]]
    assert all(symbol.endswith("-open") for symbol in hollow.marker.symbol)
    assert hollow.error_y.array[0] == 0  # of a single row no interval is known
    best = methods.set_index("name").loc["calibrated:recipe=informed"]
    assert every[best["model"]] == (best["worst"], best["mean"])
    figure = sweep_charts.runs_as_points(frame, "cost", "accuracy", {}, "", methods)
    # Nothing makes the experts, and of other runs the cost is not known.
    assert drawn(figure).keys() == {*methods["model"][1:], points[2].run.id}
    assert drawn(figure)[points[2].run.id] == (3.0, 100 * points[2].found.mean)
    assert [round(one.y0, 6) for one in figure.layout.shapes] == [40.0, 90.0]  # merged and experts cost nothing here
    assert figure.layout.xaxis.type == "log"


def test_all_options_are_axes_of_calibrated_runs(frame: pd.DataFrame) -> None:
    (lines,) = sweep_charts.all_options(frame, "mean", "accuracy").data
    axes = {one.label: one for one in lines.dimensions}
    assert list(axes) == ["merge", "recipe", "λ", "ρ", "β", "μ", "drift", "worst", "mean"]
    assert np.allclose(axes["mean"]["values"], frame["mean"][2:])
    assert np.allclose(lines.line.color, frame["mean"][2:])
    assert list(axes["λ"].ticktext) == ["0.005", "0.01", "0.05", "0.5"]
    assert list(axes["λ"]["values"]) == [0, 0, 2, 2, 3, 3, 1]
    assert list(axes["β"].ticktext) == ["none", "0.5"]
    assert list(axes["β"]["values"]) == [-1, -1, -1, -1, -1, -1, 0]


def test_many_values_of_a_number_are_a_scale() -> None:
    points = [of_paper(0.01 * 1.5**step, 2.0, 0.5 + step / 100) for step in range(12)]
    frame = run_tables.sweep_table(points, front(points))
    (coloured,) = [
        one for one in sweep_charts.runs_as_points(frame, "worst", "accuracy", {}, "λ").data if one.customdata
    ]
    assert list(coloured.marker.color) == list(frame["λ"])
    lam = sweep_charts.all_options(frame, "mean", "accuracy").data[0].dimensions[0]
    assert np.allclose(lam["values"], np.log10(frame["λ"]))


def test_filters_are_alternatives_within_a_column_and_all_hold_across(frame: pd.DataFrame) -> None:
    offered = run_tables.filters(frame)
    assert {"λ: 0.005", "λ: 0.5", "ρ: 1.5", "recipe: paper", "merge: ties", "method: merged"} <= {*offered}
    assert not [one for one in offered if one.startswith(("α", "seed"))]  # which are all alike
    kept = run_tables.select_runs(frame, ["λ: 0.005", "λ: 0.5", "ρ: 2"])
    assert kept[["λ", "ρ"]].to_numpy().tolist() == [[0.005, 2.0], [0.5, 2.0]]
    assert len(run_tables.select_runs(frame, ["of another suite: 1"])) == len(frame)
    assert run_tables.select_runs(frame, ["λ: 7"]).empty


def test_groups_say_best_mean_and_lowest(frame: pd.DataFrame) -> None:
    groups = run_tables.group_runs(frame, "ρ").set_index("ρ")
    assert groups.loc[1.5, ["rows", "best", "lowest"]].tolist() == pytest.approx([3, 56.5, 51.55])
    assert groups.loc[1.5, "mean"] == pytest.approx((51.55 + 52.0 + 56.5) / 3)
    assert groups.loc[2.0, "rows"] == 4
    assert groups["best"].is_monotonic_decreasing


def test_a_checkpoint_is_a_row_of_the_same_columns(points: list[SweepPoint], tmp_path: Any) -> None:
    (tmp_path / "weights").write_bytes(bytes(2048))
    point, merged = points[2], points[0]
    written = WrittenModel("0" * 32, str(tmp_path), point.run, "2026-01-02T03:04:05", "", "", merged.found, point.found)
    (row,) = run_tables.checkpoint_table([written]).to_dict("records")
    assert (row["λ"], row["before, %"], row["mean, %"], row["size"]) == (0.005, 40.0, 100 * point.found.mean, "2.0 KiB")
    assert row["written"] == "2026-01-02 03:04:05"

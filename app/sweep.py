"""Calibrate many times at once, and show every run of the suite as mean against worst task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import streamlit as st

from app import downloads, jobs, on_table, options, runs, state, view
from app.downloads import Numbers
from featcal.figures import run_tables, sweep_charts, tables, text
from featcal.figures.commands import ChartSource
from featcal.figures.names import plain
from featcal.server.kinds import options_of
from featcal.server.lengths import is_long, seconds_to_calibrate
from featcal.session.model_ref import ModelRef
from featcal.session.session import Session
from featcal.studies.history import History, HistoryEntry
from featcal.studies.recording import hash_of, run_of
from featcal.studies.sweep import (
    Grid,
    SweepPoint,
    baselines,
    calibrations,
    comparable_points,
    front,
    missing,
    numbers,
    run_sweep,
)
from featcal.suite.calibration_options import CalibrationConfig
from featcal.suite.views import EvaluationSamples
from featcal.system.errors import FeatcalError, InputError
from featcal.system.formatting import exactly

_CHART = "sweep-chart"
AXES = (("lam", "λ", "ridge strength"), ("rho", "ρ", "anchor"), ("alpha", "α", "expert features"))


def offered_values(config: CalibrationConfig) -> dict[str, str]:
    """Return values around the defaults of a suite and a recipe, as they are typed: 3 × 3 × 3 calibrations.

    >>> offered_values(CalibrationConfig(lam=0.05, rho=2.0, alpha=0.3))
    {'lam': '0.005, 0.05, 0.5', 'rho': '1, 1.5, 2', 'alpha': '0, 0.3, 0.6'}
    >>> offered_values(CalibrationConfig(lam=0.01, rho=2.0, alpha=0.6, beta=0.5, recipe="refined"))["alpha"]
    '0.3, 0.6, 1'
    """
    lam = [config.lam * factor for factor in (0.1, 1, 10)]
    rho = [1 + (config.rho - 1) * share for share in (0, 0.5, 1)] if config.rho != 1 else [1, 1.5, 2]
    # Without the experts' features (α = 0) there is no β.
    alpha = sorted({config.alpha / 2 if config.beta else 0.0, config.alpha, min(1.0, 2 * config.alpha)})
    found = {"lam": lam, "rho": rho, "alpha": alpha}
    return {name: ", ".join(exactly(float(f"{one:.6g}")) for one in values) for name, values in found.items()}


def section(session: Session, on: EvaluationSamples, history: History, models: Mapping[str, ModelRef]) -> None:
    """Draw values to try, a button that tries them, and the chart of everything that was tried on the same samples.

    Args:
        models: what the other pages look at; found again in the chart.
    """
    grid = _grid(session)
    known = history.runs(hash_of(session))
    swept = _start(session, grid, on, history, known) if grid is not None else []
    points = comparable_points(session, on, known) or swept  # a history that cannot be written has none
    if points:
        _chart(session, on, points, models)
    else:
        whole = ", with whole answers" if session.is_text else ""
        st.info(
            f"Nothing was tried on these samples yet{whole}: run a sweep, or calibrate once.", icon=":material/grid_on:"
        )
    st.caption(
        f"Measured on {session.split} samples, which calibration does not see. Choose options here, not on test."
        if session.split == "validation"
        else f"This suite has no validation split: measured on {session.split} samples, so it flatters."
    )


def _grid(session: Session) -> Grid | None:
    """Read three lists of values; None, and the reason on the page, where they are not such lists."""
    config, chosen = options.chosen_config(session), state.selection()
    offer = offered_values(options.recipe_defaults(session))
    typed = {}
    for place, (name, symbol, meaning) in zip(st.columns(3), AXES, strict=True):
        field = f"sweep_{name}"
        typed[name] = getattr(chosen, field) or offer[name]
        help_ = "Values between commas. Every combination of the three lists is one calibration."
        state.control(place.text_input, field, typed[name], offer[name], f"{symbol}, {meaning}", help=help_)
    try:
        lam, rho, alpha = (numbers(typed[name], symbol) for name, symbol, _ in AXES)
        return Grid(lam, rho, alpha, config, on_table.find_merge(session).name)
    except InputError as error:
        view.problem(error)
        return None


def _start(
    session: Session, grid: Grid, on: EvaluationSamples, history: History, known: Sequence[HistoryEntry]
) -> list[SweepPoint]:
    """Draw the button and what it would compute, and do the work; return the points if it was done now."""
    new, count = missing(session, grid, on, known), len(grid.configs())
    of = "" if grid.of == "merged" else f" of {plain(grid.of)}"
    others = len(baselines(grid, session.family.is_base_known))
    left, right = st.columns([1, 3], vertical_alignment="center")
    wanted = left.button("Run the sweep", type="primary", icon=":material/grid_on:", width="stretch")
    right.caption(
        f"{count} calibrations{of} ({new} new) plus {others} merges that need no calibration; "
        f"{grid.options.samples} calibration samples and the other options as on the page Calibrate."
    )
    with st.popover("Command and Python", icon=":material/terminal:"):
        names = tuple(model.name for model in calibrations(session, grid))
        view.show_commands(ChartSource("sweep", state.reference(), names, on))
    args = job_args(grid, on)
    long = is_long(session, 1.5 * new * seconds_to_calibrate(session, grid.options))
    # A job that runs stays followed, though what is left of it gets short in the end.
    if new and (long or jobs.has_job("sweep", args)):
        jobs.follow("sweep", args, wanted)
        return []
    if not wanted:
        return []
    try:
        with state.progress() as report:
            points = run_sweep(session, grid, report, on=on, history=history)
    except FeatcalError as error:
        view.problem(error)
        return []
    if not history.problems:
        st.rerun()
    return points


def job_args(grid: Grid, on: EvaluationSamples) -> dict[str, Any]:
    """Return the arguments of a job that sweeps (`featcal.server.kinds.sweep`)."""
    values = {name: list(dict.fromkeys(getattr(grid, name))) for name, *_ in AXES}
    options = {name: value for name, value in options_of(grid.options).items() if name not in values}
    named = {} if grid.of == "merged" else {"model": grid.of}
    return {**values, "options": options, **named, "n": on.samples}


def _chart(session: Session, on: EvaluationSamples, points: list[SweepPoint], models: Mapping[str, ModelRef]) -> None:
    best = front(points)
    frame = run_tables.sweep_table(points, best)
    metric = tables.metric_words(one.metric for point in points for one in point.found.scores.values())
    shown = {run_of(session, model).id: name for name, model in models.items()}
    units = f"mean and worst: {metric} in %; drift: norm / norm of the expert's"
    origin = replace(downloads.sample_origin(session, on, {}), models={name: name for name in frame["model"]})
    measured = Numbers("sweep", frame, units, origin, kind="sweep")
    highest = max(points, key=lambda point: (point.kind == "calibrated", point.found.mean))
    st.plotly_chart(
        sweep_charts.mean_against_worst(frame, metric, shown),
        key=_CHART,
        on_select=_choose,
        selection_mode="points",
        config=view.plotly(measured.name),
        alt=f"Mean {metric} against that on the worst task of {len(points)} runs; {len(best)} are on the Pareto front. "
        f"Best mean: {run_tables.title(highest.run)}, {100 * highest.found.mean:.1f} %, "
        f"worst task {100 * highest.found.worst:.1f} %",
    )
    st.caption("Click a point to compare the merge with that run on every page.")
    view.tools(measured, text.SWEEP)


def _choose() -> None:
    """Select the run of a clicked point, and a calibrated one for every page."""
    points = st.session_state[_CHART].selection.points
    ids = [str(point["customdata"]) for point in points if "customdata" in point]
    if ids:
        runs.choose(ids[0])

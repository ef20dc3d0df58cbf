"""Order many calibrations at once as a job, and show every run of the suite as mean against worst task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd
import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from app import downloads, jobs, on_table, options, runs, state, view
from app.downloads import Numbers
from featcal.figures import run_tables, sweep_charts, tables, text
from featcal.figures.commands import ChartSource
from featcal.figures.names import plain
from featcal.server.kinds import options_of
from featcal.server.lengths import seconds_to_calibrate
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
)
from featcal.suite.calibration_options import CalibrationConfig
from featcal.suite.views import EvaluationSamples
from featcal.system.errors import InputError
from featcal.system.formatting import duration, exactly

_CHART = "sweep-chart"
WORST, OPTION, PARALLEL = CHARTS = ("Mean and worst task", "Score and option", "All options")
KIND, SCORES = "kind", tuple(sweep_charts.SCORES)
_CLICK = "Click a point to compare the merge with that run on every page."
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
    """Draw values to try, a button that orders a job to try them, and the chart of everything that was tried on the
    same samples, a point as soon as it is measured.

    Args:
        models: what the other pages look at; found again in the chart.
    """
    known = history.runs(hash_of(session))
    row = st.container(horizontal=True, vertical_alignment="center")
    if (grid := _grid(session, row)) is not None:
        _start(session, grid, on, known, row)
    points = comparable_points(session, on, known)
    if points:
        _charts(session, on, points, models)
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


def _grid(session: Session, row: DeltaGenerator) -> Grid | None:
    """Read three lists of values; None, and the reason on the page, where they are not such lists."""
    config, chosen = options.chosen_config(session), state.selection()
    offer = offered_values(options.recipe_defaults(session))
    typed = {}
    values = row.popover("Values to try", icon=":material/grid_on:")
    for name, symbol, meaning in AXES:
        field = f"sweep_{name}"
        typed[name] = getattr(chosen, field) or offer[name]
        help_ = "Values between commas. Every combination of the three lists is one calibration."
        state.control(values.text_input, field, typed[name], offer[name], f"{symbol}, {meaning}", help=help_)
    try:
        lam, rho, alpha = (numbers(typed[name], symbol) for name, symbol, _ in AXES)
        return Grid(lam, rho, alpha, config, on_table.find_merge(session).name)
    except InputError as error:
        view.problem(error)
        return None


def _start(
    session: Session, grid: Grid, on: EvaluationSamples, known: Sequence[HistoryEntry], row: DeltaGenerator
) -> None:
    """Draw the button that orders the sweep, what it computes, and the progress of sweeps of this suite."""
    new, others = missing(session, grid, on, known)
    count, beside = len(grid.configs()), len(baselines(grid, session.family.is_base_known))
    of = "" if grid.of == "merged" else f" of {plain(grid.of)}"
    args, left = job_args(grid, on), bool(new or others)
    running = jobs.is_unfinished("sweep", args)
    wanted = row.button(
        "Run the sweep",
        type="primary",
        icon=":material/play_arrow:",
        disabled=running or not left,
        help=None if left else "Every point of this sweep was measured: see the chart.",
    )
    with row.popover("Command and Python", icon=":material/terminal:"):
        names = tuple(model.name for model in calibrations(session, grid))
        view.show_commands(ChartSource("sweep", state.reference(), names, on))
    takes = f", about {duration(1.5 * len(new) * seconds_to_calibrate(session, grid.options))}" if new else ""
    values = (f"{symbol} {', '.join(map(exactly, getattr(grid, name)))}" for name, symbol, _ in AXES)
    st.caption(
        f"{' × '.join(values)}: {count} calibrations{of} ({len(new)} new{takes}) plus {beside} models that need no "
        f"calibration; {grid.options.samples} calibration samples, other options as on Calibrate. The sweep runs as a "
        "background job: leave this page, come back, and its points are here."
    )
    try:
        jobs.follow("sweep", args, wanted, left)
    except InputError as error:
        if wanted:  # where no jobs can be kept there are none to show
            view.problem(error)


def job_args(grid: Grid, on: EvaluationSamples) -> dict[str, Any]:
    """Return the arguments of a job that sweeps (`featcal.server.kinds.sweep`)."""
    values = {name: list(dict.fromkeys(getattr(grid, name))) for name, *_ in AXES}
    options = {name: value for name, value in options_of(grid.options).items() if name not in values}
    named = {} if grid.of == "merged" else {"model": grid.of}
    return {**values, "options": options, **named, "n": on.samples}


def _charts(
    session: Session, on: EvaluationSamples, points: Sequence[SweepPoint], models: Mapping[str, ModelRef]
) -> None:
    """Draw the runs that the filter leaves, as the chart that is chosen."""
    everything = run_tables.sweep_table(points, front(points))
    row = st.container(horizontal=True, vertical_alignment="bottom")
    chart = view.choice("Chart", CHARTS, "runs_chart", row)
    option, score = _axes(everything, chart, row)
    colours = [KIND, *(name for name in run_tables.OPTION_COLUMNS if everything[name].nunique() > 1), *SCORES]
    by = KIND if chart == PARALLEL else _select(row, "Colour", "runs_colour", colours)
    only = runs.choose_filter(everything, row)
    frame = run_tables.select_runs(everything, only)
    if frame.empty:
        st.info("No run on these samples passes the filter.", icon=":material/filter_alt_off:")
        return
    metric = tables.metric_words(one.metric for point in points for one in point.found.scores.values())
    shown = {run_of(session, model).id: name for name, model in models.items()}
    by = "" if by == KIND else by
    if chart == PARALLEL:
        figure = sweep_charts.all_options(frame, score, metric)
    elif chart == OPTION:
        figure = sweep_charts.score_against(frame, option, score, metric, shown, by)
    else:
        figure = sweep_charts.mean_against_worst(frame, metric, shown, by)
    units = f"mean and worst: {metric} in %; drift: norm / norm of the expert's"
    origin = replace(downloads.sample_origin(session, on, {}), models={name: name for name in frame["model"]})
    measured = Numbers("sweep", frame, units, origin, kind="sweep")
    best = frame.loc[(frame["kind"] == "calibrated").astype(float).add(frame["mean"] / 1000).idxmax()]
    st.plotly_chart(
        figure,
        key=_CHART,
        on_select=_choose if chart != PARALLEL else "ignore",
        selection_mode="points",
        config=view.plotly(measured.name),
        alt=f"{chart} of {len(frame)} runs, {metric}; {int(frame['front'].sum())} are on the Pareto front. "
        f"Best mean: {best['name'] or best['model']}, {best['mean']:.1f} %, worst task {best['worst']:.1f} %",
    )
    how = "Draw a range on an axis to keep the runs that pass it." if chart == PARALLEL else _CLICK
    st.caption(how)
    view.tools(measured, text.SWEEP)


def _axes(frame: pd.DataFrame, chart: str, row: DeltaGenerator) -> tuple[str, str]:
    """Let the option and the score of a chart be chosen where it has them; return both."""
    varying = [name for name in run_tables.OPTION_COLUMNS if frame[name].nunique() > 1] or ["method"]
    option = view.one_of(varying, state.selection().runs_option)
    if chart == OPTION:
        option = _select(row, "Option", "runs_option", varying)
    score = _select(row, "Score", "runs_score", list(SCORES)) if chart != WORST else SCORES[0]
    return option, score


def _select(row: DeltaGenerator, label: str, field: str, values: Sequence[str]) -> str:
    """Let one of several values be chosen from a list, the first by default."""
    chosen = view.one_of(values, getattr(state.selection(), field))
    state.control(row.selectbox, field, chosen, values[0], label, values, width=140)
    return chosen


def _choose() -> None:
    """Select the run of a clicked point, and a calibrated one for every page."""
    points = st.session_state[_CHART].selection.points
    ids = [str(point["customdata"]) for point in points if "customdata" in point]
    if ids:
        runs.choose(ids[0])

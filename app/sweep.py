"""Start many calibrations at once as a job, and show every run and method of the suite as points of one plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pandas as pd
import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from app import downloads, jobs, on_table, options, runs, state, view
from app.downloads import Numbers
from featcal.calibration.config import require_base
from featcal.figures import run_tables, study_tables, sweep_charts, tables
from featcal.figures.commands import ChartSource
from featcal.figures.names import plain
from featcal.server.kinds import job_options
from featcal.server.lengths import seconds_to_calibrate
from featcal.session.model_ref import ModelRef
from featcal.session.session import Session
from featcal.studies.history import History, HistoryEntry, is_run_id
from featcal.studies.recording import hash_of, run_of
from featcal.studies.study import Study
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
from featcal.suite.methods import EXPERT
from featcal.suite.views import EvaluationSamples
from featcal.system.errors import InputError
from featcal.system.formatting import decimals, duration, exactly

_CHART = "sweep-chart"
KIND = "kind"
AXES = (("lam", "λ", "ridge strength"), ("rho", "ρ", "anchor"), ("alpha", "α", "expert features"))


def offered_values(config: CalibrationConfig, is_base_known: bool = True) -> dict[str, str]:
    """Return values around the defaults of a suite and a recipe, as they are typed: 3 × 3 × 3 calibrations, or 3 × 3
    without a base, from which every anchor but ρ = 1 is taken.

    >>> offered_values(CalibrationConfig(lam=0.05, rho=2.0, alpha=0.3))
    {'lam': '0.005, 0.05, 0.5', 'rho': '1, 1.5, 2', 'alpha': '0, 0.3, 0.6'}
    >>> offered_values(CalibrationConfig(lam=0.01, rho=2.0, alpha=0.6, beta=0.5, recipe="refined"))["alpha"]
    '0.3, 0.6, 1'
    """
    lam = [config.lam * factor for factor in (0.1, 1, 10)]
    rho = [1 + (config.rho - 1) * share for share in (0, 0.5, 1)] if config.rho != 1 else [1, 1.5, 2]
    rho = rho if is_base_known else [1]
    # Without the experts' features (α = 0) there is no β.
    alpha = sorted({config.alpha / 2 if config.beta else 0.0, config.alpha, min(1.0, 2 * config.alpha)})
    found = {"lam": lam, "rho": rho, "alpha": alpha}
    return {name: ", ".join(exactly(float(f"{one:.6g}")) for one in values) for name, values in found.items()}


def show_sweep(session: Session, on: EvaluationSamples, models: Mapping[str, ModelRef], table: Study | None) -> None:
    """Draw values to try, a button that starts a job for them, and one plot of all runs on the same samples, with new
    points as they are measured.

    Args:
        models: models of the other pages, which the chart marks.
        table: methods to plot with the runs.
    """
    known = History().runs(hash_of(session))
    row = st.container(horizontal=True, vertical_alignment="bottom")
    axes = row.container(horizontal=True, vertical_alignment="bottom", width="content")
    if (grid := _grid(session, row)) is not None:
        _start(session, grid, on, known, row)
    points = comparable_points(session, on, known)
    methods = study_tables.method_points(table.summaries()) if table else None
    if points:
        _plot(session, on, points, models, methods, axes)
    else:
        st.info(f"Nothing was tried on these samples yet{say_whole(session)}: run a sweep.", icon=":material/grid_on:")


def say_whole(session: Session) -> str:
    """Name the samples on which the scores of runs are measured, if that may be unclear."""
    return ", with whole answers" if session.is_text else ""


def _grid(session: Session, row: DeltaGenerator) -> Grid | None:
    """Read three lists of values; None, with the reason on the page, if they are invalid."""
    config, chosen = options.chosen_config(session), state.selection()
    offer = offered_values(options.recipe_defaults(session), session.family.is_base_known)
    typed = {}
    values = row.popover("Values to try", icon=":material/grid_on:")
    for name, symbol, meaning in AXES:
        field = f"sweep_{name}"
        typed[name] = getattr(chosen, field) or offer[name]
        help_ = "Values between commas. Every combination of the three lists is one calibration."
        state.control(values.text_input, field, typed[name], offer[name], f"{symbol}, {meaning}", help=help_)
    try:
        lam, rho, alpha = (numbers(typed[name], symbol) for name, symbol, _ in AXES)
        for one in rho:
            require_base(replace(config, rho=one), session.family.suite)
        return Grid(lam, rho, alpha, config, on_table.find_merge(session).name)
    except InputError as error:
        view.problem(error)
        return None


def _start(
    session: Session, grid: Grid, on: EvaluationSamples, known: Sequence[HistoryEntry], row: DeltaGenerator
) -> None:
    """Draw the button that starts the sweep, a description of it, and the progress of sweeps of this suite."""
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
        view.show_commands(ChartSource("sweep", state.suite_reference(), names, on))
    takes = f", about {duration(1.5 * len(new) * seconds_to_calibrate(session, grid.options))}" if new else ""
    values = (f"{symbol} {', '.join(map(exactly, getattr(grid, name)))}" for name, symbol, _ in AXES)
    st.caption(
        f"{' × '.join(values)}: {count} calibrations{of} ({len(new)} new{takes}) plus {beside} models that need no "
        f"calibration; {grid.options.samples} calibration samples, other options as on Calibrate. The sweep runs as a "
        "background job: leave this page, come back, and its points are here."
    )
    try:
        jobs.follow_jobs("sweep", args, wanted, left)
    except InputError as error:
        if wanted:  # where no jobs can be kept there are none to show
            view.problem(error)


def job_args(grid: Grid, on: EvaluationSamples) -> dict[str, Any]:
    """Return the arguments of a job that sweeps (`featcal.server.kinds.run_sweep_job`)."""
    values = {name: list(dict.fromkeys(getattr(grid, name))) for name, *_ in AXES}
    options = {name: value for name, value in job_options(grid.options).items() if name not in values}
    named = {} if grid.of == "merged" else {"model": grid.of}
    return {**values, "options": options, **named, "n": on.samples}


def _plot(
    session: Session,
    on: EvaluationSamples,
    points: Sequence[SweepPoint],
    models: Mapping[str, ModelRef],
    methods: pd.DataFrame | None,
    axes: DeltaGenerator,
) -> None:
    """Draw runs and methods as points of one plot."""
    frame = run_tables.sweep_table(points, front(points))
    varying = [name for name in run_tables.OPTION_COLUMNS if frame[name].nunique() > 1]
    across = _select(axes, "Across", "across", [*sweep_charts.NUMBERS_ACROSS, *varying])
    by = _select(axes, "Colour", "runs_colour", [KIND, *varying, *sweep_charts.SCORES])
    metric = tables.metric_words(one.metric for point in points for one in point.found.scores.values())
    shown = {run_of(session, model).id: name for name, model in models.items()}
    measured = numbers_of(session, on, frame, metric)
    beside = f", and {len(methods)} methods of the table" if methods is not None else ""
    best = frame.loc[(frame["kind"] == "calibrated").astype(float).add(frame["mean"] / 1000).idxmax()]
    view.picture(
        sweep_charts.runs_as_points(frame, across, metric, shown, "" if by == KIND else by, methods),
        _CHART,
        f"{metric} over {across} of {len(frame)} runs{beside}; {int(frame['front'].sum())} are on the Pareto "
        f"front. Best mean: {best['name'] or best['model']}, {decimals(best['mean'], 1)} %, worst task "
        f"{decimals(best['worst'], 1)} %",
        measured.name,
        on_select=_choose,
    )
    flat = "" if session.split == "validation" else ", so it flatters: this suite has no validation split"
    note = "" if methods is None else " Hollow points are of the table below, on its test split: not to choose by."
    st.caption(f"Runs are measured on {session.split} samples{flat}.{note} Click a point to show it on every page.")
    view.tools(measured, sweep_charts.SWEEP)


def draw_lines(session: Session, on: EvaluationSamples, points: Sequence[SweepPoint]) -> None:
    """Draw the filtered calibrated runs as lines across their options and scores."""
    everything = run_tables.sweep_table(points, front(points))
    row = st.container(horizontal=True, vertical_alignment="bottom")
    score = _select(row, "Score", "runs_score", list(sweep_charts.SCORES))
    frame = run_tables.select_runs(everything, runs.choose_filter(everything, row))
    lines = int((frame["kind"] == "calibrated").sum())
    if lines < 2:
        words = f"Lines across options need two calibrated runs on these samples{say_whole(session)}"
        st.info(f"{words}; the filter leaves {lines or 'none'}.", icon=":material/filter_alt_off:")
        return
    metric = tables.metric_words(one.metric for point in points for one in point.found.scores.values())
    measured = numbers_of(session, on, frame, metric)
    alt = f"{lines} runs as lines across options and scores"
    view.picture(sweep_charts.all_options(frame, score, metric), "run-lines", alt, measured.name)
    st.caption("Draw a range on an axis to keep the runs that pass it.")
    view.tools(measured)


def numbers_of(session: Session, on: EvaluationSamples, frame: pd.DataFrame, metric: str) -> Numbers:
    """Return the table of runs behind a chart, with its origin."""
    units = f"mean and worst: {metric} in %; drift: norm / norm of the expert's; cost: seconds of the processor"
    origin = replace(downloads.sample_origin(session, on, {}), models={name: name for name in frame["model"]})
    return Numbers("sweep", frame, units, origin, kind="sweep")


def _select(row: DeltaGenerator, label: str, field: str, values: Sequence[str]) -> str:
    """Draw a choice of one value from a list, the first by default."""
    chosen = view.one_of(values, getattr(state.selection(), field))
    draw = partial(row.selectbox, width=150, format_func=lambda value: "worst task" if value == "worst" else value)
    state.control(draw, field, chosen, values[0], label, values)
    return chosen


def _choose(key: str) -> None:
    """Show the model of a clicked point on every page: a run, or a method of the table."""
    points = st.session_state[key].selection.points
    ids = [str(point["customdata"]) for point in points if "customdata" in point]
    if ids and is_run_id(ids[0]):
        runs.choose_run(ids[0])
    elif ids and ids[0] != EXPERT:  # every page has them beside its models already
        state.look_at(**on_table.fields_beside_merge(ids[0]))

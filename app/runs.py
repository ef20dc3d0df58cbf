"""Show the history on a page: the measured runs, and actions on them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import pandas as pd
import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from app import on_table, opening, options, state, view
from app.selection import CALIBRATED, HOME, OPTIONS
from featcal.evaluation.comparison import compare_scores
from featcal.figures import run_tables, tables
from featcal.figures.names import cut_text, plain, shorten_models
from featcal.session.model_ref import ModelRef
from featcal.session.session import Session
from featcal.studies import recording
from featcal.studies.history import History, HistoryEntry, Mark, RunMeasurement
from featcal.studies.recording import hash_of, record
from featcal.suite.calibration_options import CalibrationConfig
from featcal.suite.methods import EXPERT
from featcal.suite.views import EvaluationSamples
from featcal.system.errors import FeatcalError, InputError
from featcal.system.sandbox import server_rules

_LIST, _NOTHING, _PROBLEM, _DELETED = "runs-list", "–", "problem with a run", "deleted run"
_COLUMNS = (
    *("name", "pinned", *run_tables.OPTION_COLUMNS, "measured on", "mean", "worst", "drift", "notes", "time"),
    *("model", "run"),
)


def keep_calibrated(session: Session, models: Mapping[str, ModelRef], on: EvaluationSamples) -> None:
    """Add the calibrated models of a page to the history."""
    record_runs(session, {name: model for name, model in models.items() if model.config is not None}, on)


def record_runs(session: Session, models: Mapping[str, ModelRef], on: EvaluationSamples) -> None:
    """Add models of a page to the history; show a message if that fails."""
    for model in models.values():
        if problem := record(session, model, on, History(), state.page_score_kind(session, on)):
            view.show_problems([problem])


def count_page_looks(
    session: Session, models: Iterable[ModelRef], on: EvaluationSamples
) -> AbstractContextManager[None]:
    """Count uses of the test split by the models that the body of the `with` scores on it."""
    return recording.count_looks(session, models, on, "app", History())


def say_looks(session: Session) -> None:
    """Show how often the test split of this suite was used, for every page with scores on it."""
    history = History()
    times, models = history.looks(hash_of(session))
    st.caption(
        f"Test split evaluated {times} times, on {models} models. A test set used to choose a model no longer tests it."
    )
    view.show_problems(history.problems)


def choose_run(run_id: str) -> None:
    """Show a run on the Runs page and, compared with the merge, on every other page; a
    calibration is compared with the model before it.
    """
    state.look_at(run=run_id)
    try:
        state.look_at(**_select_beside(History().get(run_id)))
    except FeatcalError as error:
        st.session_state[_PROBLEM] = str(error)


def _select_beside(run: HistoryEntry) -> dict[str, Any]:
    """Return the selection that compares the merge with a run: by its options on the sliders if they can show it, else
    by its name."""
    if run.model == EXPERT:  # every page has them beside its models already
        return {}
    recording.resolve_run(state.current_session(), run)
    beside = {"merge": HOME.merge, **on_table.fields_beside_merge(run.model)}
    if not run.options:
        return beside
    defaults = opening.defaults(state.current_session())
    try:
        config = CalibrationConfig(**run.options)
    except TypeError:
        raise InputError(f"run {run.id} has options of another version of featcal") from None
    fixed = set(run.options) - {*OPTIONS}
    if any(getattr(config, name) != getattr(defaults, name) for name in fixed):
        return beside
    return {**beside, "beside": CALIBRATED, **options.fields_of(state.current_session(), config)}


def _choose_both(run_a: str, run_b: str) -> None:
    """Compare two runs on every page."""
    choose_run(run_b)
    try:
        recording.resolve_run(state.current_session(), History().get(run_a))
        a, b = History().get(run_a).model, History().get(run_b).model
        # The sliders show a calibration of the merge on the table alone.
        same = on_table.merge_of(state.current_session(), a).name == on_table.merge_of(state.current_session(), b).name
        state.look_at(run=run_a, against=run_b, merge=a, **({} if same else {"beside": b}))
    except FeatcalError as error:
        st.session_state[_PROBLEM] = str(error)


def show_runs(session: Session, history: History, is_filtered: bool) -> None:
    """Show the list of runs, one of them to name, pin, delete or show, and another to compare it with.

    Args:
        is_filtered: whether the page has a filter (`choose_filter`), which counts here too.
    """
    st.header("Every run of this suite")
    if _PROBLEM in st.session_state:
        st.error(plain(st.session_state.pop(_PROBLEM)), icon=":material/error:")
    _offer_undo()
    everything, here = history.runs(), hash_of(session)
    known = [run for run in everything if run.suite_hash == here]
    view.show_problems(history.problems)
    if known:
        _list(known, state.selection().runs_only if is_filtered else ())
        _one(session, known)
    else:
        st.info("No run yet. Whatever is calibrated in the app or by a sweep is kept here.", icon=":material/history:")
    others = [run for run in everything if run.suite_hash != here]
    if others:
        with st.expander(f"Runs of other suites, and of this one before its files changed ({len(others)})"):
            st.dataframe(run_tables.run_table(others), hide_index=True, alt="Runs of other suites")


def choose_filter(frame: pd.DataFrame, row: DeltaGenerator) -> tuple[str, ...]:
    """Draw filters for runs by the values of their columns; return the matching runs."""
    chosen = state.selection().runs_only
    offered = list(dict.fromkeys([*run_tables.filters(frame), *chosen]))
    state.control(
        row.multiselect,
        "runs_only",
        list(chosen),
        HOME.runs_only,
        "Show only",
        offered,
        placeholder="all runs",
        help="Values of one column are alternatives; of several columns a run must have one each. The list below "
        "follows too.",
    )
    return state.selection().runs_only


def shorten_column(names: pd.Series) -> pd.Series:
    """Return the short names of models in a column, or the full ones if two would be equal; missing ones stay.

    >>> shorten_column(pd.Series(["/data/me/my-ties", "ties", "ties"])).tolist()
    ['my-ties', 'ties', 'ties']
    """
    known = names.dropna().unique().tolist()
    return names.replace(dict(zip(known, shorten_models(known), strict=True)))


def _list(runs: Sequence[HistoryEntry], only: Sequence[str]) -> None:
    """List runs with a column per option: sorted by a click on a heading, filtered as the chart, or grouped."""
    everything = run_tables.run_table(runs)
    frame = run_tables.select_runs(everything, only)
    groups = [_NOTHING, *(name for name in run_tables.OPTION_COLUMNS if everything[name].nunique() > 1), "measured on"]
    row = st.container(horizontal=True, vertical_alignment="bottom")
    by = view.one_of(groups, state.selection().runs_group)
    state.control(row.selectbox, "runs_group", by, groups[0], "Group by", groups, width=180)
    words = f"{len(frame)} of {len(everything)} rows" if len(frame) < len(everything) else f"Rows: {len(frame)}"
    row.caption(f"{words}. Click a heading to sort, a row to choose it.")
    formats = {
        "mean": st.column_config.NumberColumn("mean, %", format="%.1f"),
        "worst": st.column_config.NumberColumn("worst task, %", format="%.1f"),
        "drift": st.column_config.NumberColumn("drift", format="%.3f"),
        **{name: st.column_config.NumberColumn(f"{name} mean, %", format="%.1f") for name in ("best", "lowest")},
    }
    scores = [name for name in formats if name != "drift"]
    if by != _NOTHING:
        grouped = tables.lift_halves(run_tables.group_runs(frame, by), scores)
        st.dataframe(grouped, hide_index=True, column_config=formats, placeholder="–", alt=f"Runs by {by}")
        return
    # Rows of the selection are numbers in the table as it was drawn, which may not be the table of the next run.
    st.session_state["runs-listed"] = frame["run"].tolist()
    listed = tables.lift_halves(frame, scores).assign(
        merge=shorten_column(frame["merge"]), method=shorten_column(frame["method"])
    )
    st.dataframe(
        listed[[name for name in _COLUMNS if name not in run_tables.OPTION_COLUMNS or frame[name].notna().any()]],
        hide_index=True,
        height=215 if len(frame) > 5 else "auto",  # a long list scrolls, so what is done with a run stays in sight
        key=_LIST,
        on_select=_choose_row,
        selection_mode="single-row",
        column_config=formats,
        placeholder="–",
        alt=f"{len(frame)} rows of runs: name, options, samples, mean and worst score, drift, time",
    )
    left, right = st.columns(2)
    kept = set(frame["run"])
    exported = [run for run in runs if run.id in kept]
    left.download_button(
        "Download CSV",
        lambda: run_tables.run_export(exported).to_csv(index=False).encode(),
        "featcal-runs.csv",
        "text/csv",
        on_click="ignore",
        icon=":material/download:",
    )
    right.download_button(
        "Download JSON",
        lambda: json.dumps({"runs": [run.to_json() for run in exported]}, indent=2, allow_nan=False),
        "featcal-runs.json",
        "application/json",
        on_click="ignore",
        icon=":material/download:",
    )


def _choose_row() -> None:
    rows = st.session_state[_LIST].selection.rows
    if rows:
        state.look_at(run=st.session_state["runs-listed"][rows[0]])


def _one(session: Session, runs: Sequence[HistoryEntry]) -> None:
    """Show actions on one run."""
    known = {run.id: run for run in runs}
    chosen, other = state.selection().run, state.selection().against
    first = chosen if chosen in known else runs[0].id
    second = other if other in known and other != first else _NOTHING

    def format_run(run_id: str) -> str:
        return f"{cut_text(run_tables.run_title(known[run_id]), 70)} · {run_id[:6]}" if run_id in known else run_id

    left, right = st.columns(2)
    state.control(left.selectbox, "run", first, HOME.run, "Run", list(known), format_func=format_run)
    rest = [_NOTHING, *(one for one in known if one != first)]
    state.control(right.selectbox, "against", second, _NOTHING, "Compare with", rest, format_func=format_run)
    run = known[first]
    buttons = st.columns(4)
    buttons[0].button(
        "Show it on every page",
        on_click=choose_run,
        args=(run.id,),
        icon=":material/open_in_full:",
        width="stretch",
        help="Compares the merge with this run on every page.",
    )
    if not server_rules():  # the history is everybody's: whoever looks changes nothing of it
        _keep_buttons(run, *buttons[1:3])
        with buttons[3].popover("Name and notes", icon=":material/edit:", width="stretch"):
            _marks(run)
    if second != _NOTHING:
        if EXPERT not in (run.model, known[second].model):  # every page has them beside its models already
            st.button(
                "Compare both on every page",
                on_click=_choose_both,
                args=(run.id, second),
                icon=":material/compare_arrows:",
            )
        _compare(session, run, known[second])


def _keep_buttons(run: HistoryEntry, left: DeltaGenerator, right: DeltaGenerator) -> None:
    """Draw buttons that protect a run from deletion, and that delete it."""
    pin = "Unpin" if run.pinned else "Pin"
    left.button(
        pin,
        on_click=_mark,
        args=(run.id, "pinned", not run.pinned),
        icon=":material/keep:",
        width="stretch",
        help="A pinned run is offered among the models of every page, and is not deleted.",
    )
    right.button(
        "Delete",
        on_click=_delete,
        args=(run.id,),
        disabled=run.pinned,
        icon=":material/delete:",
        width="stretch",
        help="A pinned run is not deleted: unpin it first." if run.pinned else "Can be undone on this page.",
    )


def _marks(run: HistoryEntry) -> None:
    """Draw fields for a run's name and for notes on it."""
    fields: tuple[tuple[Mark, str], ...] = (("name", "Name"), ("notes", "Notes"))
    for mark, words in fields:
        key = f"{mark}-{run.id}"
        if key not in st.session_state:
            st.session_state[key] = getattr(run, mark)
        st.text_input(words, key=key, max_chars=200, on_change=_mark_typed, args=(run.id, mark, key))


def _mark_typed(run_id: str, mark: Mark, key: str) -> None:
    _mark(run_id, mark, st.session_state[key].strip())


def _mark(run_id: str, mark: Mark, value: str | bool) -> None:
    try:
        History().mark(run_id, mark, value)
    except FeatcalError as error:
        st.session_state[_PROBLEM] = str(error)


def _delete(run_id: str) -> None:
    """Delete a run, and remember it during this visit for an undo."""
    try:
        run = History().get(run_id)
        History().delete(run_id)
        st.session_state[_DELETED] = run
        state.look_at(run=None)
    except FeatcalError as error:
        st.session_state[_PROBLEM] = str(error)


def _offer_undo() -> None:
    """Show which run was deleted last in this visit, with a button that restores it."""
    run: HistoryEntry | None = st.session_state.get(_DELETED)
    if run is not None:
        with st.container(horizontal=True, vertical_alignment="center", key="deleted-run"):
            st.markdown(f"Deleted: {plain(cut_text(run_tables.run_title(run), 80))}", width="content")
            st.button("Bring it back", on_click=_bring_back, args=(run,), icon=":material/undo:")


def _bring_back(run: HistoryEntry) -> None:
    """Restore a deleted run in the history, with all its measurements and marks."""
    history = History()
    kept = [history.add(run, one) for one in run.measured or (None,)]
    try:
        for mark in ("name", "notes"):
            history.mark(run.id, mark, getattr(run, mark))
    except FeatcalError as error:
        st.session_state[_PROBLEM] = str(error)
    if all(kept):
        del st.session_state[_DELETED]
        state.look_at(run=run.id)


def _compare(session: Session, a: HistoryEntry, b: HistoryEntry) -> None:
    """Show the differences of two runs: options, scores and drift on the same samples, and which samples flip."""
    st.markdown(f"**A** {plain(run_tables.run_title(a))}  \n**B** {plain(run_tables.run_title(b))}")
    differences = run_tables.different(a, b)
    if len(differences):
        st.dataframe(differences, hide_index=True, alt="Options that differ")
    else:
        st.caption("The same options.")
    both = [(one, other) for one in a.measured for other in b.measured if one.samples_key == other.samples_key]
    if not both:
        st.info("They were not measured on the same samples.", icon=":material/info:")
    for one, other in both:
        st.caption(f"On {plain(run_tables.describe_measured_samples(one))}:")
        frame = run_tables.compare_runs(one, other)
        formats = {name: st.column_config.NumberColumn(format="%.3f" if "drift" in name else "%.1f") for name in frame}
        # A number's format on a column of text would show nothing.
        del formats["task"]
        scores = [name for name in formats if "drift" not in name]
        frame = tables.lift_halves(frame, scores)
        st.dataframe(frame, hide_index=True, column_config=formats, alt="Scores and drift of both, task by task")
    if both and all(one.scores for one in both[0]) and st.button("Which samples flip?", icon=":material/swap_horiz:"):
        _flips(session, (a, b), both[0][0])


def _flips(session: Session, runs: tuple[HistoryEntry, HistoryEntry], measured: RunMeasurement) -> None:
    """Show how many samples of a measurement B has right and A wrong, task by task, and the reverse."""
    on = EvaluationSamples(measured.samples, measured.split, measured.seed)
    try:
        with state.progress() as report:
            models = [recording.resolve_run(session, run) for run in runs]
            for model in models:
                session.measure.features(model, on, report)
            before, after = (recording.score_run(session, model, on, measured.how, report) for model in models)
            found = compare_scores(before, after)
    except FeatcalError as error:
        view.problem(error)
        return
    st.caption("Samples that B has right and A has not (fixed), and the other way round (broken):")
    frame = found.to_frame()[["task", "fixed", "broken", "both_right", "both_wrong"]]
    st.dataframe(frame, hide_index=True, width=480, alt="Samples that are right in B alone and in A alone, per task")

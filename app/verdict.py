"""Draw the page that the app opens on: what the measurements of a model say, what to do next, and the charts behind."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import pandas as pd
import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from app import downloads, first_page, ledger_view, options, runs, state, view
from app.compare import Compared
from app.downloads import Numbers
from app.first_page import FirstPage
from app.selection import HOME
from featcal.figures import ledger_tables, tables, text
from featcal.figures.names import plain
from featcal.figures.verdict import sentences
from featcal.figures.verdict.findings import Findings
from featcal.figures.verdict.measure import attribution_options, examine, is_repairable
from featcal.figures.verdict.sentences import Verdict, judge
from featcal.server.lengths import is_long, seconds_to_calibrate, seconds_to_score
from featcal.session.model_ref import ModelRef
from featcal.session.session import Session
from featcal.suite.views import EvaluationSamples
from featcal.system.formatting import duration
from featcal.system.progress import Progress

STEPS = {
    sentences.REPAIR: ("Repair it", "calibrate", ":material/tune:"),
    sentences.OPTIONS: ("Try other options", "calibrate", ":material/tune:"),
    sentences.MERGE: ("Compare other merges", "leaderboard", ":material/leaderboard:"),
    sentences.CHECK: ("Check the experts", "suite", ":material/inventory_2:"),
}
"""What to do next → the button for it, and the page where it is done."""
MOST_BARS = 14
"""Layers of all models that half of the page has room for."""
Charts = tuple[Mapping[str, pd.DataFrame], Mapping[str, pd.DataFrame]]
"""Attribution and layers of every model, as `first_page.figures` draws them."""


def draw(session: Session, compared: Compared, on: EvaluationSamples) -> None:
    """Draw the verdict on model A as its measurements arrive, and the charts of both models."""
    # One place per part, so that a sentence that comes late pushes nothing away that is being read.
    lines, step, below = st.empty(), st.empty(), st.container()
    kept = first_page.read_kept() if _is_home(on) else None
    if kept is not None:
        verdict = kept.verdict
        with lines.container():
            first_page.say(verdict)
        with below:
            _draw_charts(session, compared, on, ({compared.a: kept.booked}, {compared.a: kept.layers}))
    else:
        verdict = _measure(session, compared, on, lines, step, below)
    with step.container(key="next-step"):
        _draw_step(verdict)


def _measure(
    session: Session,
    compared: Compared,
    on: EvaluationSamples,
    lines: DeltaGenerator,
    step: DeltaGenerator,
    below: DeltaGenerator,
) -> Verdict:
    """Draw sentences and charts as soon as their numbers are there; return the whole verdict."""
    shown: Charts | None = None
    verdict, repair = Verdict((), sentences.NOTHING), _choose_repair(session, compared.models[compared.a])
    measured = dict(compared.models)
    with state.progress(step) as report:
        for found in _examine(session, compared, repair, on, report):
            verdict = judge(found)
            measured |= {} if repair is None or found.repaired_final is None else {"repair": repair}
            with lines.container():
                first_page.say(verdict)
            if found.final is not None and shown is None:
                shown = _tables(session, compared, on, report)
                with below:
                    _draw_charts(session, compared, on, shown)
    runs.keep(session, measured, on)
    if shown is not None and _is_home(on):
        first_page.keep(FirstPage(verdict, shown[0][compared.a], shown[1][compared.a]))
    return verdict


def _examine(
    session: Session, compared: Compared, repair: ModelRef | None, on: EvaluationSamples, report: Progress
) -> Iterator[Findings]:
    """Measure model A; whatever takes a job is left out, and the verdict says so."""
    model, unmeasured, unscored = compared.models[compared.a], "", ""
    if repair is not None and repair.config is not None:
        seconds = seconds_to_calibrate(session, repair.config)
        if is_long(session, seconds):
            repair, unmeasured = None, f"it takes about {duration(seconds)}; the page Calibrate does it as a job."
    if session.is_text and is_long(session, seconds := seconds_to_score(session, on)):
        unscored = f"scoring takes about {duration(seconds)}; the page Accuracy does it as a job."
    for found in examine(session, model, on, repair, report, unscored):
        yield replace(found, no_repair=unmeasured if unmeasured and found.whole else found.no_repair)


def _choose_repair(session: Session, model: ModelRef) -> ModelRef | None:
    """Return model A calibrated with the chosen options; None where it cannot be calibrated."""
    return session.resolve(options.chosen_config(session), model) if is_repairable(model) else None


def _tables(session: Session, compared: Compared, on: EvaluationSamples, report: Progress) -> Charts:
    """Measure what both charts show, of both models."""
    ledgers = {
        name: session.measure.drift(model, attribution_options(on), report) for name, model in compared.models.items()
    }
    return (
        {name: ledger_tables.attribution(one, tables.ALL_TASKS) for name, one in ledgers.items()},
        {
            name: tables.layer_rows(tables.drift_table(one), tables.ALL_TASKS, relative=True)
            for name, one in ledgers.items()
        },
    )


def _draw_charts(session: Session, compared: Compared, on: EvaluationSamples, shown: Charts) -> None:
    """Draw who caused the final drift beside what every layer adds and inherits; below each other where both are
    wide."""
    wide = sum(map(len, shown[0].values())) > MOST_BARS
    origin = downloads.sample_origin(session, on, compared.models)
    left, right = (st.container(), st.container()) if wide else st.columns(2)
    first, second = first_page.figures(*shown)
    with left:
        st.header("Which layer caused the final drift?")
        ledger_view.attribution(first, shown[0], tables.ALL_TASKS, origin)
    with right:
        st.header("Own mismatch or inherited?")
        summary = tables.describe_ranges({name: one.set_index("layer")["drift"] for name, one in shown[1].items()})
        view.chart(
            second,
            "drift-layers",
            f"Drift per layer, its own mismatch and what it inherits side by side: {summary}",
            Numbers(
                "drift per layer", tables.stack_models(shown[1]), ledger_view.DRIFT_UNITS[True], origin, kind="drift"
            ),
            text.DRIFT,
        )


def _draw_step(verdict: Verdict) -> None:
    """Draw the last lines of a verdict, with one button for what is to be done."""
    texts = {one.about: plain(one.text) for one in verdict.sentences}
    label, page, icon = STEPS.get(verdict.next, ("", "", ""))
    if not label:
        st.success(texts["next"], icon=":material/check_circle:")
    else:
        with st.container(horizontal=True, vertical_alignment="center"):
            # Not a callback: `switch_page` works in the run of a page alone.
            pressed = st.button(label, type="primary", icon=icon, key="next-step-button")
            st.markdown(texts["next"])
        if pressed:
            st.switch_page(f"../pages/{page}.py")
    st.caption(texts["samples"])


def _is_home(on: EvaluationSamples) -> bool:
    """Say whether this session looks at what the first page of a start shows."""
    chosen = state.selection()
    same = (chosen.suite, chosen.a, chosen.b) == (HOME.suite, HOME.a, HOME.b)
    return same and on == EvaluationSamples(HOME.n) and not chosen.options()

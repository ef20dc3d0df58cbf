"""Draw the first page: the verdict on a merge, each line with a link to its evidence, the next step, and the charts
below."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from app import cockpit, downloads, first_page, headline, jobs, ledger_view, options, runs, state, view
from app.compare import Compared
from app.downloads import Numbers
from app.first_page import FirstPage
from app.selection import HOME
from featcal.figures import charts, ledger_tables, tables
from featcal.figures.names import join_percent, plain
from featcal.figures.verdict import sentences
from featcal.figures.verdict.findings import Findings
from featcal.figures.verdict.measure import attribution_options, examine, is_repairable
from featcal.figures.verdict.sentences import Sentence, Verdict, judge_numbers
from featcal.server.lengths import is_long, seconds_to_calibrate, seconds_to_score
from featcal.session.model_ref import ModelRef
from featcal.session.session import Session
from featcal.suite.source import WRITTEN
from featcal.suite.views import DriftOptions, EvaluationSamples
from featcal.system.formatting import duration
from featcal.system.progress import Progress

METHODS = "Sweep and methods"
STEPS = {
    sentences.REPAIR: ("Repair it", "calibrate", ":material/tune:"),
    sentences.OPTIONS: ("Try other options", "calibrate", ":material/tune:"),
    sentences.MERGE: ("Compare other merges", "calibrate", ":material/leaderboard:"),
    sentences.CHECK: ("Check the experts", "models", ":material/inventory_2:"),
}
"""Next step → its button, and its page."""
MOST_BARS = 14
"""Number of layers above which the page is too narrow for two charts side by side."""


@dataclass(frozen=True)
class Evidence:
    """The chart behind a line: its page, and the selection on it."""

    label: str
    page: str
    chosen: dict[str, Any] = field(default_factory=dict)


def find_evidence(one: Sentence) -> Evidence | None:
    """Return the place of a line's chart; None if no page shows more than the line."""
    numbers = one.numbers
    if one.about == "worst" and "task" in numbers:
        chosen = {"over": "one task", "task": numbers["task"], "layer": None}
        return Evidence(f"see {numbers['task']}", "drift", chosen)
    if one.about == "cause":
        chosen = {"over": None, "layer": numbers["layer"]}
        return Evidence(f"see {numbers['layer']}", "drift", chosen)
    return {
        "kept": Evidence("see tasks", "accuracy") if numbers else None,
        "base": Evidence("see tasks", "accuracy"),
        "experts": Evidence("see experts", "models", {"shelf": None}),
        "drift": Evidence("see layers", "drift", {"over": None}),
        "repair": Evidence("see repair", "calibrate", {"bench": None}),
        "repaired drift": Evidence("see features", "features"),
    }.get(one.about)


def draw_verdict(session: Session, compared: Compared, on: EvaluationSamples) -> None:
    """Draw the verdict on the merge as its measurements finish, and the charts of both models."""
    # One place per part, so that a sentence that comes late pushes nothing away that is being read.
    lines, step, below = st.empty(), st.empty(), st.container()
    kept = first_page.read_kept() if _is_home(on) else None
    if kept is not None:
        verdict = kept.verdict
        headline.show_kept(kept.cards)
        with below:
            _draw_charts(session, compared, on, kept)
    else:
        verdict = _measure(session, compared, on, lines, step, below)
    with lines.container(key="verdict-lines", gap="xsmall"):
        _say(verdict)
    with step.container(key="next-step"):
        _draw_step(session, compared, on, verdict)


def _say(verdict: Verdict) -> None:
    """Write the lines of a verdict, each with a button that opens its chart."""
    for number, one in enumerate(first_page.shown_sentences(verdict)):
        evidence = find_evidence(one)
        with st.container(horizontal=True, vertical_alignment="center", gap="small"):
            st.markdown(first_page.format_line(one, number == 0), width="stretch")
            # Not a callback: `switch_page` works in the run of a page alone.
            if evidence and st.button(
                plain(evidence.label),
                f"evidence-{one.about}",
                type="tertiary",
                icon=":material/arrow_forward:",
                icon_position="right",
            ):
                state.look_at(**evidence.chosen)
                st.switch_page(f"../pages/{evidence.page}.py")


def _measure(
    session: Session,
    compared: Compared,
    on: EvaluationSamples,
    lines: DeltaGenerator,
    step: DeltaGenerator,
    below: DeltaGenerator,
) -> Verdict:
    """Draw sentences and charts as soon as their numbers exist; return the whole verdict."""
    verdict, repair = Verdict((), sentences.NOTHING), _choose_repair(session, compared.models[compared.merge])
    measured, early = dict(compared.models), below.empty()
    with state.progress(step) as report:
        ledger_view.show_weights_first(session, compared, attribution_options(on), report, early)
        for found in _examine(session, compared, repair, on, report):
            verdict = judge_numbers(found)
            measured |= {} if repair is None or found.repaired_final is None else {"repair": repair}
            with lines.container(gap="xsmall"):
                first_page.write_verdict_lines(verdict)
            if not found.layers:  # after the scores; the next findings need the attribution, which takes longest
                ledger_view.measure_attribution(session, compared, attribution_options(on), report, early)
        kept = _tables(session, compared, on, verdict, report)
    with below:
        _draw_charts(session, compared, on, kept)
    runs.keep_calibrated(session, measured, on)
    if _is_home(on):
        first_page.keep_first_page(replace(kept, cards=headline.shown_cards()))
    return verdict


def _examine(
    session: Session, compared: Compared, repair: ModelRef | None, on: EvaluationSamples, report: Progress
) -> Iterator[Findings]:
    """Measure the merge; parts that need a job are left out, and the verdict says so."""
    model, unmeasured, unscored = compared.models[compared.merge], "", ""
    if repair is not None and repair.config is not None:
        seconds = seconds_to_calibrate(session, repair.config)
        if not jobs.is_quick_or_done(session, repair):
            repair, unmeasured = None, f"it takes about {duration(seconds)}; the page Calibrate does it as a job."
        elif is_long(session, seconds):
            jobs.ensure_calibrated(session, repair, report)  # the result of its job
    suite = session.family.suite
    if suite.has_written(on.split or suite.measured_split):
        unscored = f"{WRITTEN}."
    elif session.is_text and is_long(session, seconds := seconds_to_score(session, on)):
        unscored = f"scoring takes about {duration(seconds)}; the page Accuracy does it as a job."
    for found in examine(session, model, on, repair, report, unscored):
        yield replace(found, no_repair=unmeasured if unmeasured and found.whole else found.no_repair)


def _choose_repair(session: Session, model: ModelRef) -> ModelRef | None:
    """Return the merge calibrated with the chosen options; None if it cannot be calibrated."""
    return session.resolve(options.chosen_config(session), model) if is_repairable(model) else None


def _tables(
    session: Session, compared: Compared, on: EvaluationSamples, verdict: Verdict, report: Progress
) -> FirstPage:
    """Return the tables of both charts: the attribution of the merge's drift, and the layers of both models."""
    merge = session.measure.drift(compared.models[compared.merge], attribution_options(on), report)
    ledgers = {compared.merge: merge}
    for name, model in compared.models.items():
        ledgers.setdefault(name, session.measure.drift(model, DriftOptions(on.samples, on.split, on.seed), report))
    layers = {
        name: tables.layer_rows(tables.drift_table(one), tables.ALL_TASKS, relative=True)
        for name, one in ledgers.items()
    }
    booked = ledger_tables.attribution_table(merge, tables.ALL_TASKS)
    return FirstPage((), verdict, booked, layers)


def _draw_charts(session: Session, compared: Compared, on: EvaluationSamples, kept: FirstPage) -> None:
    """Draw the causes of the final drift beside the drift that every layer adds and inherits; one above the other if
    both are wide."""
    wide = len(kept.booked) > MOST_BARS
    merge = {compared.merge: compared.models[compared.merge]}
    left, right = (st.container(), st.container()) if wide else st.columns(2)
    first, second = first_page.figures(kept)
    with left:
        st.header("Which layer caused the final drift?")
        origin = downloads.sample_origin(session, on, merge)
        ledger_view.show_attribution(first, {compared.merge: kept.booked}, tables.ALL_TASKS, origin)
    with right:
        st.header("Own mismatch or inherited?")
        drifts = {name: one.set_index("layer")["drift"] for name, one in kept.layers.items()}
        summary = tables.describe_ranges(drifts)
        origin = downloads.sample_origin(session, on, compared.models)
        view.chart(
            second,
            "drift-layers",
            f"Drift per layer, its own mismatch and what it inherits side by side: {summary}",
            Numbers(
                "drift per layer", tables.stack_models(kept.layers), ledger_view.DRIFT_UNITS[True], origin, kind="drift"
            ),
            charts.DRIFT,
        )


def _draw_step(session: Session, compared: Compared, on: EvaluationSamples, verdict: Verdict) -> None:
    """Draw the last lines of a verdict, with one button for the next step and the known results of recipes."""
    texts = {one.about: join_percent(plain(one.text)) for one in verdict.sentences}
    label, page, icon = STEPS.get(verdict.next, ("", "", ""))
    if not label:
        st.success(texts["next"], icon=":material/check_circle:")
    else:
        merge = compared.models[compared.merge]
        given = cockpit.known_recipes(session, merge, on) if is_repairable(merge) else {}
        known = (
            f" Known of this merge: {', '.join(f'{name} {score}' for name, score in given.items())}." if given else ""
        )
        with st.container(horizontal=True, vertical_alignment="center"):
            # Not a callback: `switch_page` works in the run of a page alone.
            pressed = st.button(label, type="primary", icon=icon, key="next-step-button")
            st.markdown(texts["next"] + known)
        if pressed:
            state.look_at(bench=METHODS if verdict.next == sentences.MERGE else None)
            st.switch_page(f"../pages/{page}.py")
    st.caption(texts["samples"])


def _is_home(on: EvaluationSamples) -> bool:
    """Say whether this session shows the same as the app's first page."""
    chosen = state.selection()
    same = (chosen.suite, chosen.merge, chosen.beside) == (HOME.suite, HOME.merge, HOME.beside)
    return same and on == EvaluationSamples(HOME.n) and not chosen.options()

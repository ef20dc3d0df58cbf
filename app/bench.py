"""Draw both tabs of the Calibrate page: sliders with their results, and sweeps and methods as points of one plot."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from app import (
    afterwards,
    cockpit,
    compare,
    downloads,
    export,
    good_options,
    jobs,
    leaderboard,
    options,
    repair,
    runs,
    state,
    sweep,
    undo,
    view,
)
from app.compare import Compared
from app.downloads import Numbers
from app.repair import Previewed
from featcal.drift.ledger import Features
from featcal.evaluation.evaluate import Scores
from featcal.figures import charts, tables
from featcal.figures.names import plain
from featcal.session.model_ref import EVERY_EXPERT, ModelRef
from featcal.session.session import Session
from featcal.studies import library
from featcal.suite.views import EvaluationSamples

SLIDERS, METHODS = "Sliders", "Sweep and methods"
TABS = (SLIDERS, METHODS)


def draw_methods(session: Session, compared: Compared, on: EvaluationSamples) -> None:
    """Draw every run and every method as points of one plot, and the tables of methods below it."""
    # A repair that takes a job is not made by looking here: it is left to the sliders, or to the sweep.
    quick = {
        name: one for name, one in compared.models.items() if not one.config or jobs.is_quick_or_done(session, one)
    }
    compare.make_models(session, Compared(quick))
    with state.progress() as report:
        for model in quick.values():
            session.measure.features(model, on, report)
    runs.record_runs(session, quick, on)
    studies = leaderboard.find_studies()
    table = next((study for study in studies if study.kind == library.TABLE), None)
    sweep.show_sweep(session, on, quick, table)
    st.header("Methods: accuracy and cost")
    leaderboard.show_leaderboard(studies)


def draw_sliders(session: Session, compared: Compared, on: EvaluationSamples) -> None:
    """Draw controls beside both charts in one window, and rarely used parts below."""
    window = st.container(key="cockpit")
    controls, drift_place, score_place = window.columns([4, 5, 5])
    with controls:
        more = options.controls_on_page(session)
    row = window.container(horizontal=True, vertical_alignment="center", key="result")
    trail = row.container(horizontal=True, vertical_alignment="center", key="trail", width="stretch")
    written = window.container()
    undo.buttons(trail, session)
    trail.button("Defaults", on_click=options.reset, icon=":material/restart_alt:", type="tertiary")
    drift_place.header("Drift per layer")
    words = window.container(key="block-preview")
    previewed = repair.preview(session, on, drift_place, words)
    compare.make_models(session, compared)
    (a, before_model), (b, model) = compared.models.items()
    with state.progress() as report:
        features = {a: session.measure.features(before_model, on, report)}
        features[b] = session.measure.features(model, on, report)
    repair.confirm(previewed, session, model, words)
    scores, missing = state.answer_scores(session, {**compared.models, compare.SHOWN_EXPERT: EVERY_EXPERT}, on)
    runs.keep_calibrated(session, compared.models, on)
    measured_on = on, state.page_score_kind(session, on) if scores else "cosine", state.opened_files()[1]
    undo.chips(trail, session, model, measured_on, cockpit.score_of(features[b], scores.get(b)))
    more.markdown(f"**Why these defaults**  \n{options.defaults_explained(session, model.require_calibration()[0])}")
    good = row.popover(good_options.LABEL, icon=":material/auto_awesome:")
    export.button(session, model, row, written)
    _draw_drift(drift_place, session, compared, on, previewed, features)
    with score_place:
        _draw_scores(session, compared, on, scores, missing)
    if given := cockpit.known_recipes(session, before_model, on):
        st.caption(f"At their defaults: {', '.join(f'{name} {score}' for name, score in given.items())}.")
    _say_origin(session, compared, features, scores, on)
    export.show_export(session, model)
    undo.listen()
    with good:
        good_options.show_good_options(session, model)
    _draw_tabs(session, compared, features, on, previewed)


def _draw_drift(
    place: DeltaGenerator,
    session: Session,
    compared: Compared,
    on: EvaluationSamples,
    previewed: Previewed,
    features: Mapping[str, Features],
) -> None:
    drifts = {name: tables.relative_drift_table(one) for name, one in features.items()}
    frame, units = tables.layer_columns(drifts), "norm / norm of the expert's"
    origin = downloads.sample_origin(session, on, compared.models)
    numbers = Numbers("drift before and after", frame, units, origin, kind="drift")
    model = [*compared.models.values()][1]
    cockpit.drift_chart(previewed.chart or place, on, model, drifts, numbers)
    with place:
        view.tools(numbers, f"{charts.CALIBRATE}\n*The preview of the first block.*\n{charts.PREVIEW}")


def _draw_scores(
    session: Session, compared: Compared, on: EvaluationSamples, scores: Mapping[str, Scores], missing: str
) -> None:
    """Draw scores by task, or the reason why there are none."""
    if not scores:
        st.header("Scores per task")
        st.info(f"No scores here: {plain(missing)}", icon=":material/info:")
        return
    metric, kind = tables.metric_name(scores), state.kind_of_chart(session, on, "decisions")
    st.header(f"{metric.capitalize()} per task")
    frame = tables.score_table(scores, compared.pair)
    ranges = tables.describe_ranges({name: frame.set_index("task")[name] for name in scores}, 1)
    # `featcal drift --output` gives the experts' scores by itself, `featcal evaluate` when they are named.
    experts: dict[str, ModelRef] = {compare.SHOWN_EXPERT: EVERY_EXPERT} if kind == "scores" else {}
    models = {**compared.models, **experts}
    view.chart(
        charts.score_dots(frame, list(scores), f"{metric}, %", compared.pair).update_layout(height=cockpit.HEIGHT),
        "quick",
        f"{metric.capitalize()} per task before and after: {ranges}",
        numbers=Numbers(
            "scores before and after",
            frame,
            f"{metric} in %; difference in points",
            downloads.sample_origin(session, on, models),
            1,
            kind,
        ),
    )


def _say_origin(
    session: Session,
    compared: Compared,
    features: Mapping[str, Features],
    scores: Mapping[str, Scores],
    on: EvaluationSamples,
) -> None:
    """Draw a caption with the samples of the measurement, and remarks on them."""
    (before, after), model = features.values(), [*compared.models.values()][1]
    config, _ = model.require_calibration()
    record, samples = session.fit.calibrate(model).record, tables.describe_samples(before)
    st.caption(
        f"Measured on {samples}, which calibration does not see. Choose options here, not on the test set. "
        f"Calibrated in {record['seconds']['total']:.2f} s."
        if session.split == "validation"
        else f"This suite has no validation split: measured on {samples}, so it flatters. "
        f"Calibrated in {record['seconds']['total']:.2f} s."
    )
    fewer = {task: one["samples"] for task, one in record["tasks"].items() if one["samples"] < config.samples}
    if fewer:
        counts = ", ".join(f"{plain(task)} {count}" for task, count in fewer.items())
        st.caption(f"Fewer calibration samples than the {config.samples} requested: {counts}.")
    if worse := tables.raised_tasks(before, after):
        st.warning(
            f"These options raise the final drift of {', '.join(map(plain, worse))}. Try another λ or ρ, or more "
            "samples.",
            icon=":material/trending_up:",
        )
    if scores and session.is_text and state.page_score_kind(session, on) == "features":
        st.caption(
            "First-token accuracy: how often the first token of the answer is right, read off the final features, "
            "since whole answers of this suite take long. It can be right where the answer is wrong: the Accuracy page "
            "scores whole answers."
        )


def _draw_tabs(
    session: Session,
    compared: Compared,
    features: Mapping[str, Features],
    on: EvaluationSamples,
    previewed: Previewed,
) -> None:
    """Draw the tabs with rarely used parts."""
    model = [*compared.models.values()][1]
    title = "More views: where it helps, the anchor alone, other draws, conditioning"
    # Folded, it costs nothing: what is in it is made when it is opened, by hand or by a link to something in it.
    asked = any(getattr(state.selection(), name) for name in ("booked", "spread", "conditioning"))
    fold = st.expander(title, asked, key="more-views", icon=":material/zoom_in:", on_change="rerun")
    if fold.open:
        with fold:
            names = ["Where does it help?", "The anchor alone", "Draw of samples", "Conditioning"]
            where, anchor, seeds, solves = st.tabs(names, key="more-of-it")
        with where:
            repair.where_it_helps(session, compared, features, on)
        with anchor:
            repair.anchor_only(session, compared, features, on)
        with seeds:
            repair.show_spread(session, model, on)
        with solves:
            repair.show_conditioning(session, model)
    # Nobody waits for this, so the browser asks for it once the exact charts stand.
    afterwards.draw_later(
        "the next preview",
        repr((state.suite_reference(), compared, previewed.layer, on)),
        partial(repair.keep_block_preview, previewed.layer, session, model, on),
    )

"""Draw the tabs of the Drift page: attribution, growth, effect on decisions, feature sources."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import pandas as pd
import plotly.graph_objects as go
import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from app import downloads, picking, samples, slices, state, view
from app.compare import Compared
from app.downloads import Numbers, Origin, download_name
from featcal.drift.ledger import DriftLedger, TaskDrift
from featcal.figures import (
    layer_charts,
    layer_tables,
    ledger_charts,
    ledger_tables,
    sample_charts,
    sample_tables,
    tables,
)
from featcal.figures.names import plain
from featcal.server.lengths import SMALL
from featcal.session.model_ref import ModelRef
from featcal.session.session import Session
from featcal.suite.calibration_options import PAPER
from featcal.suite.views import DriftOptions, EvaluationSamples
from featcal.system.errors import NoScores
from featcal.system.progress import Progress

DRIFT_UNITS = {
    True: "norms / norm of the expert's feature, mean over samples; alignment: cosine",
    False: "norms over the whole token state, mean over samples; alignment: cosine",
}
"""Units of the drift tables, relative or absolute."""
_SHARES = "contribution: norm / norm of the expert's final feature; shares: 1 is the final drift"
_GROWTH = "gamma, eta: norm / norm of the incoming drift; response: cosine; certified_growth: share of samples"
_OUTPUTS = "score_drift, bound: norm of score differences; certified, agreement, accuracy: share of samples"
_WEIGHTS = "changed, expert: norm of the task vector / norm of the base's weights; cosine: of both task vectors"
_SOURCES = "excess, minimum: the objective of Prop. 8, summed over a block's linear maps; relative: excess / minimum"


PATIENCE = 3.0
"""Seconds of measuring after which the tasks that are done are drawn."""
LAYERS = ("blocks", "attention and MLP")
INSIDE, TOKENS = "Inside the block", "Token by token"


@dataclass(frozen=True)
class Subject:
    """The choices on the Drift page that its views draw.

    Args:
        models: by what the page calls them.
        over: a task, or `tables.ALL_TASKS` for the mean.
        task: the chosen one, for what is drawn of single samples.
        calibration: the calibrated model among the models; None if there is none.
    """

    session: Session
    models: Mapping[str, ModelRef]
    on: EvaluationSamples
    over: str
    task: str
    layer: str
    calibration: ModelRef | None


def show_growth(subject: Subject) -> None:
    """Draw where drift grows through the layers."""
    session, on, models = subject.session, subject.on, subject.models
    tokens = "class" if _class_token(session) else "all"
    options = DriftOptions(on.samples, on.split, on.seed, tokens, _sublayers())
    with state.progress() as report:
        ledgers = {name: session.measure.drift(model, options, report) for name, model in models.items()}
    origin = downloads.sample_origin(session, options, models, subject.over)
    _growth(ledgers, subject.over, subject.layer, origin)


def show_decisions(subject: Subject) -> None:
    """Draw the effect of drift on decisions, task by task, and sample by sample of one task."""
    session, on, models, task = subject.session, subject.on, subject.models, subject.task
    options = DriftOptions(on.samples, on.split, on.seed)
    with state.progress() as report:
        ledgers = {name: _judge_drift(session, model, options, report) for name, model in models.items()}
    if any(one.output is None for ledger in ledgers.values() for one in ledger.tasks.values()):
        say_needs_of_scores(session)
        return
    origin = downloads.sample_origin(session, options, models)
    _decisions(session, ledgers, origin)
    _every_sample(session, models, {name: ledger.tasks[task] for name, ledger in ledgers.items()}, task, origin)


def _sublayers() -> bool:
    """Say whether attention and MLP are layers of their own, as chosen above the attribution."""
    return view.one_of(LAYERS, state.selection().parts) == LAYERS[1]


def _judge_drift(session: Session, model: ModelRef, options: DriftOptions, report: Progress) -> DriftLedger:
    """Return a ledger with the effect on scores if the suite has labels and a head, else without."""
    try:
        session.measure.judges(model, options)  # before the walk, which takes longer
        return session.measure.drift(model, replace(options, output=True), report)
    except NoScores:
        return session.measure.drift(model, options, report)


def _class_token(session: Session) -> bool:
    """Draw the choice to measure gamma, eta and r on the class token only, if there is one, and return it."""
    if not session.family.adapter.class_token:
        return False
    chosen = view.choice("Norms over", ["all tokens", "class token"], "tokens") != "all tokens"
    st.caption(
        "γ, η and the response over all tokens of a state, or over the class token alone, the one that the head reads."
    )
    return chosen


def show_weights_first(
    session: Session, compared: Compared, options: DriftOptions, report: Progress, place: DeltaGenerator
) -> None:
    """Draw in `place` the change of the merge's weights, which is there in seconds, if its attribution has yet to be
    measured and models are so large that this takes long."""
    merge = {compared.merge: compared.models[compared.merge]}
    is_quick = session.family.stored_bytes <= SMALL or session.measure.has_drift(merge[compared.merge], options)
    if is_quick or not session.family.is_base_known:
        return
    frames = _weights_tables(session, merge, tables.ALL_TASKS, report)
    with place.container():
        st.header("Which layers did merging change?")
        alt = f"Change of the weights of every layer: {_describe_weights(frames)}"
        view.picture(layer_charts.weights_chart(frames, None), "weights-first", alt, "weights-first")
        st.caption("Weights alone: what it does to features is being measured.")


def measure_attribution(
    session: Session, compared: Compared, options: DriftOptions, report: Progress, place: DeltaGenerator
) -> DriftLedger:
    """Measure the attribution of the merge's drift to the layers, and meanwhile draw in `place`, which is empty again
    afterwards, the tasks that are done, if it takes longer than `PATIENCE`."""
    started, merge = time.perf_counter(), compared.merge
    for found in session.measure.drift_by_task(compared.models[merge], options, report):
        booked = ledger_tables.attribution_table(found, tables.ALL_TASKS)
        unfinished = len(found.tasks) < len(session.tasks)
        if unfinished and time.perf_counter() - started > PATIENCE and booked["share"].notna().any():
            sentence = f"Mean over {len(found.tasks)} of {len(session.tasks)} tasks so far: {', '.join(found.tasks)}."
            with place.container():
                st.header("Which layer caused the final drift?")
                key, alt = f"so-far-{len(found.tasks)}", f"Contribution of every layer to the final drift. {sentence}"
                view.picture(ledger_charts.waterfall({merge: booked}, None), key, alt, "so-far")
                st.caption(plain(sentence))
    place.empty()
    return found


def show_attribution(
    figure: go.Figure,
    booked: Mapping[str, pd.DataFrame],
    over: str,
    origin: Origin,
    chosen: Callable[[str], None] | None = None,
) -> None:
    """Draw the waterfall of the final drift over `over` (a task or the mean), with its table.

    Args:
        booked: model → rows of `ledger_tables.attribution_table`.
        chosen: called with the chart's key when a bar is clicked.
    """
    shares = {name: one.set_index("layer")["share"] for name, one in booked.items()}
    numbers = Numbers("attribution", tables.stack_models(booked), _SHARES, origin, kind="attribution")
    alt = f"Contribution of every layer to the final drift on {over}; shares: {tables.describe_ranges(shares)}"
    view.picture(figure, "attribution", alt, numbers.name, on_select=chosen)
    view.tools(numbers, ledger_charts.ATTRIBUTION)


def _growth(ledgers: Mapping[str, DriftLedger], over: str, layer: str, origin: Origin) -> None:
    grown = {name: ledger_tables.growth_table(ledger, over) for name, ledger in ledgers.items()}
    of_blocks = {name: one.set_index("layer") for name, one in grown.items()}
    left, right = st.columns(2)
    with left:
        stretched = tables.describe_ranges({f"{name}, γ": one["gamma"] for name, one in of_blocks.items()})
        figure, alt = ledger_charts.growth_chart(grown, layer), f"Stretching and new mismatch per block on {over}"
        view.picture(figure, "growth", f"{alt}: {stretched}", download_name("growth", origin))
    with right:
        answered = tables.describe_ranges({name: one["response"] for name, one in of_blocks.items()})
        figure, alt = ledger_charts.response(grown, layer), f"Response of the residual branch per block on {over}"
        view.picture(figure, "response", f"{alt}: {answered}", download_name("response", origin))
    view.tools(Numbers("growth", tables.stack_models(grown), _GROWTH, origin, kind="drift"), ledger_charts.GROWTH)


def _decisions(session: Session, ledgers: Mapping[str, DriftLedger], origin: Origin) -> None:
    frames = {name: ledger_tables.outputs(ledger) for name, ledger in ledgers.items()}
    per_task = {name: frame.set_index("task") for name, frame in frames.items()}
    left, right = st.columns(2)
    with left:
        drifted = tables.describe_ranges({name: one["score_drift"] for name, one in per_task.items()})
        figure, alt = ledger_charts.score_drift(frames), "Score drift and its bound per task"
        view.picture(figure, "outputs", f"{alt}: {drifted}", download_name("score drift", origin))
    with right:
        agreed = tables.describe_ranges({name: 100 * one["agreement"] for name, one in per_task.items()}, 0)
        figure, alt = ledger_charts.decisions_chart(frames), "Decisions that agree with the expert's, %"
        view.picture(figure, "decisions", f"{alt}: {agreed}", download_name("decisions", origin))
    numbers = Numbers("decisions", tables.stack_models(frames), _OUTPUTS, origin, kind="decisions")
    view.tools(numbers, ledger_charts.OUTPUTS_BY_SCORES[session.family.adapter.scores_with])


def _every_sample(
    session: Session, models: Mapping[str, ModelRef], drifts: Mapping[str, TaskDrift], task: str, origin: Origin
) -> None:
    """Draw every sample of a task by the expert's margin and the models' drift; points and rows pick samples."""
    on, data = origin.on, session.viewable_samples(task, origin.on)
    expert = sample_tables.expert_samples(data, next(iter(drifts.values())))
    found = {name: sample_tables.model_samples(data, one) for name, one in drifts.items()}
    rows = sample_tables.sample_table(data, {"expert": expert, **found}, *[*found, ""][:2])
    numbers = Numbers(f"margins {task}", rows, sample_tables.UNITS, origin.with_task(task), kind="margins")
    st.header(f"Every sample of {plain(task)}: margin and drift")
    picking.scatter(
        sample_charts.margins(rows, list(found), picking.make_dots(session, models, task, on)),
        "margins",
        f"Drift of every sample of {task} against the expert's margin: {', '.join(found)}",
        numbers.name,
    )
    slices.draw_slices(session, models, task, on)
    with st.expander("Every sample in a table", icon=":material/table:"):
        samples.show_sample_table(numbers, on.split)


def say_needs_of_scores(session: Session) -> None:
    """Explain what is missing for scores."""
    heads = "a classifier beside every expert" if session.family.adapter.classifier else "a base with a text tower"
    needed = "answers ('target')" if session.is_text else f"labels, class names and {heads}"
    st.info(f"Scores need {needed}.", icon=":material/info:")


def show_sources(subject: Subject) -> None:
    """Show the cost of other feature sources for the calibration, measured on request."""
    session, model = subject.session, subject.calibration
    if model is None:
        st.caption("Feature sources are those of a calibration: compare the merge with its repair.")
        return
    config, _ = model.require_calibration()
    if config.recipe != PAPER:
        st.caption(f"Feature sources compare objectives of the paper's recipe; '{config.recipe}' has others.")
        return
    wanted = state.selection().sources
    state.control(st.toggle, "sources", wanted, False, "Measure what other feature sources would have cost")
    if not wanted:
        return
    with state.progress() as report:
        found = session.fit.sources(model, report)
    frame = ledger_tables.sources_table(found)
    largest = {str(source): part.set_index("layer")["relative"] for source, part in frame.groupby("source")}
    origin = downloads.sample_origin(session, downloads.samples_of_calibration(model), {"calibrated": model})
    view.chart(
        ledger_charts.sources_chart(frame),
        "sources-chart",
        f"Excess per source over the deployed minimum: {tables.describe_ranges(largest, 4)}",
        Numbers("feature sources", frame, _SOURCES, origin, 4, kind="sources"),
        ledger_charts.SOURCES,
    )


def show_weights(subject: Subject) -> None:
    """Draw how far the weights of every layer are from the base's, or say that no base is known."""
    session, models = subject.session, subject.models
    if not session.family.is_base_known:
        st.info("Changes of weights are those from the base, which this suite does not name.", icon=":material/info:")
        return
    with state.progress() as report:
        frames = _weights_tables(session, models, subject.over, report)
    # Of weights alone: a file that named samples would claim what it does not hold.
    origin = replace(downloads.sample_origin(session, subject.on, models, subject.over), counts={})
    view.chart(
        layer_charts.weights_chart(frames, subject.layer),
        "weights",
        f"Change of the weights of every layer on {subject.over}: {_describe_weights(frames)}",
        Numbers("weights per layer", tables.stack_models(frames), _WEIGHTS, origin, 4, kind="weights"),
        layer_charts.WEIGHTS,
    )


def _weights_tables(
    session: Session, models: Mapping[str, ModelRef], over: str, report: Progress
) -> dict[str, pd.DataFrame]:
    """Return the changes of weights of every model by layer (`layer_tables.weights_table`)."""
    report("reading weights", 0, 1)
    found = {name: session.measure.weight_changes(model) for name, model in models.items()}
    report("reading weights", 1, 1)
    return {name: layer_tables.weights_table(one, over) for name, one in found.items()}


def _describe_weights(frames: Mapping[str, pd.DataFrame]) -> str:
    return (
        tables.describe_ranges({name: 100 * one.set_index("layer")["changed"] for name, one in frames.items()}) + " %"
    )


VIEWS = {"Growth": show_growth, "Decisions": show_decisions, "Feature sources": show_sources, "Weights": show_weights}
"""Name of a view on the Drift page → the function that draws it."""

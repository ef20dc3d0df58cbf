"""Show where the merge went wrong: which layers caused the final drift; a click on a layer updates every panel."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import streamlit as st

from app import compare, downloads, layer_view, ledger_view, runs, samples, state, view
from app.downloads import Numbers
from featcal.figures import charts, ledger_charts, ledger_tables, tables
from featcal.figures.names import plain
from featcal.figures.verdict.measure import attribution_options
from featcal.suite.views import DriftOptions

BY_TASK, MORE = "Task by task", "More views"
VIEWS = ledger_view.VIEWS | layer_view.VIEWS


def choose_layer(listed: Sequence[str], key: str) -> None:
    """Select the layer whose bar, or whose part's bar, was clicked."""
    points = st.session_state[key].selection.points
    if points and points[0]["x"] != ledger_charts.TOTAL:
        state.look_at(layer=next(one for one in listed if f"{points[0]['x']} ".startswith(f"{one} ")))


session = view.open_or_explain()
on = view.sample_selector(session)
compared = compare.choose_in_sidebar(session)
row = st.container(horizontal=True, vertical_alignment="bottom")
averaged = view.choice("Tasks", ["mean over tasks", "one task"], "over", row) == "mean over tasks"
# Drawn though it has no effect, so that nothing jumps when the mean is taken.
task = view.task_selector(session, row, disabled=averaged)
over = tables.ALL_TASKS if averaged else task
relative = view.choice("Units", ["relative", "absolute"], "units", row) == "relative"

sublayers = view.choice("Layers", ledger_view.LAYERS, "parts", row) == ledger_view.LAYERS[1]

models, attributes = compared.models, replace(attribution_options(on), sublayers=sublayers)
with state.progress() as report:
    early = st.empty()
    ledger_view.show_weights_first(session, compared, attributes, report, early)
    # First: the drift of whole blocks without attribution is a part of it.
    booked = ledger_view.measure_attribution(session, compared, attributes, report, early)
    ledgers = {shown: session.measure.drift(model, DriftOptions(on.samples), report) for shown, model in models.items()}
runs.keep_calibrated(session, models, on)
drift = {shown: tables.drift_table(ledger) for shown, ledger in ledgers.items()}
attributed = ledger_tables.attribution_table(booked, over)
layers = list(dict.fromkeys(drift[compared.merge]["layer"]))
# By default the one that the verdict blames. A layer of another suite may still be chosen.
shares = attributed.dropna(subset="share").set_index("layer")["share"]
largest = str(shares.idxmax()) if len(shares) else layers[-2]
blamed = next(i for i, one in enumerate(layers) if f"{largest} ".startswith(f"{one} "))
layer = view.one_of(layers, state.selection().layer, blamed)
state.control(partial(row.selectbox, width=210), "layer", layer, None, "Layer (or click a bar)", layers)

frames = {shown: tables.layer_rows(one, over, relative) for shown, one in drift.items()}
measured = downloads.sample_origin(session, on, models)
units = ledger_view.DRIFT_UNITS[relative]
rows = tables.stack_models(frames)
per_layer = Numbers("drift per layer", rows, units, measured if averaged else measured.with_task(task), kind="drift")
wide = len(layers) > ledger_charts.MANY
left, right = (st.container(), st.container()) if wide else st.columns(2)
with left:
    st.header("Which layer caused the final drift?")
    origin = downloads.sample_origin(session, attributes, {compared.merge: models[compared.merge]}, over)
    figure = ledger_charts.waterfall({compared.merge: attributed}, layer)
    ledger_view.show_attribution(figure, {compared.merge: attributed}, over, origin, partial(choose_layer, layers))
with right:
    st.header("Drift per layer")
    summary = tables.describe_ranges({shown: one.set_index("layer")["drift"] for shown, one in frames.items()})
    alt = f"Drift per layer on {over} as a line, local mismatch and propagation as bars side by side: {summary}"
    figure = charts.drift_layers(frames, relative, layer)
    view.picture(figure, "drift-layers", alt, per_layer.name, on_select=partial(choose_layer, layers))
    view.tools(per_layer, charts.DRIFT)
st.caption(f"Mean over {tables.describe_samples(booked)}. e = m + p holds for the vectors; norms do not add up.")

# Of what a tab measures alone, nothing is measured before the tab is opened.
chosen = state.selection().tab
shown_tab, places = view.tabs(
    (BY_TASK, ledger_view.INSIDE, ledger_view.TOKENS, MORE), "tab", MORE if chosen in VIEWS else None
)
with places[shown_tab]:
    if shown_tab == BY_TASK:
        st.caption(f"{plain(layer)}, task by task, the largest drift on top")
        of_tasks = {shown: tables.task_table(one, layer, relative) for shown, one in drift.items()}
        summary = tables.describe_ranges({shown: one.set_index("task")["drift"] for shown, one in of_tasks.items()})
        view.chart(
            charts.drift_tasks(of_tasks, relative),
            "drift-tasks",
            f"Drift of every task at {layer}: {summary}",
            Numbers(f"drift per task at {layer}", tables.stack_models(of_tasks), units, measured, kind="drift"),
            charts.DRIFT_TASKS,
        )
    elif shown_tab == ledger_view.INSIDE:
        layer_view.block_maps(session, models, on, over, layer, relative)
    elif shown_tab == ledger_view.TOKENS:
        layer_view.show_tokens(session, models, on, task, layer, relative)
    else:
        more = view.one_of(tuple(VIEWS), chosen)
        state.control(st.segmented_control, "tab", more, None, "View", tuple(VIEWS), required=True)
        VIEWS[more](ledger_view.Subject(session, models, on, over, task, layer, compared.calibration))
samples.panel(session, models)

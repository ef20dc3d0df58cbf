"""Show where the merged model went wrong: the drift ledger, layer by layer; a click on a layer moves every panel."""

import streamlit as st

from app import compare, downloads, layer_view, ledger_view, runs, samples, state, view
from app.downloads import Numbers
from featcal.figures import charts, tables, text
from featcal.figures.names import plain
from featcal.suite.views import DriftOptions


def choose_layer() -> None:
    """Select the layer whose bar was clicked."""
    points = st.session_state["drift-layers"].selection.points
    if points:
        state.select(layer=points[0]["x"])


def choose_tab() -> None:
    """Select the tab that was opened."""
    state.select(tab=st.session_state["drift-tabs"])


st.title("Where did the merged model go wrong?")
session = view.open_or_explain()
averaged = view.choice("Tasks", ["mean over tasks", "one task"], "over", st.sidebar) == "mean over tasks"
# Drawn though it has no effect, so that nothing in the sidebar jumps when the mean is taken.
task = view.task_selector(session, disabled=averaged)
over = tables.ALL_TASKS if averaged else task
on = view.sample_selector(session)
compared = compare.choose_in_sidebar(session)

row = st.container(horizontal=True, vertical_alignment="bottom")
relative = view.choice("Units", ["relative", "absolute"], "units", row) == "relative"
only = view.choice("Model", ["both", *map(str, compared.models)], "model", row) if compared.b else "both"
models = {shown: model for shown, model in compared.models.items() if only in ("both", shown)}

with state.progress() as report:
    ledgers = {shown: session.measure.drift(model, DriftOptions(on.samples), report) for shown, model in models.items()}
runs.keep(session, models, on)
drift = {shown: tables.drift_table(ledger) for shown, ledger in ledgers.items()}
first = next(iter(models))
layers = list(dict.fromkeys(drift[first]["layer"]))
# The last block by default: behind it there is the head alone. A layer of another suite may still be chosen.
layer = view.one_of(layers, state.selection().layer, -2)
state.control(row.selectbox, "layer", layer, None, "Layer (or click a bar)", layers)

frames = {shown: tables.layer_rows(one, over, relative) for shown, one in drift.items()}
measured = downloads.sample_origin(session, on, models)
units = ledger_view.DRIFT_UNITS[relative]
rows = tables.stack_models(frames)
per_layer = Numbers("drift per layer", rows, units, measured if averaged else measured.with_task(task), kind="drift")
summary = tables.describe_ranges({shown: one.set_index("layer")["drift"] for shown, one in frames.items()})
st.plotly_chart(
    charts.drift_layers(frames, relative, layer),
    key="drift-layers",
    # A callback runs before the page is drawn again, so every panel has the new layer at once.
    on_select=choose_layer,
    selection_mode="points",
    config=view.plotly(per_layer.name),
    alt=f"Drift per layer on {over} as a line, local mismatch and propagation as bars side by side: {summary}",
)
st.caption(
    f"Mean over {tables.describe_samples(ledgers[first])}. "
    "e = m + p holds for the vectors; norms do not add: ‖e‖ ≤ ‖m‖ + ‖p‖."
)
view.tools(per_layer, text.DRIFT)

tab = view.one_of(ledger_view.TABS, state.selection().tab, 0)
tabs = st.tabs(ledger_view.TABS, default=tab, key="drift-tabs", on_change=choose_tab)
by_task, cause, growth, decisions, depth, inside, tokens, sources = tabs
with by_task:
    st.caption(f"{plain(layer)}, task by task")
    of_tasks = {shown: tables.task_rows(one, layer, relative) for shown, one in drift.items()}
    summary = tables.describe_ranges({shown: one.set_index("task")["drift"] for shown, one in of_tasks.items()})
    rows = tables.stack_models(of_tasks)
    view.chart(
        charts.drift_tasks(of_tasks, relative),
        "drift-tasks",
        f"Drift of every task at {layer}: {summary}",
        Numbers(f"drift per task at {layer}", rows, units, measured, kind="drift"),
        text.DRIFT_TASKS,
    )
with cause:
    ledger_view.cause(session, models, on, over, layer)
with growth:
    ledger_view.growth(session, models, on, over, layer)
with decisions:
    ledger_view.decisions(session, models, on, task)
# Of what a tab measures alone, nothing is measured before the tab is opened.
with depth:
    if tab == ledger_view.DEPTH:
        layer_view.depth(session, models, on, over, task, layer)
with inside:
    if tab == ledger_view.INSIDE:
        layer_view.block_maps(session, models, on, over, layer, relative)
with tokens:
    if tab == ledger_view.TOKENS:
        layer_view.tokens(session, models, on, task, layer, relative)
with sources:
    if compared.calibration:
        ledger_view.sources(session, compared.calibration)
    else:
        st.caption("Feature sources are those of a calibration: choose a calibrated model B.")
samples.panel(session, compared.models)

"""Where the merged model went wrong: the drift ledger, layer by layer; a click on a layer moves every panel."""

import streamlit as st

from app import downloads, ledger_view, options, runs, state, view
from app.downloads import Numbers
from featcal.figures import charts, tables, text
from featcal.figures.names import plain
from featcal.views import DriftOptions

SHOWN = {"both": ("merged", "calibrated"), "merged": ("merged",), "calibrated": ("calibrated",)}


def choose_layer() -> None:
    """A click on a bar selects its layer."""
    points = st.session_state["drift-layers"].selection.points
    if points:
        state.select(layer=points[0]["x"])


st.header("Where did the merged model go wrong?")
session = view.open_or_explain()
averaged = view.choice("Tasks", ["mean over tasks", "one task"], "over", st.sidebar) == "mean over tasks"
task = view.task_selector(session, disabled=averaged)
over = tables.ALL_TASKS if averaged else task
on = view.sample_selector(session)
config = options.in_sidebar(session)

row = st.container(horizontal=True, vertical_alignment="bottom")
relative = view.choice("Units", ["relative", "absolute"], "units", row) == "relative"
shown = SHOWN[view.choice("Model", list(SHOWN), "model", row)] if config else ("merged",)
models = {name: config if name == "calibrated" and config else "merged" for name in shown}

with state.progress() as report:
    ledgers = {name: session.ledger(model, DriftOptions(on.samples), report) for name, model in models.items()}
runs.keep(session, config, on)
drift = {name: tables.drift_table(ledger) for name, ledger in ledgers.items()}
layers = list(dict.fromkeys(drift[shown[0]]["layer"]))
layer = view.one_of(layers, state.selection().layer, -2)
state.control(row.selectbox, "layer", layer, layers[-2], "Layer (or click a bar)", layers)

frames = {name: tables.per_layer(one, over, relative) for name, one in drift.items()}
measured = downloads.of_samples(session, on, config if "calibrated" in shown else None)
units = ledger_view.DRIFT_UNITS[relative]
rows = tables.stacked([one.assign(model=name) for name, one in frames.items()])
per_layer = Numbers("drift per layer", rows, units, measured if averaged else measured.of_task(task))
said = tables.spoken({name: one.set_index("layer")["drift"] for name, one in frames.items()})
st.plotly_chart(
    charts.drift_layers(frames, relative, layer),
    key="drift-layers",
    on_select=choose_layer,
    selection_mode="points",
    config=view.plotly(per_layer.name),
    alt=f"Drift per layer on {over}, local mismatch and propagation stacked, drift as a line: {said}",
)
st.caption(
    f"Mean over {tables.measured_on(ledgers[shown[0]])}. "
    "e = m + p holds for the vectors; norms do not add: ‖e‖ ≤ ‖m‖ + ‖p‖."
)
view.explain(text.DRIFT)
view.fold(per_layer)

st.subheader(f"{plain(layer)}, task by task")
of_tasks = {name: tables.per_task(one, layer, relative) for name, one in drift.items()}
said = tables.spoken({name: one.set_index("task")["drift"] for name, one in of_tasks.items()})
rows = tables.stacked([one.assign(model=name) for name, one in of_tasks.items()])
view.chart(
    charts.drift_tasks(of_tasks, relative),
    "drift-tasks",
    f"Drift of every task at {layer}: {said}",
    Numbers(f"drift per task at {layer}", rows, units, measured),
    text.DRIFT_TASKS,
)

ledger_view.sections(session, models, on, over, task, layer)
if config:
    ledger_view.sources(session, config)

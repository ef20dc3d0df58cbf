"""Where the merged model went wrong: the drift ledger, layer by layer; a click on a layer moves every panel."""

import streamlit as st

from app import charts, downloads, ledger_view, options, state, tables, text, view
from app.downloads import Numbers
from app.names import plain

SHOWN = {"both": ("merged", "calibrated"), "merged": ("merged",), "calibrated": ("calibrated",)}


def choose_layer() -> None:
    """A click on a bar selects its layer."""
    points = st.session_state["drift-layers"].selection.points
    if points:
        st.session_state["layer"] = points[0]["x"]


st.header("Where did the merged model go wrong?")
ws = view.open_or_explain()
averaged = view.choice("Tasks", ["mean over tasks", "one task"], "over", st.sidebar) == "mean over tasks"
task = view.task_selector(ws, disabled=averaged)
over = tables.ALL_TASKS if averaged else task
n = view.sample_selector(ws)
config = options.in_sidebar(ws)

columns = [st.container(horizontal=True, vertical_alignment="bottom")] * 3
relative = view.choice("Units", ["relative", "absolute"], "units", columns[0]) == "relative"
shown = SHOWN[view.choice("Model", list(SHOWN), "model", columns[1])] if config else ("merged",)
models = {name: config if name == "calibrated" and config else "merged" for name in shown}

with state.progress() as report:
    drift = {name: tables.drift_table(ws.drift(model, n, report)) for name, model in models.items()}
layers = list(dict.fromkeys(drift[shown[0]]["layer"]))
layer = columns[2].selectbox("Layer (or click a bar)", layers, index=len(layers) - 2, key="layer", bind="query-params")

frames = {name: tables.per_layer(one, over, relative) for name, one in drift.items()}
measured = downloads.of_samples(ws, n, config if "calibrated" in shown else None)
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
    f"Mean over {n} {ws.split} samples per task. e = m + p holds for the vectors; norms do not add: ‖e‖ ≤ ‖m‖ + ‖p‖."
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
    text.DRIFT_TASKS,
    Numbers(f"drift per task at {layer}", rows, units, measured),
)

ledger_view.sections(ws, models, n, over, task, layer)
if config:
    ledger_view.sources(ws, config)

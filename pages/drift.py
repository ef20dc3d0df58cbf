"""Where the merged model went wrong: the drift ledger, layer by layer; a click on a layer moves every panel."""

import streamlit as st

from app import charts, ledger_view, options, state, tables, text, view

SHOWN = {"both": ("merged", "calibrated"), "merged": ("merged",), "calibrated": ("calibrated",)}


def choose_layer() -> None:
    """A click on a bar selects its layer."""
    points = st.session_state["drift-layers"].selection.points
    if points:
        state.select(layer=points[0]["x"])


st.header("Where did the merged model go wrong?")
ws = view.open_or_explain()
averaged = view.choice("Tasks", ["mean over tasks", "one task"], "over", st.sidebar) == "mean over tasks"
task = view.task_selector(ws, disabled=averaged)
over = tables.ALL_TASKS if averaged else task
n = view.sample_selector(ws)
config = options.in_sidebar(ws)

columns = st.columns(3, vertical_alignment="bottom")
relative = view.choice("Units", ["relative", "absolute"], "units", columns[0]) == "relative"
shown = SHOWN[view.choice("Model", list(SHOWN), "model", columns[1])] if config else ("merged",)
models = {name: config if name == "calibrated" and config else "merged" for name in shown}

with state.progress() as report:
    ledgers = {name: ws.drift(model, n, report) for name, model in models.items()}
drift = {name: tables.drift_table(ledger) for name, ledger in ledgers.items()}
layers = list(dict.fromkeys(drift[shown[0]]["layer"]))
layer = view.one_of(layers, state.selection().layer, -2)
state.control(columns[2].selectbox, "layer", layer, layers[-2], "Layer (or click a bar)", layers)

frames = {name: tables.per_layer(one, over, relative) for name, one in drift.items()}
st.plotly_chart(
    charts.drift_layers(frames, relative, layer),
    key="drift-layers",
    on_select=choose_layer,
    selection_mode="points",
    config=view.PLOTLY,
    alt=f"Drift per layer on {over}: local mismatch and propagation stacked, drift as a line",
)
st.caption(
    f"Mean over {tables.measured_on(ledgers[shown[0]])}. "
    "e = m + p holds for the vectors; norms do not add: ‖e‖ ≤ ‖m‖ + ‖p‖."
)
view.explain(text.DRIFT)

st.subheader(f"{layer}, task by task")
view.chart(
    charts.drift_tasks({name: tables.per_task(one, layer, relative) for name, one in drift.items()}, relative),
    "drift-tasks",
    f"Drift of every task at {layer}",
    text.DRIFT_TASKS,
)
with st.expander("Table", icon=":material/table:"):
    numbers = [one.assign(model=name) for name, one in frames.items()]
    view.table(tables.stacked(numbers), f"drift-{ws.family.suite.name}.csv")

ledger_view.sections(ws, models, n, over, task, layer)
if config:
    ledger_view.sources(ws, config)

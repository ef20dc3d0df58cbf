"""How close features and weights come to the experts': the four panels of the paper's Fig. 2."""

import pandas as pd
import streamlit as st

from app import charts, options, state, tables, text, view

st.header("How close to the experts?")
ws = view.open_or_explain()
task = view.task_selector(ws)
n = view.sample_selector(ws)
config = options.in_sidebar(ws)
if config is None:
    options.offer(ws, "These panels compare the merged model with a calibrated one, and there is none yet.")
    st.stop()

with state.progress() as report:
    found = {"merged": ws.features("merged", n, report), "calibrated": ws.features(config, n, report)}
features = pd.DataFrame({name: tables.mean_cosines(one) for name, one in found.items()})
vectors = pd.DataFrame({"merged": ws.vector_cosines("merged"), "calibrated": ws.vector_cosines(config)})
features, vectors = (frame.rename_axis("task").reset_index() for frame in (features, vectors))
scores, missing = state.quick_scores(ws, {"merged": "merged", "calibrated": config}, n)

left, right = st.columns(2)
with left:
    st.subheader("a. Feature cosine, per task")
    view.chart(
        charts.score_bars(features, list(found), "mean cosine to the expert"), "a", "Mean feature cosine per task"
    )
    st.subheader("c. Cosine gain and score gain")
    if scores:
        metric = tables.metric_name(scores)
        gained = tables.gain_table(features, tables.score_table(scores))
        view.chart(charts.gains(gained, metric), "c", f"Gain in cosine against gain in {metric}, per task")
    else:
        st.info(f"No scores here: {missing}", icon=":material/info:")
with right:
    st.subheader(f"b. Per sample of {task}")
    merged, calibrated = (one.tasks[task].cosine.numpy() for one in found.values())
    view.chart(charts.cosine_pairs(merged, calibrated), "b", f"Cosine of every sample of {task}, merged and calibrated")
    st.subheader("d. Task-vector cosine")
    view.chart(
        charts.score_bars(vectors, list(found), "cosine of task vectors"), "d", "Task-vector cosine to the expert"
    )
st.caption(
    f"a, b, c on {tables.measured_on(found['merged'])}; gains are taken over the merged model. d needs no samples."
)
view.explain(text.COSINES)
with st.expander("Table", icon=":material/table:"):
    view.table(tables.cosine_table(features, vectors), f"cosines-{ws.family.suite.name}.csv", 4)

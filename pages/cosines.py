"""How close features and weights come to the experts': the four panels of the paper's Fig. 2."""

from dataclasses import replace

import pandas as pd
import streamlit as st

from app import downloads, options, state, stopped, view
from app.downloads import Numbers
from featcal.figures import charts, tables, text
from featcal.figures.names import plain

st.header("How close to the experts?")
session = view.open_or_explain()
task = view.task_selector(session)
on = view.sample_selector(session)
config = options.in_sidebar(session)
if config is None:
    options.offer(session, "These panels compare the merged model with a calibrated one, and there is none yet.")
    stopped.end_page()

with state.progress() as report:
    found = {"merged": session.features("merged", on, report), "calibrated": session.features(config, on, report)}
features = pd.DataFrame({name: tables.mean_cosines(one) for name, one in found.items()})
vectors = pd.DataFrame({"merged": session.vector_cosines("merged"), "calibrated": session.vector_cosines(config)})
features, vectors = (frame.rename_axis("task").reset_index() for frame in (features, vectors))
scores, missing = state.quick_scores(session, {"merged": "merged", "calibrated": config}, on)

origin = downloads.of_samples(session, on, config)
of_tasks = {
    name: {model: one.set_index("task")[model] for model in found} for name, one in (("a", features), ("d", vectors))
}

left, right = st.columns(2)
with left:
    st.subheader("a. Feature cosine, per task")
    bars = charts.score_bars(features, list(found), "mean cosine to the expert")
    means = Numbers("mean cosines", features, "cosine to the expert's feature, mean over samples", origin, 4)
    view.chart(bars, "a", f"Mean feature cosine per task: {tables.spoken(of_tasks['a'])}", numbers=means)
with right:
    st.subheader(f"b. Per sample of {plain(task)}")
    merged, calibrated = (one.tasks[task].cosine.numpy() for one in found.values())
    pairs = pd.DataFrame({"sample": range(len(merged)), "merged": merged, "calibrated": calibrated})
    view.chart(
        charts.cosine_pairs(merged, calibrated),
        "b",
        f"Cosine of every sample of {task}: {(calibrated > merged).sum()} of {len(pairs)} came closer to the expert",
        numbers=Numbers(f"cosines {task}", pairs, "cosine to the expert's feature", origin.of_task(task), 4),
    )
left, right = st.columns(2)
with left:
    st.subheader("c. Cosine gain and score gain")
    if scores:
        metric = tables.metric_name(scores)
        gained = tables.gain_table(features, tables.score_table(scores))
        said = tables.spoken({name: gained.set_index("task")[name] for name in ("cosine gain", "score gain")})
        view.chart(
            charts.gains(gained, metric),
            "c",
            f"Gain in cosine against gain in {metric}, per task: {said}",
            numbers=Numbers("gains", gained, f"cosine gain: cosine; score gain: points of {metric}", origin),
        )
    else:
        st.info(f"No scores here: {plain(missing)}", icon=":material/info:")
with right:
    st.subheader("d. Task-vector cosine")
    bars = charts.score_bars(vectors, list(found), "cosine of task vectors")
    without_samples = replace(origin, counts={})
    weights = Numbers("task vector cosines", vectors, "cosine to the expert's task vector", without_samples, 4)
    view.chart(bars, "d", f"Task-vector cosine to the expert: {tables.spoken(of_tasks['d'])}", numbers=weights)
st.caption(
    f"a, b, c on {tables.measured_on(found['merged'])}; gains are taken over the merged model. d needs no samples."
)
view.explain(text.COSINES)

"""Show how close features and weights come to the experts': the four panels of the paper's Fig. 2."""

from dataclasses import replace

import pandas as pd
import streamlit as st

from app import compare, downloads, picking, runs, samples, slices, state, view
from app.downloads import Numbers
from featcal.figures import charts, sample_charts, tables
from featcal.figures.names import plain

session = view.open_or_explain()
task = view.task_selector(session)
on = view.sample_selector(session)
compared = compare.choose_in_sidebar(session)

with state.progress() as report:
    found = {shown: session.measure.features(model, on, report) for shown, model in compared.models.items()}
features = pd.DataFrame({shown: tables.mean_cosines(one) for shown, one in found.items()})
of_weights = compared.models if session.family.is_base_known else {}
vectors = pd.DataFrame({shown: session.measure.vector_cosines(model) for shown, model in of_weights.items()})
features, vectors = (frame.rename_axis("task").reset_index() for frame in (features, vectors))
scores, missing = state.answer_scores(session, compared.models, on) if compared.pair else ({}, "")
runs.keep_calibrated(session, compared.models, on)

origin = downloads.sample_origin(session, on, compared.models)
of_tasks = {
    name: {model: one.set_index("task")[model] for model in one if model != "task"}
    for name, one in (("a", features), ("d", vectors))
}

left, right = st.columns(2)
with left:
    st.header("a. Feature cosine, per task")
    bars = charts.score_dots(features, list(found), "mean cosine to the expert", compared.pair)
    means = Numbers("mean cosines", features, "cosine to the expert's feature, mean over samples", origin, 4, "cosines")
    view.chart(bars, "a", f"Mean feature cosine per task: {tables.describe_ranges(of_tasks['a'])}", numbers=means)
samples_note = f"a on {tables.describe_samples(found[compared.merge])}."
if compared.pair is not None:
    a, b = compared.pair
    samples_note = f"a, b, c on {tables.describe_samples(found[a])}; gains are those of {b} over {a}."
    with right:
        st.header(f"b. Per sample of {plain(task)}")
        cosines = {shown: one.tasks[task].cosine.numpy() for shown, one in found.items()}
        pairs = pd.DataFrame({"sample": range(len(cosines[a])), **cosines})
        alt = (
            f"Cosine of every sample of {task}: {(cosines[b] > cosines[a]).sum()} of {len(pairs)} are closer to the "
            f"expert in {b} than in {a}"
        )
        numbers = Numbers(
            f"cosines {task}", pairs, "cosine to the expert's feature", origin.with_task(task), 4, "samples"
        )
        dots = picking.make_dots(session, compared.models, task, on)
        picking.scatter(sample_charts.cosine_pairs(cosines, dots), "b", alt, numbers.name)
        slices.draw_slices(session, compared.models, task, on)
        view.tools(numbers)
    left, right = st.columns(2)
    with left:
        st.header("c. Cosine gain and score gain")
        if scores:
            metric = tables.metric_name(scores)
            gained = tables.gain_table(features, tables.score_table(scores, (a, b)), (a, b))
            summary = tables.describe_ranges(
                {name: gained.set_index("task")[name] for name in ("cosine gain", "score gain")}
            )
            view.chart(
                charts.gains(gained, metric, b),
                "c",
                f"Gain in cosine against gain in {metric}, per task: {summary}",
                numbers=Numbers(
                    "gains",
                    gained,
                    f"cosine gain: cosine; score gain: points of {metric}",
                    origin,
                    kind=state.kind_of_chart(session, on, "gains"),
                ),
            )
        else:
            st.info(f"No scores here: {plain(missing)}", icon=":material/info:")
with right:
    st.header("d. Task-vector cosine")
    if of_weights:
        bars = charts.score_dots(vectors, list(found), "cosine of task vectors", compared.pair)
        # Task vectors are of weights alone: a file that named samples would claim what it does not hold.
        without_samples = replace(origin, counts={})
        weights = Numbers(
            "task vector cosines", vectors, "cosine to the expert's task vector", without_samples, 4, "task vectors"
        )
        alt = f"Task-vector cosine to the expert: {tables.describe_ranges(of_tasks['d'])}"
        view.chart(bars, "d", alt, numbers=weights)
    else:
        st.info("Task vectors start at the base, which this suite does not name.", icon=":material/info:")
st.caption(f"{samples_note} d needs no samples.")
is_further = bool(of_weights) and compared.pair is not None and vectors[b].mean() < vectors[a].mean()
if is_further and features[b].mean() > features[a].mean():
    st.caption(
        f"(d) The weights of {plain(b)} align less with the experts' task vectors, although (a) its features are "
        "closer: other weights than the experts' can give their features."
    )
view.explain(charts.COSINES)
samples.panel(session, compared.models)

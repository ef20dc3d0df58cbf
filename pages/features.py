"""One map of one task's features: expert, merged and calibrated in the same coordinates."""

import streamlit as st

from app import cloud, downloads, options, state, text, view

st.header("Features, before and after")
ws = view.open_or_explain()
task = view.task_selector(ws)
n = view.sample_selector(ws)
config = options.in_sidebar(ws)
models = {"merged": "merged", **({"calibrated": config} if config else {})}
if not config:
    options.offer(ws, "Expert and merged model are shown; a calibration adds its own points.")
pooled = ws.is_text and view.choice("Features", ["before the answer", "mean over the input"], "features") != (
    "before the answer"
)
if not pooled:
    with state.progress() as report:
        for model in models.values():
            ws.features(model, n, report)
features = cloud.features_of(ws, models, task, n, pooled)
data = ws.samples(ws.split, n)[task]

origin = downloads.of_samples(ws, n, config).of_task(task)

left, right = st.columns([3, 2])
with left:
    selected = cloud.map_section(ws, (tuple(models.items()), task, n, pooled), features, data, origin)
with right:
    cloud.sample_section(data, selected)
    cloud.distance_section(features, origin)
view.explain(text.FEATURES_OF_TEXT if ws.is_text else text.FEATURES)

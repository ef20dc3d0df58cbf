"""One map of one task's features: expert, merged and calibrated in the same coordinates."""

import streamlit as st

from app import cloud, downloads, options, state, view
from featcal.figures import text

st.header("Features, before and after")
session = view.open_or_explain()
task = view.task_selector(session)
on = view.sample_selector(session)
config = options.in_sidebar(session)
models = {"merged": "merged", **({"calibrated": config} if config else {})}
if not config:
    options.offer(session, "Expert and merged model are shown; a calibration adds its own points.")
pooled = session.is_text and view.choice("Features", ["before the answer", "mean over the input"], "features") != (
    "before the answer"
)
if not pooled:
    with state.progress() as report:
        for model in models.values():
            session.features(model, on, report)
features = cloud.features_of(session, models, task, on, pooled)
data = session.seen(task, on)

origin = downloads.of_samples(session, on, config).of_task(task)

left, right = st.columns([3, 2])
with left:
    selected = cloud.map_section(session, (tuple(models.items()), task, on, pooled), features, data, origin)
with right:
    cloud.sample_section(data, selected)
    cloud.distance_section(features, origin)
view.explain(text.FEATURES_OF_TEXT if session.is_text else text.FEATURES)

"""One map of one task's features: expert and the models that are looked at, in the same coordinates."""

import streamlit as st

from app import cloud, compare, downloads, options, state, view
from featcal.figures import text

st.header("Features, before and after")
session = view.open_or_explain()
task = view.task_selector(session)
on = view.sample_selector(session)
compared = compare.in_sidebar(session)
if compared.b is None:
    options.offer(session, f"The expert's and {compared.a} are shown; a second model adds its own points.")
pooled = session.is_text and view.choice("Features", ["before the answer", "mean over the input"], "features") != (
    "before the answer"
)
if not pooled:
    with state.progress() as report:
        for model in compared.models.values():
            session.features(model, on, report)
features = cloud.features_of(session, compared.models, task, on, pooled)
data = session.seen(task, on)

origin = downloads.of_samples(session, on, compared.models).of_task(task)

left, right = st.columns([3, 2])
with left:
    key = tuple(compared.models.items()), task, on, pooled
    selected = cloud.map_section(session, key, features, compared.pair, data, origin)
with right:
    cloud.sample_section(data, selected)
    cloud.distance_section(features, origin)
view.explain(text.FEATURES_OF_TEXT if session.is_text else text.FEATURES)

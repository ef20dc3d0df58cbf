"""Show features through depth as maps: expert and selected models, in the same coordinates."""

import streamlit as st

from app import cloud, compare, downloads, samples, slices, state, view
from featcal.figures import cloud_charts
from featcal.session.model_ref import EVERY_EXPERT

session = view.open_or_explain()
task = view.task_selector(session)
on = view.sample_selector(session)
compared = compare.choose_in_sidebar(session)
layer = cloud.layer_slider(session)
cloud.say_which(session, layer)
models = {compare.SHOWN_EXPERT: EVERY_EXPERT, **compared.models}
shown = cloud.ComparedFeatures(session, models, on, compared.pair, task, layer)
with state.progress() as report:
    features = shown.features(task, layer, report)[layer]
measured = downloads.sample_origin(session, on, models)
origin = measured.with_task(task)

left, right = st.columns([3, 2])
with left:
    cloud.map_section(shown, origin)
with right:
    cloud.search_section(shown)
    cloud.pick_section(shown)
    cloud.neighbour_section(shown, features)
    slices.draw_slices(session, compared.models, task, on)
    cloud.distance_section(features, origin, layer)
view.explain(cloud_charts.FEATURES_OF_TEXT if session.is_text else cloud_charts.FEATURES)

st.header("Every task")
every = state.selection().every
state.control(st.toggle, "every", every, False, "Show a small map of every task", help="As in the paper's Fig. 6.")
if every:
    with state.progress() as report:
        for name in session.tasks:
            shown.features(name, layer, report)
    cloud.every_task_section(shown, measured)
samples.panel(session, compared.models, details=True)

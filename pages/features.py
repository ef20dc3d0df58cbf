"""One map of one task's final features: expert, merged and calibrated in the same coordinates."""

import streamlit as st

from app import cloud, options, state, text, view

st.header("Final features, before and after")
ws = view.open_or_explain()
task = view.task_selector(ws)
n = view.sample_selector(ws)
config = options.in_sidebar(ws, n)
models = {"merged": "merged", **({"calibrated": config} if config else {})}
with state.progress() as report:
    ledgers = {name: ws.drift(model, n, report) for name, model in models.items()}
if not config:
    options.offer("Expert and merged model are shown; a calibration adds its own points.")
features = {"expert": ledgers["merged"].tasks[task].expert_features}
features |= {name: ledger.tasks[task].model_features for name, ledger in ledgers.items()}
data = ws.samples(ws.split, n)[task]

left, right = st.columns([3, 2])
with left:
    selected = cloud.map_section(ws, models, task, n, features, data)
with right:
    cloud.picture_section(data, selected)
    cloud.distance_section(features)
view.explain(text.FEATURES)

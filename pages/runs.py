"""List what was tried, by hand and by sweeps: mean against worst task, every run, and what was written."""

import streamlit as st

from app import checkpoints, compare, runs, state, sweep, view
from featcal.studies.history import History

st.title("What was tried, and what is best?")
session = view.open_or_explain()
on = view.sample_selector(session)
compared = compare.choose_in_sidebar(session)
with state.progress() as report:
    for model in compared.models.values():
        session.measure.features(model, on, report)
runs.keep(session, compared.models, on)
history = History()
sweep.section(session, on, history, compared.models)
runs.section(session, history)
checkpoints.section(session, on)

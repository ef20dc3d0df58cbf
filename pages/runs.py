"""What was tried, by hand and by sweeps: mean against worst task, and the list of every run."""

import streamlit as st

from app import compare, runs, sweep, view
from featcal.runs import History

st.header("What was tried, and what is best?")
session = view.open_or_explain()
on = view.sample_selector(session)
compared = compare.in_sidebar(session)
history = History()
sweep.section(session, on, history, compared.models)
runs.section(session, history)

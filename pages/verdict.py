"""Open the app: say in words what the measurements of the merged model say, and what to do next."""

import streamlit as st

from app import compare, preview, verdict, view

st.header(preview.TITLE)
session = view.open_or_explain()
on = view.sample_selector(session)
verdict.draw(session, compare.choose_in_sidebar(session), on)

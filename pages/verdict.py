"""Open the app: say in words what the measurements of the merged model say, and what to do next."""

import streamlit as st

from app import compare, first_page, samples, verdict, view

st.title(first_page.TITLE)
session = view.open_or_explain()
on = view.sample_selector(session)
compared = compare.choose_in_sidebar(session)
verdict.draw(session, compared, on)
samples.panel(session, compared.models)

"""Show what is loaded, whether it fits together, and what the tasks look like."""

import streamlit as st

from app import catalogue, page_end, report, state, view
from featcal.figures.names import plain
from featcal.system.errors import FeatcalError

st.title("What is loaded?")
try:
    # The suite file alone: what is wrong with a model is a finding below, and does not end the page here.
    suite, _ = state.opened_files()
except FeatcalError as error:
    view.problem(error)
    view.offer_home()
    page_end.end_page()

st.header(plain(suite.name))
st.text(suite.description)
found = catalogue.preflight()
catalogue.findings(found)
if found.problems:
    view.offer_home()
    page_end.end_page()
if found.description is not None:
    size = found.description
    view.metrics(
        [
            ("architecture", size["family"], None),
            ("blocks", str(size["blocks"]), None),
            ("parameters of the tower", f"{size['parameters'] / 1e6:.2f} M", None),
            ("checkpoint", f"{size['bytes_written'] / 2**20:.1f} MiB", None),
            ("stored as", ", ".join(size["dtypes"]), None),
        ]
    )
tasks_place, models_place, examples_place = st.tabs(["Tasks", "Models", "Examples"])
with models_place:
    st.dataframe(catalogue.models(suite), hide_index=True, alt="Base, merged model and experts")
    catalogue.expectations(found)
if found.family is None:
    view.offer_home()
    page_end.end_page()

session = view.open_or_explain()
on = view.sample_selector(session)
with tasks_place:
    catalogue.tasks_section(session, on)
with examples_place:
    catalogue.examples(session)
report.section(session, on)

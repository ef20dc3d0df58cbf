"""Draw the tabs of the Models and data page: the loaded suite, the way to one's own, and a report."""

from __future__ import annotations

import streamlit as st

from app import bring, catalogue, compare, page_end, report, state, view
from featcal.figures.names import plain
from featcal.system.errors import FeatcalError

LOADED, OWN, REPORT = "What is loaded", "Bring your own", "Report"
TABS = (LOADED, OWN, REPORT)


def draw_tab(tab: str) -> None:
    """Draw a tab of the Models and data page."""
    if tab == OWN:
        _draw_own()
    elif tab == LOADED:
        _draw_loaded()
    else:
        session = view.open_or_explain()
        on = view.sample_selector(session)
        compare.choose_models(session)
        report.show_report(session, on)


def _draw_loaded() -> None:
    """Draw the loaded models and data, whether they fit together, and examples of the tasks."""
    try:
        # The suite file alone: what is wrong with a model is a finding below, and does not end the page here.
        suite, _ = state.opened_files()
    except FeatcalError as error:
        view.problem(error)
        view.offer_home()
        page_end.end_page()
    headline_place = st.container()
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
    with headline_place:
        compare.choose_models(session)
    with tasks_place:
        catalogue.tasks_section(session, on)
    with examples_place:
        catalogue.examples(session)


def _draw_own() -> None:
    """Draw fields or an uploaded file, checked while they are filled in, that become a suite file."""
    st.caption(
        "A suite names a base, a merge or how to merge, one expert per task and the places of samples. This page "
        "makes a suite file, which the command line takes as well."
    )
    started, uploaded = st.tabs(["Fill in", "Upload a file"])
    with started:
        bring.form()
    with uploaded:
        bring.upload()
    text = bring.suite_text()
    file = bring.place(text) if text else None
    if file is not None:
        st.header("Does it fit together?")
        suite = bring.show_draft_findings(text, file)
        if suite is not None:
            st.header("Take it into use")
            bring.offer_to_write(text, file)

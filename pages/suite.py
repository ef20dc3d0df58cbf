"""Show what is loaded, whether it fits together, and what the tasks look like."""

import streamlit as st

from app import catalogue, report, state, stopped, view
from featcal.figures.names import plain
from featcal.figures.tables import how_many
from featcal.system.errors import FeatcalError

st.header("What is loaded?")
try:
    # The suite file alone: what is wrong with a model is a finding below, and does not end the page here.
    suite, _ = state.opened_files()
except FeatcalError as error:
    view.problem(error)
    view.offer_home()
    stopped.end_page()

st.subheader(plain(suite.name))
st.text(suite.description)
found = catalogue.preflight()
catalogue.findings(found)
if found.problems:
    view.offer_home()
    stopped.end_page()
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
st.subheader("Models")
st.dataframe(catalogue.models(suite), hide_index=True, alt="Base, merged model and experts")
catalogue.expectations(found)
if found.family is None:
    view.offer_home()
    stopped.end_page()

session = view.open_or_explain()
st.subheader("Tasks")
on = view.sample_selector(session)
tasks, missing = catalogue.tasks(session, on)
st.dataframe(
    tasks,
    hide_index=True,
    column_config={"expert, %": st.column_config.NumberColumn(format="%.1f")},
    alt="Tasks with classes, samples and the expert's own accuracy",
)
if missing:
    st.info(f"Experts are not scored: {plain(missing)}", icon=":material/info:")
else:
    what = "whole generated answers" if session.is_text else "accuracy"
    counts = session.counts(on)
    st.caption(
        f"expert: {what} of the expert on {how_many(counts.values())} {session.split} samples of its own task. Far "
        "below what it should reach means that the file is the wrong one."
    )
    for task in catalogue.guessing(tasks, counts):
        score = tasks.set_index("task").loc[task, "expert, %"]
        st.warning(
            f"The expert of {plain(task)} is right in {score:.1f} %: that is what guessing gives. Is its file the "
            "right one, and are the classes in the order that it was trained with?",
            icon=":material/casino:",
        )
catalogue.examples(session)
report.section(session, on)

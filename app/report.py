"""A report of the models that are looked at: written when asked for, offered as a file."""

from __future__ import annotations

import tempfile
from pathlib import Path

import streamlit as st

from app import compare, state, view
from app.downloads import file_name, of_samples
from featcal.errors import FeatcalError
from featcal.model_ids import spelled
from featcal.report.write import report_command, write_report
from featcal.session import Session
from featcal.views import View

_WRITTEN = "report"


def section(session: Session, on: View) -> None:
    """A button that writes the report, the file once it is there, and the command that writes the same."""
    st.subheader("Report")
    try:
        models = compare.named(session)
    except FeatcalError as error:
        view.problem(error)
        return
    names = tuple(spelled(model, session.family) for model in models.values())
    asked = state.reference(), names, on
    st.caption(
        f"One HTML file about {' and '.join(models)}, which needs no other and asks no host for anything: "
        "scores on the test split, drift, attribution, samples that turned, features, settings, versions, hashes, and "
        "the command of every figure."
    )
    row = st.container(horizontal=True)
    if row.button("Write a report", icon=":material/description:"):
        st.session_state.pop(_WRITTEN, None)
        try:
            st.session_state[_WRITTEN] = asked, _written(session, names, on)
        except FeatcalError as error:
            view.problem(error)
    written = st.session_state.get(_WRITTEN)
    if written is not None and written[0] == asked:
        name = file_name("report", of_samples(session, on, models))
        row.download_button(
            "Download the report",
            written[1],
            f"{name}.html",
            "text/html",
            on_click="ignore",
            icon=":material/download:",
        )
    st.caption("The same from the command line, or as Markdown with `--out report.md`:")
    st.code(report_command(state.reference(), names, on), language="bash", wrap_lines=True)


def _written(session: Session, names: tuple[str, ...], on: View) -> bytes:
    """The file's content.

    Raises:
        FeatcalError: models that cannot be shown together, or a measurement that failed.
    """
    with tempfile.TemporaryDirectory(prefix="featcal-report-") as folder, state.progress() as progress:
        out = Path(folder) / "report.html"
        write_report(session, state.reference(), out, models=names, on=on, progress=progress)
        return out.read_bytes()

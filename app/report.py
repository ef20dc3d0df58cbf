"""Offer a report of the shown models: written on request, then offered as a file."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from app import compare, jobs, state, view
from app.downloads import download_name, sample_origin
from featcal.figures.report.write import report_line, write_report
from featcal.server.lengths import is_long, seconds_to_report
from featcal.session.model_ref import ModelRef
from featcal.session.session import Session
from featcal.suite.views import EvaluationSamples
from featcal.system.errors import FeatcalError
from featcal.system.sandbox import without_places

_WRITTEN = "report"


def show_report(session: Session, on: EvaluationSamples) -> None:
    """Draw the offer of a report about the shown models."""
    st.header("Report")
    try:
        models = compare.resolve_chosen(session)
    except FeatcalError as error:
        view.problem(error)
        return
    offer(session, models, on)


def offer(session: Session, models: Mapping[str, ModelRef], on: EvaluationSamples) -> None:
    """Draw a button that writes a report about these models, by their names, the file once it exists, and the
    equivalent command."""
    names = tuple(model.name for model in models.values())
    st.caption(
        f"A self-contained HTML report on {' and '.join(models)}: "
        "scores on the test split, drift, attribution, samples whose answer changed, features, settings, versions, "
        "hashes, and the command of every figure."
    )
    row = st.container(horizontal=True)
    seconds = seconds_to_report(session, len(models), on)
    if is_long(session, seconds):
        content = jobs.finished_report(session, models.values(), on, seconds)
    else:
        content = _write_on_request(row, session, models, on)
    if content is not None:
        name = download_name("report", sample_origin(session, on, models))
        row.download_button(
            "Download the report", content, f"{name}.html", "text/html", on_click="ignore", icon=":material/download:"
        )
    st.caption("The same from the command line, or as Markdown with `--out report.md`:")
    st.code(report_line(state.suite_reference(), names, on), language="bash", wrap_lines=True)


def _write_on_request(
    row: DeltaGenerator, session: Session, models: Mapping[str, ModelRef], on: EvaluationSamples
) -> bytes | None:
    """Write the report when its button is pressed; return it as long as the same models, with the same files, and
    samples are shown."""
    asked = state.stamp(), tuple(model.key for model in models.values()), on
    if row.button("Write a report", icon=":material/description:"):
        st.session_state.pop(_WRITTEN, None)
        try:
            st.session_state[_WRITTEN] = asked, _write(session, tuple(one.name for one in models.values()), on)
        except FeatcalError as error:
            view.problem(error)
    made_for, content = st.session_state.get(_WRITTEN, (None, None))
    return content if made_for == asked else None


def _write(session: Session, names: tuple[str, ...], on: EvaluationSamples) -> bytes:
    """Write the report and return the file's content.

    Raises:
        FeatcalError: models that cannot be shown together, or a failed measurement.
    """
    with tempfile.TemporaryDirectory(prefix="featcal-report-") as folder, state.progress() as progress:
        out = Path(folder) / "report.html"
        write_report(session, state.suite_reference(), out, models=names, on=on, progress=progress)
        return without_places(out.read_bytes().decode()).encode()

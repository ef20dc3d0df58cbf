"""What a session has selected, and the workspaces that all sessions share."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from app.maps import MapWorker
from app.workspace import ModelId, Workspace, open_workspace
from featcal.errors import FeatcalError
from featcal.evaluation.evaluate import Scores
from featcal.progress import Progress
from featcal.resources import embedded_suites

AT_ONCE = 1.0
"""Seconds of work before its progress is shown."""


@st.cache_resource(max_entries=2, show_spinner="Reading the models …")
def _workspace(reference: str, changed: float) -> Workspace:
    return open_workspace(reference)


@st.cache_resource(show_spinner=False)
def map_worker() -> MapWorker:
    """The process that draws UMAPs."""
    return MapWorker()


def reference() -> str:
    """The selected suite: an embedded name or a path."""
    return str(st.session_state["suite"])


def workspace() -> Workspace:
    """The selected suite, opened; opened anew when its file changes.

    Raises:
        FeatcalError: the suite cannot be used.
    """
    file = embedded_suites().get(reference(), Path(reference()).expanduser())
    return _workspace(reference(), file.stat().st_mtime if file.exists() else 0.0)


def quick_scores(ws: Workspace, models: Mapping[str, ModelId], n: int) -> tuple[dict[str, Scores], str]:
    """Scores of models on the samples that drift is measured on, or none and the reason."""
    try:
        return {name: ws.quick_scores(model, n) for name, model in models.items()}, ""
    except FeatcalError as error:
        return {}, str(error)


@contextmanager
def progress(where: DeltaGenerator | None = None) -> Iterator[Progress]:
    """A determinate bar with the time so far, gone when the work is done; none for work that is done at once.

    Where a newer run of the page is waiting, drawing the bar raises streamlit's own signal and so ends the work; work
    that is done at once ends by itself.
    """
    place, started = (where or st).empty(), time.perf_counter()

    def report(label: str, done: int, total: int) -> None:
        seconds = time.perf_counter() - started
        if seconds < AT_ONCE:  # drawing takes a core from the work
            return
        text = f"{label}: {done} of {total}, {seconds:.1f} s"
        place.progress(done / total, text=text)

    try:
        yield report
    except FeatcalError:
        place.empty()
        raise
    place.empty()

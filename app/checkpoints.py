"""List written checkpoints on a page: description, loading code, card, report, and the folder as a zip."""

from __future__ import annotations

from pathlib import Path

import streamlit as st

from app import export, report, view, zips
from featcal.figures import run_tables, tables
from featcal.figures.names import plain
from featcal.session.session import Session
from featcal.studies.checkpoints import Checkpoints, WrittenModel
from featcal.studies.recording import hash_of
from featcal.suite.views import EvaluationSamples
from featcal.system.errors import FeatcalError
from featcal.system.formatting import readable
from featcal.system.sandbox import server_rules, without_places

_CHOSEN, _PROBLEMS = "checkpoint", "problems with checkpoints"


def show_checkpoints(session: Session, on: EvaluationSamples) -> None:
    """Draw the list of checkpoints from all visits and suites, and one of them.

    Args:
        on: the samples of a report.
    """
    st.header("Checkpoints")
    known = Checkpoints()
    kept = zips.visible(known.read_all())
    view.show_problems([*known.problems, *st.session_state.pop(_PROBLEMS, ())])
    if not kept:
        st.info(
            "No checkpoint yet. Checkpoints that the page Calibrate or `featcal calibrate` writes are listed here.",
            icon=":material/save:",
        )
        return
    frame = run_tables.checkpoint_table(kept)
    frame["path"] = [without_places(path) for path in frame["path"]]
    number = st.column_config.NumberColumn
    scores = {name: number(format="%.1f") for name in ("mean, %", "before, %")}
    drifts = {name: number(format="%.3f") for name in ("drift", "drift before")}
    st.dataframe(
        tables.lift_halves(frame, scores).dropna(axis="columns", how="all"),
        hide_index=True,
        height=215 if len(frame) > 5 else "auto",
        column_config={**scores, **drifts},
        placeholder="–",
        alt=f"{len(frame)} checkpoints: folder, suite, merge, options, scores, drift, size, time, path",
    )
    by_id = {one.id: one for one in kept}

    def format_checkpoint(identity: str) -> str:
        one = by_id.get(identity)
        return identity if one is None else f"{Path(one.folder).name} · {one.run.suite} · {one.time[:16]}"

    chosen = st.selectbox("Checkpoint", [*by_id], format_func=format_checkpoint, key=_CHOSEN)
    _one(session, by_id[chosen], on)


def _one(session: Session, written: WrittenModel, on: EvaluationSamples) -> None:
    """Draw the path of a checkpoint, its loading code, and buttons for its card, a report and a download."""
    place, size = Path(written.folder), readable(sum(written.files.values()))
    same = written.run.suite_hash == hash_of(session)
    st.markdown(f"Lies in {plain(without_places(written.folder))}")
    with st.container(horizontal=True, vertical_alignment="center"):
        if zips.is_served:
            label, link = f"Download as a zip ({size})", zips.link(written.id, st.get_option("server.baseUrlPath"))
            st.link_button(label, link, icon=":material/download:", help="Sent from disk as it is read.")
        if same:
            # Closed, it costs nothing: what is in it is made when it is opened.
            fold = st.popover("Report", icon=":material/description:", key="checkpoint-report", on_change="rerun")
            if fold.open:
                with fold:
                    _report(session, written, on)
        if not server_rules():
            st.button(
                "Take off the list",
                on_click=_take_off,
                args=(written,),
                icon=":material/playlist_remove:",
                help="The folder stays where it is.",
            )
    if not zips.is_served:
        st.caption(f"{size}. An app that was started with `featcal app` offers it as a zip too.")
    export.show_notes(written)
    with st.expander("Model card, and the way to the Hub", icon=":material/description:"):
        export.show_card(place, session if same else None)


def _report(session: Session, written: WrittenModel, on: EvaluationSamples) -> None:
    """Draw the button for a report on a checkpoint and the model before calibration."""
    try:
        _, of = session.resolve(written.run.model).require_calibration()
        report.offer(session, {"merged": of, "calibrated": session.resolve(written.folder)}, on)
    except FeatcalError as error:
        view.problem(error)


def _take_off(written: WrittenModel) -> None:
    known = Checkpoints()
    known.remove(written)
    st.session_state[_PROBLEMS] = known.problems
    st.session_state.pop(_CHOSEN, None)

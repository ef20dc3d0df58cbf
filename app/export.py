"""Write a calibrated model to a folder, and show the equivalent command line."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

import streamlit as st
import torch
from streamlit.delta_generator import DeltaGenerator

from app import downloads, opening, state, view, zips
from featcal.export.card_parts import NOT_MEASURED, load_card
from featcal.export.kept_work import UNCHECKED
from featcal.export.licences import licence_of
from featcal.figures.names import join_percent, plain
from featcal.session.model_ref import ModelRef
from featcal.session.session import Session
from featcal.studies.checkpoints import Checkpoints, WrittenModel
from featcal.studies.history import History
from featcal.studies.recording import measure_model, run_of
from featcal.studies.scored_card import score_into_card, tell_measured
from featcal.suite.command_lines import calibrate_line, push_line
from featcal.suite.views import EvaluationSamples
from featcal.system.errors import FeatcalError, InputError, UncheckedError
from featcal.system.paths import expand_home
from featcal.system.sandbox import require_inside, without_places

_FOLDER, _OFFERED, _WRITTEN = "folder", "folder offered", "written"


def button(session: Session, model: ModelRef, row: DeltaGenerator, below: DeltaGenerator) -> None:
    """Draw the button that writes the checkpoint to the folder of `section`, and below it the path of the written
    checkpoint, also from earlier visits."""
    name = _folder_name(session, model)
    with below:
        if row.button("Write the checkpoint", type="primary", icon=":material/save:"):
            try:
                _write(session, model, output_folder(name))
            except FeatcalError as error:
                view.problem(error)
        for written in _find_written(session, model)[:1]:
            _say_written(written)


def _write(session: Session, model: ModelRef, folder: Path) -> None:
    """Write the checkpoint and add it to the list, with the page's measurements in its card; say so if it was already
    written there.

    Raises:
        FeatcalError: it cannot be written, or the written model differs.
    """
    if any(Path(one.folder) == folder for one in _find_written(session, model)):
        st.info("This checkpoint exists already; nothing was written.", icon=":material/info:")
        return
    on = EvaluationSamples(state.selection().n)
    how, (_, of) = state.page_score_kind(session, on), model.require_calibration()
    with st.spinner("Writing, reloading and comparing …", show_time=True):
        # What could not be checked is in the folder's record, which is shown below.
        with suppress(UncheckedError):
            session.fit.calibrate(model).save(folder)
        kept = Checkpoints()
        adapter, config = session.family.adapter, session.family.container.config
        before, after = (measure_model(session, one, on, how) for one in (of, model))
        written = kept.add(folder, run_of(session, model), adapter.loading(folder, config), before, after)
        # Of this visit too, where no list can be kept.
        st.session_state.setdefault(_WRITTEN, []).append(written)
        view.show_problems(kept.problems)
        tell_measured(session, folder, model, on, how)


def _say_written(written: WrittenModel) -> None:
    """Show the path of a checkpoint, and checks of it that could not run."""
    record = written.record()
    place = plain(f"{without_places(written.folder)} ({', '.join(record['written'])})")
    if record.get("verified"):
        st.success(f"Written and verified by reloading: {place}", icon=":material/check_circle:")
    else:
        st.warning(f"Written, but not verified: {place}", icon=":material/warning:")
    for sentence in record.get(UNCHECKED, ()):
        st.warning(f"Not checked: {plain(without_places(sentence))}.", icon=":material/warning:")


def show_export(session: Session, model: ModelRef) -> None:
    """Draw the folder's name, the loading code of the written model, and the equivalent command."""
    config, of = model.require_calibration()
    _folder_name(session, model)
    left, right = st.columns([2, 3])
    name = left.text_input("Folder to write (must not exist)", key=_FOLDER).strip()
    # Sums depend on the threads in their last bits, and for tiny models the app leaves a core to the browser.
    threads = f"OMP_NUM_THREADS={torch.get_num_threads()}"
    right.caption(f"The same from the command line, to the last bit with `{threads}`:")
    line = calibrate_line(state.suite_reference(), config, opening.defaults(session), name, of.name)
    right.code(line, language="bash", wrap_lines=True)
    for written in _find_written(session, model)[:1]:
        show_notes(written)
        with st.expander("Model card, and the way to the Hub", icon=":material/description:"):
            show_card(Path(written.folder), session, model)
        st.caption(
            "The page Runs and checkpoints lists every checkpoint that was written, with its card and a download."
        )


def _folder_name(session: Session, model: ModelRef) -> str:
    """Return the name in the folder's field; another merge or other options change its default."""
    offered = default_name(session.family.suite.name, downloads.model_words("", model, session))
    # Whatever was typed for the options before would say what is not in the folder.
    if st.session_state.get(_OFFERED) != (model.name, offered) or _FOLDER not in st.session_state:
        st.session_state[_OFFERED], st.session_state[_FOLDER] = (model.name, offered), offered
    return str(st.session_state[_FOLDER]).strip()


def _find_written(session: Session, model: ModelRef) -> list[WrittenModel]:
    """Find the existing checkpoint of this calibration with the current files: first in the folder named on the page,
    then the newest."""
    run = run_of(session, model).id
    of_this_visit = [one for one in st.session_state.get(_WRITTEN, ()) if one.run.id == run and one.is_there]
    found = {one.folder: one for one in [*of_this_visit, *Checkpoints().find(run)]}
    named = ""
    with suppress(InputError):
        named = str(output_folder(str(st.session_state.get(_FOLDER, "")).strip()))
    return sorted(zips.visible(found.values()), key=lambda one: one.folder != named)


def default_name(suite: str, made: str) -> str:
    """Return a folder name that describes the model: suite, merge, numbers, changed switches."""
    return "-".join(re.sub(r"[^\w.-]+", "-", part) for part in (suite, made))


def output_folder(name: str) -> Path:
    """Return the folder for a typed name.

    Raises:
        InputError: not a possible folder name, or on a shared server one outside its folders.
    """
    if not name:
        raise InputError("the folder has no name; type one")
    if not name.isprintable():
        raise InputError("the folder's name holds a control character; type another")
    try:
        place = expand_home(name)
        require_inside(place, "folder to write", to_write=True)
        return place.resolve()
    except (OSError, RuntimeError, ValueError) as error:
        raise InputError(f"this is not a possible folder name; type another ({type(error).__name__})") from error


def show_notes(written: WrittenModel) -> None:
    """Show the warnings and notes in the record of a written folder, and its loading code."""
    record = written.record()
    warnings = [one for one in record["warnings"] if one not in record.get(UNCHECKED, ())]
    if warnings:
        lines = "\n".join(f"- {join_percent(plain(one))}." for one in warnings)
        st.warning(f"Warnings in the checkpoint's record and card:\n{lines}", icon=":material/warning:")
    for note in record["notes"]:
        st.caption(f"Note: {join_percent(plain(without_places(note)))}.")
    st.code(without_places(written.loading), wrap_lines=True)


def show_card(folder: Path, session: Session | None, model: ModelRef | None = None) -> None:
    """Show the card of a written folder, a button that adds its scores, and the command that pushes the folder.

    Args:
        session: of its suite; None if another suite is open, which cannot score it.
        model: the model in the folder, if the session has it already.
    """
    try:
        label = "Score on the test split and fill in the card"
        if session is not None and "test" in session.family.suite.splits() and st.button(label):
            on = EvaluationSamples(None, "test")
            with state.progress() as report:
                score_into_card(session, folder, on, History(), model=model, place="app", progress=report)
        card = load_card(folder)
    except FeatcalError as error:
        view.problem(error)
        return
    text = without_places(str(card))
    if NOT_MEASURED in text:
        st.caption("The card marks values that were not measured.")
    st.code(text, language="markdown", wrap_lines=True)
    st.caption("From a command line to the Hub: without --yes, files and card are shown and nothing is sent.")
    known = licence_of(card.data.to_dict()) is not None
    st.code(without_places(push_line(str(folder), known)), language="bash", wrap_lines=True)

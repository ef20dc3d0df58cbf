"""Write a calibrated model to a folder, and show the command line that does it too."""

from __future__ import annotations

import re
from collections.abc import Hashable
from pathlib import Path

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from app import downloads, opening, state, view
from featcal.export.card import NOT_MEASURED
from featcal.export.card_parts import load_card
from featcal.export.licences import licence_of
from featcal.figures.names import plain
from featcal.formats.hub import RECORD_FILE
from featcal.session.model_ref import ModelRef
from featcal.session.session import Session
from featcal.studies.history import History
from featcal.studies.scored_card import score_into_card
from featcal.suite.command_lines import calibrate_command, push_command
from featcal.suite.views import EvaluationSamples
from featcal.system.errors import FeatcalError, InputError
from featcal.system.json_files import read_json
from featcal.system.paths import expand_home
from featcal.system.sandbox import require_inside, without_places

_FOLDER, _OFFERED, _WRITTEN = "folder", "folder offered", "written"


def button(session: Session, model: ModelRef, row: DeltaGenerator, below: DeltaGenerator) -> None:
    """Draw the button that writes the checkpoint to the folder of `section`, and below it what came of that."""
    name = _folder_name(session, model)
    with below:
        if row.button("Write the checkpoint", type="primary", icon=":material/save:"):
            # A run that fails or is stopped here must not leave the last success on the page.
            st.session_state.pop(_WRITTEN, None)
            try:
                with st.spinner("Writing, reloading and comparing …", show_time=True):
                    folder = output_folder(name)
                    files = session.fit.calibrate(model).save(folder)
                st.session_state[_WRITTEN] = (_key(model), folder, files)
            except FeatcalError as error:
                view.problem(error)
        for folder, files in _find_written(model):
            place = plain(f"{folder} ({', '.join(files)})")
            st.success(f"Written and verified by reloading: {place}", icon=":material/check_circle:")


def section(session: Session, model: ModelRef) -> None:
    """Show the folder's name, how to load what was written there, and the command that writes it too."""
    config, of = model.require_calibration()
    _folder_name(session, model)
    left, right = st.columns([2, 3])
    name = left.text_input("Folder to write (must not exist)", key=_FOLDER).strip()
    right.caption("The same from the command line:")
    line = calibrate_command(state.reference(), config, opening.defaults(session), name, of.name)
    right.code(line, language="bash", wrap_lines=True)
    for folder, _ in _find_written(model):
        _show_notes(folder, session)
        with st.expander("Model card, and the way to the Hub", icon=":material/description:"):
            _show_card(folder, session, model)


def _folder_name(session: Session, model: ModelRef) -> str:
    """Return the name in the folder's field; another merge or other options put another one there."""
    offered = default_name(session.family.suite.name, downloads.model_words("", model, session))
    # Whatever was typed for the options before would say what is not in the folder.
    if st.session_state.get(_OFFERED) != (model.name, offered) or _FOLDER not in st.session_state:
        st.session_state[_OFFERED], st.session_state[_FOLDER] = (model.name, offered), offered
    return str(st.session_state[_FOLDER]).strip()


def _find_written(model: ModelRef) -> list[tuple[Path, list[str]]]:
    """Return the folder and files that were last written, if they are of this suite's files as they are now and of
    this calibration, and still there."""
    of, *written = st.session_state.get(_WRITTEN, (None, None, None))
    return [(written[0], written[1])] if of == _key(model) and (written[0] / RECORD_FILE).is_file() else []


def _key(model: ModelRef) -> Hashable:
    """Return what a written folder is made of."""
    return state.stamp(), model.key


def default_name(suite: str, made: str) -> str:
    """Return a folder name that says how the model was made: suite, merge, numbers, switches beside the defaults."""
    return "-".join(re.sub(r"[^\w.-]+", "-", part) for part in (suite, made))


def output_folder(name: str) -> Path:
    """Return the folder that a name typed by hand stands for.

    Raises:
        InputError: nothing that a folder can be called, or on a shared server one outside its folders.
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
        raise InputError(f"no folder can be called that; type another name ({type(error).__name__})") from error


def _show_notes(folder: Path, session: Session) -> None:
    """Show what the record of a written folder warns of and notes, and how the folder is loaded."""
    record = read_json(folder / RECORD_FILE)
    for warning in record["warnings"]:
        st.error(f"Warning: {plain(warning)}.", icon=":material/warning:")
    for note in record["notes"]:
        st.caption(f"Note: {plain(without_places(note))}.")
    st.code(without_places(session.family.adapter.loading(folder, session.family.container.config)))


def _show_card(folder: Path, session: Session, model: ModelRef) -> None:
    """Show the card of a written folder, a button that fills in its scores, and the command that pushes the folder."""
    try:
        if "test" in session.family.suite.splits() and st.button("Score on the test split and fill in the card"):
            on = EvaluationSamples(None, "test")
            with state.progress() as report:
                score_into_card(session, folder, on, History(), model=model, place="app", progress=report)
        card = load_card(folder)
    except FeatcalError as error:
        view.problem(error)
        return
    text = without_places(str(card))
    if NOT_MEASURED in text:
        st.caption("What was not measured is called that in the card.")
    st.code(text, language="markdown", wrap_lines=True)
    st.caption("From a command line to the Hub: without --yes, files and card are shown and nothing is sent.")
    known = licence_of(card.data.to_dict()) is not None
    st.code(without_places(push_command(str(folder), known)), language="bash", wrap_lines=True)

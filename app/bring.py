"""Draw the way to one's own suite: its models and samples, the suite file, the result of `featcal check`, and where to
write it."""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pandas as pd
import streamlit as st

from app import catalogue, state, view
from app.export import output_folder
from featcal.authoring.from_form import KINDS, DraftTask, draft, import_file, read_draft, write_draft
from featcal.figures.names import plain, plain_lines
from featcal.preflight.check import Preflight, check_suite
from featcal.session.fingerprint import Stamp, suite_stamp
from featcal.suite.methods import merger_names, method
from featcal.suite.options import options_of_class
from featcal.suite.schema import Suite, task_catalogue
from featcal.system.errors import FeatcalError, InputError
from featcal.system.formatting import readable
from featcal.system.paths import from_folder
from featcal.system.sandbox import server_rules, without_places

_TEXT, _NOTES, _FORM, _ROWS, _EDITOR = "draft", "draft notes", "draft form", "draft rows", "draft-tasks"
_WRITTEN, _LAST, _ROOT = "draft written", "draft rows as edited", "draft folder"
CHECKPOINT = "a checkpoint"
FIELDS = [field.name for field in fields(DraftTask)]
HELP = {
    "task": "Any name.",
    "expert": "Folder, Hub id, or REF+ADAPTER for a LoRA adapter.",
    "kind": "How the samples are stored; catalogue: a task of a published benchmark.",
    "where": "Folder, file or Hub id of the samples; of the catalogue the entry's name.",
    "calibration": "Path below `where`; of hub and arrays the split's name.",
    "validation": "The same for the samples on which options are chosen.",
    "test": "The same for the samples of the final report.",
    "input": "For text: a template over the columns, such as Is '{sentence}' positive?",
    "target": "For text: the template of the right answer, such as {answer}.",
    "conversation": "For chat: the column with the turns, such as messages, in place of input and target.",
}


def upload() -> None:
    """Draw an upload from which a suite can start: a suite file, a configuration of
    mergekit, or a model pool of FusionBench.
    """
    given = st.file_uploader(
        "Start from a suite file, a mergekit configuration or a FusionBench model pool (YAML)", type=["yaml", "yml"]
    )
    root = st.text_input(
        "Folder that its relative paths start from",
        str(Path.cwd()) if server_rules() is None else ".",
        key="draft-root",
    )
    if given is None or not st.button("Use this file", icon=":material/input:"):
        return
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / (Path(given.name).name or "uploaded.yaml")  # drafts are called by it
        file.write_bytes(given.getvalue())
        try:
            # The draft is written beside what it names.
            start = output_folder(root.strip())
            _put(*import_file(file, start))
            st.session_state[_ROOT] = str(start)
        except InputError as error:
            view.problem(InputError(*(one.replace(str(file), given.name) for one in error.problems)))


def form() -> None:
    """Draw fields for models and tasks; a button makes a suite file from them."""
    left, middle, right = st.columns(3)
    name = _field(left.text_input, "name", "my-suite", "Name of the suite")
    base = _field(middle.text_input, "base", "", "Base model", placeholder="folder or Hub id")
    how = _field(right.selectbox, "merge", CHECKPOINT, "Merged model", [CHECKPOINT, *merger_names()])
    merged: str | dict[str, Any] = {"method": how}
    if how == CHECKPOINT:
        merged = _field(right.text_input, "merged", "", "Merged checkpoint", placeholder="folder or Hub id")
    elif scale := [one for one in options_of_class(method(how)) if one.name == "scale"]:
        merged = {"method": how, "scale": _field(right.number_input, f"scale {how}", scale[0].default, "Scale")}
    columns: dict[str, Any] = {name: st.column_config.TextColumn(help=HELP.get(name)) for name in FIELDS}
    columns["kind"] = st.column_config.SelectboxColumn(options=list(KINDS), help=HELP["kind"], default=KINDS[0])
    if _EDITOR not in st.session_state and _LAST in st.session_state:  # back from another page, which drops the editor
        st.session_state[_ROWS] = st.session_state[_LAST]
    kept: list[dict[str, str]] = st.session_state.get(_ROWS) or [asdict(DraftTask("", ""))]
    table = pd.DataFrame(kept, columns=FIELDS)
    edited = st.data_editor(table, num_rows="dynamic", hide_index=True, column_config=columns, key=_EDITOR)
    st.session_state[_LAST] = rows_of(edited)
    known = ", ".join(task_catalogue())
    st.caption(f"One line per task. Entries of the catalogue: {plain(known)}.")
    if st.button("Make the suite file", icon=":material/edit_document:"):
        rows = rows_of(edited)
        empty = _empty_fields(base, merged, rows)
        if empty:
            view.problem(InputError(*empty))
        else:
            _put(draft(name, base, merged, [DraftTask(**row) for row in rows]), [])


def _empty_fields(base: str, merged: str | Mapping[str, Any], rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the fields to fill in before a check is possible."""
    found = [] if base.strip() else ["Base model is empty: give a folder or a Hub id"]
    if isinstance(merged, str) and not merged.strip():
        found.append("Merged checkpoint is empty: give a folder or a Hub id, or choose how to merge the experts")
    if not any(row["task"] for row in rows):
        found.append("No task has a name: fill in one line of the table for every expert")
    return found


def rows_of(table: pd.DataFrame) -> list[dict[str, str]]:
    """Return the lines of the form as text; empty cells become empty text."""
    filled = table.astype(object).where(table.notna(), "")
    return [{name: str(row.get(name, "")).strip() for name in FIELDS} for row in filled.to_dict("records")]


def _field(draw: Any, name: str, default: Any, *args: Any, **kwargs: Any) -> Any:
    """Draw a widget whose value is kept while the visitor is on another page."""
    kept, key = st.session_state.setdefault(_FORM, {}), f"draft-{name}"
    if key not in st.session_state:
        st.session_state[key] = kept.get(name, default)
    kept[name] = draw(*args, key=key, **kwargs)
    return kept[name]


def suite_text() -> str:
    """Draw the editable suite file, and return it; "" if it was not begun."""
    text: str = st.session_state.get(_TEXT, "")
    if not text:
        return ""
    for note in st.session_state.get(_NOTES, []):
        st.warning(plain(note), icon=":material/edit_note:")
    key = "draft-text"
    if key not in st.session_state:
        st.session_state[key] = text
    st.session_state[_TEXT] = st.text_area("Suite file (YAML)", key=key, height=340)
    return str(st.session_state[_TEXT])


def _require_short(text: str) -> None:
    """Raise InputError for a text that is too long for visitors of a shared server."""
    rules = server_rules()
    if rules is not None and len(text.encode(errors="replace")) > rules.text:
        raise InputError(f"draft: longer than the {readable(rules.text)} that this server reads; shorten it")


def place(text: str) -> Path | None:
    """Draw the field for the file of a draft, whose folder anchors its paths; return None for an invalid name."""
    try:
        _require_short(text)
        name = read_draft(text, Path()).name
    except InputError:  # which `verdict` says
        name = "my-suite"
    beside = st.session_state.get(_ROOT, "")
    typed = st.text_input("File to write (must not exist)", str(Path(beside) / f"{name}.yaml")).strip()
    try:
        return output_folder(typed)
    except InputError as error:
        view.problem(error)
        return None


def show_draft_findings(text: str, file: Path) -> Suite | None:
    """Show problems and costs of the draft; return the suite if it can be opened."""
    try:
        _require_short(text)
        suite = read_draft(text, file)
        with st.spinner("Checking models and samples …"):
            found = _check(suite_stamp(suite), suite)
    except FeatcalError as error:
        view.problem(error)
        return None
    catalogue.findings(found)
    catalogue.expectations(found)
    return None if found.problems else suite


@st.cache_resource(max_entries=4, ttl="10m", show_spinner=False)
def _check(files: Stamp, _suite: Suite) -> Preflight:
    return check_suite(_suite, probe=False)


def offer_to_write(text: str, file: Path) -> None:
    """Draw a button that writes the file and opens it here, and the command line for it."""
    if st.button("Write and open it", type="primary", icon=":material/save:"):
        try:
            write_draft(text, file)
        except FeatcalError as error:
            view.problem(error)
            return
        named = from_folder(file, Path.cwd()) if server_rules() else str(file)
        state.look_at(suite=named)
        st.session_state[_WRITTEN] = named
        st.rerun()  # the sidebar was drawn with the suite before
    if st.session_state.get(_WRITTEN) == state.suite_reference():
        message = f"Written: {state.suite_reference()}. It is the suite of every page now."
        st.success(plain_lines(message), icon=":material/check_circle:")
    quoted = shlex.quote(without_places(str(file)))
    st.code(f"featcal check {quoted}\nfeatcal calibrate {quoted} --out calibrated", language="bash")


def _put(text: str, notes: list[str]) -> None:
    st.session_state[_TEXT], st.session_state[_NOTES] = text, notes
    st.session_state["draft-text"] = text

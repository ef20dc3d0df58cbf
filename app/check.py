"""Check a merge made by another tool: one field takes its folder, the app finds the models from which it was made,
and shows it on every page, without a suite file.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import streamlit as st

from app import first_page, state, view
from featcal.authoring.from_form import write_draft
from featcal.authoring.from_merge import Origins, find_origins, sample_source
from featcal.authoring.from_paths import SuiteParts, write_suite_text
from featcal.figures.verdict.faults import judge_weights
from featcal.figures.verdict.merge import MergeNames, Recipe, examine_weights
from featcal.figures.verdict.sentences import Verdict
from featcal.formats.hub import RECORD_FILE
from featcal.formats.locate import checkpoint_folder
from featcal.preflight.own_merge import open_merge
from featcal.session.fingerprint import Stamp
from featcal.suite.schema import Suite
from featcal.system.errors import FeatcalError, InputError
from featcal.system.json_files import read_json
from featcal.system.resources import cache_folder, embedded_suites
from featcal.system.sandbox import require_inside, server_rules

_FIELD = "check-folder"


def draw_field() -> None:
    """Draw the field, and the verdict on the files and weights of the merge in it."""
    with st.container(horizontal=True, vertical_alignment="bottom", key="check"):
        st.text_input(
            "Check my merge",
            key=_FIELD,
            placeholder="folder or Hub id of a merge that mergekit or featcal wrote; no suite file is needed",
            label_visibility="collapsed",
            icon=":material/folder_open:",
        )
        wanted = st.button("Check my merge", icon=":material/search:")
    named = str(st.session_state[_FIELD]).strip()
    if wanted and named:
        try:
            with st.spinner("Reading what it was made of …"):
                chosen = find_subject(named)
        except FeatcalError as error:
            view.problem(error)
            return
        state.look_at(**chosen)
        st.rerun()  # the sidebar was drawn with the suite before
    if _is_checked():
        suite, files = state.opened_files()
        with st.spinner("Comparing files and weights with those it was made of …"):
            first_page.write_verdict_lines(_judge_weights(state.suite_reference(), files, suite))


def draw_beside_error() -> None:
    """Draw the field and the verdict for a checked merge that cannot be opened, which is explained below."""
    if _is_checked():
        with suppress(FeatcalError):
            draw_field()


def find_subject(named: str) -> dict[str, Any]:
    """Return the fields of the selection for a merge: with the suite in its record, else with a suite of the models
    from which it was made, else with the open suite.

    Raises:
        InputError: there is no such folder, or its ingredients are unknown and it does not fit the open suite.
    """
    folder = checkpoint_folder(named, Path.cwd(), "merged")
    require_inside(folder, "folder of a merge")
    record = read_json(folder / RECORD_FILE) if (folder / RECORD_FILE).is_file() else {}
    shipped = dict(record.get("suite_file") or {}).get("shipped")
    if shipped in embedded_suites():
        return {"suite": str(shipped), "merge": str(folder)}
    try:
        origins = find_origins(folder, None, {}, asks_hub=server_rules() is None)
    except InputError as unknown:
        session = view.open_or_explain()
        try:
            session.fit.weights(str(folder))
        except InputError:
            raise unknown from None
        return {"merge": str(folder)}
    return {"suite": str(_write_suite(folder, origins))}


def _write_suite(folder: Path, origins: Origins) -> Path:
    """Write the suite file of a merge and its models, measured on texts that the experts write; return the file."""
    file = _suites() / f"{folder.name}-{hashlib.sha256(str(folder).encode()).hexdigest()[:8]}.yaml"
    # All beginnings: the file is everybody's who checks this folder, whatever number of samples they look at. Rows of a
    # vocabulary that the base lacks are said to be there, and left out.
    parts = SuiteParts(origins.base, origins.experts, {}, str(folder), sample_source(None), {"vocabulary": "base"})
    begun = write_suite_text(parts, file)
    if begun.missing:
        raise InputError(*begun.missing)
    file.parent.mkdir(parents=True, exist_ok=True)
    if not file.is_file() or file.read_text(encoding="utf-8") != begun.text:
        file.unlink(missing_ok=True)  # what it was made of is another by now
        write_draft(begun.text, file)
    return file


def _suites() -> Path:
    return cache_folder() / "checked"


def _is_checked() -> bool:
    """Say whether the open suite was made by this module."""
    return Path(state.suite_reference()).parent == _suites()


# The suite is not hashed (its name begins with "_"): its reference and the stamp of its files tell it apart.
@st.cache_resource(max_entries=4, ttl="1h", show_spinner=False)
def _judge_weights(reference: str, files: Stamp, _suite: Suite) -> Verdict:
    """Show the verdict on a merge's files and weights, before anything is measured."""
    opened = open_merge(_suite, "cpu")
    origins = find_origins(opened.folder, None, {}, asks_hub=server_rules() is None)
    found = examine_weights(opened, Recipe(**origins.facts()), MergeNames(str(opened.folder), reference))
    return Verdict(tuple(judge_weights(found)), "")

"""Find good options for a merge without labels, as a job, and adopt them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pandas as pd
import streamlit as st

from app import jobs, opening, options, state
from app.selection import OPTIONS
from featcal.figures import selection_table
from featcal.figures.names import plain, plain_lines
from featcal.server.lengths import seconds_to_select
from featcal.session.model_ref import ModelRef
from featcal.session.session import Session
from featcal.studies.selection.candidates import config_asked
from featcal.suite.calibration_options import CHOSEN, OWN, CalibrationConfig
from featcal.suite.command_lines import select_line, shared_options
from featcal.system.errors import InputError

LABEL = "Find good options"
_WHAT = (
    "Tries the merge as it is, all recipes, and informed with errors weighed by decisions and with other values of μ "
    "and ρ: each is fitted on three quarters of the calibration samples and judged on the fourth, four times, by "
    "how probable the experts' decisions are. No label is read."
)


def show_good_options(session: Session, model: ModelRef) -> None:
    """Show a job that chooses recipe and options for the merge under repair with the chosen samples, switches and
    parts; when it is done, its result, and one button that adopts it.

    Args:
        model: the calibration under repair.
    """
    config, of = model.require_calibration()
    shared = shared_options(config, opening.defaults(session))
    asked = {name: value for name, value in shared.items() if name not in CHOSEN}
    st.markdown(_WHAT)
    st.code(select_line(state.suite_reference(), asked, of.name), language="bash", wrap_lines=True)
    try:
        seconds = seconds_to_select(session, config_asked(session.family, **asked))
        document = jobs.ensure("select", {"options": asked, **jobs.model_argument(of)}, seconds)
    except InputError as error:  # of jobs that cannot be kept here, say
        st.warning(plain_lines(str(error)), icon=":material/error:")
        return
    if document is not None:
        _show(session, config, document)


def _show(session: Session, config: CalibrationConfig, document: Mapping[str, Any]) -> None:
    """Show candidates with the margin between them, and adopt the chosen options."""
    for note in document["notes"]:
        st.caption(f"Note: {plain(note)}.")
    rows, columns = selection_table.candidate_table(document)
    if rows:
        table = pd.DataFrame(rows, columns=columns).drop(columns="start")
        st.dataframe(table, hide_index=True, alt=f"{len(rows)} candidates, the best first, with scores and margins")
    for line in selection_table.describe_selection(document):
        st.caption(plain(line))
    if document["chosen"] is None:
        st.info("The merge is best left as it is: there is nothing to adopt.", icon=":material/info:")
        return
    chosen = chosen_options(config, document["chosen"])
    st.button(
        "Use these options" if chosen != config else "These options are in use",
        type="primary",
        icon=":material/check:",
        disabled=chosen == config,
        on_click=state.look_at,
        kwargs=options.fields_of(session, chosen),
    )


def chosen_options(config: CalibrationConfig, chosen: Mapping[str, Any]) -> CalibrationConfig:
    """Return options with the chosen ones; those of other recipes are off."""
    foreign = {name: False for name in OWN if name not in chosen and chosen["recipe"] not in OPTIONS[name].recipes}
    return replace(config, **dict[str, Any]({**foreign, **chosen}))

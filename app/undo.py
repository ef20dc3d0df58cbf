"""Draw undo and redo of options, by buttons and keys, and the last models as buttons with scores."""

from __future__ import annotations

from collections.abc import Hashable

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from app import on_table, opening, options, state
from app.trail import Trail
from featcal.figures.names import cut_text, plain
from featcal.session.model_ref import ModelRef
from featcal.session.session import Session

_TRAILS = "trails"
_LONGEST = 30
"""Largest number of characters of a model's options on its button."""
_BUTTONS = (("Undo", -1, "Ctrl+Z"), ("Redo", 1, "Ctrl+Shift+Z"))

_keys = st.components.v2.component(
    "featcal_undo_keys",
    js="""
export default function () {
  const text = "textarea, select, input:not([type=range], [type=checkbox], [type=radio], [type=button])";
  const press = (event) => {
    if (!(event.ctrlKey || event.metaKey) || event.altKey || event.key.toLowerCase() !== "z") return;
    // In a text field the keys undo what was typed.
    if (event.target.isContentEditable || event.target.matches?.(text)) return;
    event.preventDefault();
    document.querySelector(`.st-key-${event.shiftKey ? "redo" : "undo"} button`)?.click();
  };
  document.addEventListener("keydown", press);
  return () => document.removeEventListener("keydown", press);
}
""",
)


def buttons(row: DeltaGenerator, session: Session) -> None:
    """Record the current options, and draw undo and redo."""
    trail = _trail(on_table.find_merge(session))
    trail.visit(options.chosen_config(session))
    for label, by, key in _BUTTONS:
        row.button(
            label,
            key=label.lower(),
            type="tertiary",
            icon=f":material/{label.lower()}:",
            help=f"{label} the last move of an option ({key})",
            disabled=trail.find_step(by) is None,
            on_click=_move,
            args=(session, trail, by),
        )


def chips(row: DeltaGenerator, session: Session, model: ModelRef, on: Hashable, score: str) -> None:
    """Record the result of the options, and draw the last models as buttons that return to them, always with the
    defaults and the best, which is marked.

    Args:
        model: the calibration with these options.
        on: identifies the samples of the scores.
        score: of the options, for display.
    """
    config, of = model.require_calibration()
    trail = _trail(of)
    trail.note(on, config, score)
    best = trail.best(on)
    for number, (other, reached) in enumerate(trail.recent(on, opening.defaults(session)).items()):
        words = cut_text(options.describe_difference(other, session), _LONGEST)
        row.button(
            plain(f"{words} · {reached}"),
            key=f"chip-{number}",
            icon=":material/check:" if other == config else ":material/star:" if other == best else None,
            help="Go back to these options" + (", the best so far" if other == best else ""),
            on_click=state.look_at,
            kwargs=options.fields_of(session, other),
        )


def listen() -> None:
    """Bind the keys of undo and redo."""
    _keys(key="undo-keys", height=1)


def _move(session: Session, trail: Trail, by: int) -> None:
    config = trail.find_step(by)
    if config is not None:
        trail.move(by)
        state.look_at(**options.fields_of(session, config))


def _trail(merge: ModelRef) -> Trail:
    """Return the trail of a merge of the selected suite."""
    trails: dict[Hashable, Trail] = st.session_state.setdefault(_TRAILS, {})
    return trails.setdefault((state.suite_reference(), merge.key), Trail())

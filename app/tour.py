"""Show a tour of five steps through the first suite; visitors who come by a link do not see it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import streamlit as st

from app import state

_STEP, _SUITE = "step of the tour", "suite of the tour"


@dataclass(frozen=True)
class TourStep:
    """A step of the tour: a page, and a hint for it."""

    page: str
    text: str
    select: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the selection that the step sets."""


STEPS = (
    TourStep(
        "verdict",
        "Eight experts were merged into one model. The cards show the gain of a repair; the lines give the "
        "measurements, each with a link to its chart. In the first chart every bar is a layer's part of the final "
        "drift, and the bars add up to it; the second shows each layer's own drift and the drift that it inherits.",
    ),
    TourStep(
        "drift",
        "The lines show the drift of the merge and of its repair: the distance of their features from the expert's. "
        "The layer that causes most is selected, and the tabs below show it; click another. Bars show its own "
        "mismatch and the drift from earlier layers; they do not add up to the line, because they can point in "
        "different directions.",
    ),
    TourStep(
        "calibrate",
        "Calibration solves every linear map anew, from a few samples without labels, so that its outputs come as "
        "close to the experts' as one model allows. There is no training: move a slider and the model is recomputed.",
    ),
    TourStep(
        "features",
        "One point is the final feature of one sample. Where calibration works, its points lie closer to the expert's.",
        {"layer": None},
    ),
    TourStep(
        "accuracy",
        "And does it answer better? The button below scores the calibrated model on the test split, and then shows "
        "which samples became right and which became wrong. What you choose from here on holds on every page.",
    ),
)


def box(page: str, opened_at: str) -> None:
    """Draw the current step of the tour on this page, with buttons for the next one and to leave.

    Args:
        page: name of the current page.
        opened_at: name of the app's first page.
    """
    if _STEP not in st.session_state:
        st.session_state[_STEP] = None if st.query_params.to_dict() or page != opened_at else 0
        st.session_state[_SUITE] = state.suite_reference()
    number: int | None = st.session_state[_STEP]
    # Its words are of the suite that it began on.
    if number is None or STEPS[number].page != page or state.suite_reference() != st.session_state[_SUITE]:
        return
    last = number == len(STEPS) - 1
    with st.container(border=True, key="tour"):
        st.markdown(f"**First visit, {number + 1} of {len(STEPS)}.** {STEPS[number].text}")
        with st.container(horizontal=True):
            # Not a callback: `switch_page` works in the run of a page alone.
            if not last and st.button("Next", type="primary", key="tour-next"):
                _go(number + 1)
            st.button("Done" if last else "Skip", key="tour-leave", on_click=_leave)


def _go(number: int) -> None:
    st.session_state[_STEP] = number
    state.look_at(**STEPS[number].select)
    st.switch_page(f"../pages/{STEPS[number].page}.py")


def _leave() -> None:
    st.session_state[_STEP] = None

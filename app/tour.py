"""Show a first visit of five steps through the suite that the app opens on; whoever comes by a link is spared it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import streamlit as st

from app import state

_STEP = "step of the tour"


@dataclass(frozen=True)
class Step:
    """A step of the tour: a page, and what to look at on it."""

    page: str
    text: str
    select: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the selection that the step sets."""


STEPS = (
    Step(
        "drift",
        "Eight experts were merged into one model. Every bar is a layer: how far the merged model's features are from "
        "those of the expert of each task, relative to their size. It grows with depth.",
    ),
    Step(
        "drift",
        "Now block 3 is chosen, and the charts below are of it. Drift is mismatch, which this layer's own weights "
        "cause, plus propagation, which layers before it sent on.",
        {"layer": "block 3"},
    ),
    Step(
        "calibrate",
        "Calibration solves every linear map anew, from a few samples without labels, so that its outputs are those "
        "of the experts. No training: move a slider and the model is computed again.",
        {"b": "calibrated"},
    ),
    Step("features", "One point is one sample. Where calibration works, its points lie nearer to the expert's."),
    Step(
        "accuracy",
        "And does it answer better? Scores of the test split are shown when asked for, with the samples that "
        "became right and those that became wrong. What you choose from here on holds on every page.",
    ),
)


def box(page: str, opened_at: str) -> None:
    """Draw the step of the tour that is due on this page, with buttons for the next one and to leave.

    Args:
        page: the name of the page that is drawn.
        opened_at: the name of the page that the app opens on.
    """
    if _STEP not in st.session_state:
        st.session_state[_STEP] = None if st.query_params.to_dict() or page != opened_at else 0
    number: int | None = st.session_state[_STEP]
    if number is None or STEPS[number].page != page:
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
    state.select(**STEPS[number].select)
    st.switch_page(f"../pages/{STEPS[number].page}.py")


def _leave() -> None:
    st.session_state[_STEP] = None

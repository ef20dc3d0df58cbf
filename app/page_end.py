"""Mark a page that was not drawn completely, because streamlit's Stop ends a run at any place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import streamlit as st

_UNLESS_STOPPED = """<style>
.st-key-stopped { display: none; }
[data-testid="stApp"][data-test-script-state="notRunning"] .st-key-stopped { display: flex; }
</style>"""
_NOTICE = "notice that the page is not whole"


@contextmanager
def warn_if_stopped() -> Iterator[None]:
    """Show a warning that the page is incomplete, and remove it at the end of the `with`.

    It is hidden while the page runs. A stopped run cannot draw any more, so the warning stays.
    """
    place = st.session_state[_NOTICE] = st.empty()
    with place.container(key="stopped"):
        st.html(_UNLESS_STOPPED)
        st.warning(
            "This page was stopped before it was complete: parts below may be missing or come from an earlier run.",
            icon=":material/front_hand:",
        )
        st.button("Run the page again", key="run-again", icon=":material/refresh:")
    try:
        yield
    finally:
        place.empty()


def end_page() -> NoReturn:
    """End the page here as intended, without the warning."""
    if _NOTICE in st.session_state:
        st.session_state[_NOTICE].empty()
    # Raises like Stop does, so the notice was taken away first.
    st.stop()

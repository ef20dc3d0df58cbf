"""Draw less urgent parts of a page after the rest of it is complete and no computation runs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import streamlit as st

_asking = st.components.v2.component(
    "featcal_afterwards",
    js="""
export default function ({ data, setTriggerValue }) {
  if (!data.asks) return;
  const app = document.querySelector('[data-testid="stApp"]');
  let waiting;
  const ask = () => {
    if (app.dataset.testScriptState === "notRunning") setTriggerValue("idle", data.version);
    else waiting = setTimeout(ask, 50);
  };
  ask();
  return () => clearTimeout(waiting);
}
""",
)


@st.fragment
def draw_later(key: str, version: str, draw: Callable[[], None]) -> None:
    """Draw a part of a page after all others, in a separate run that any control of the page interrupts.

    Args:
        key: of the part.
        version: of its content; a version that was drawn before is drawn with the page.
    """
    drawn = f"version of {key}"
    asks = st.session_state.get(drawn) != version
    answered = partial(st.session_state.update, {drawn: version})
    # The component lives in the browser: it alone knows when the script has stopped running.
    _asking(key=f"{key}-later", data={"asks": asks, "version": version}, on_idle_change=answered, height=1)
    if not asks:
        draw()

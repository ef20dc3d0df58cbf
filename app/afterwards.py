"""Draw parts of a page that nobody waits for, once the rest of the page is complete and nothing runs any more."""

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
def draw_later(key: str, version: str, meanwhile: str, draw: Callable[[], None]) -> None:
    """Draw a part of a page after all the rest of it, in a run of its own that any control of the page interrupts.

    Args:
        key: of the part.
        version: of what it shows; a version that was drawn already is drawn with the page.
        meanwhile: a sentence in its place until then.
    """
    drawn = f"version of {key}"
    asks = st.session_state.get(drawn) != version
    answered = partial(st.session_state.update, {drawn: version})
    # The component lives in the browser: it alone knows when the script has stopped running.
    _asking(key=f"{key}-later", data={"asks": asks, "version": version}, on_idle_change=answered, height=1)
    if asks:
        st.caption(meanwhile)
    else:
        draw()

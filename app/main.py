"""Entry of the app: `streamlit run app/main.py` in a clone, or `featcal app` from anywhere."""

from __future__ import annotations

import sys
from pathlib import Path

import streamlit as st

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from featcal.launch import wait_until_warm  # noqa: E402

PAGES = {
    "drift": ("Drift", ":material/stacked_bar_chart:"),
    "calibrate": ("Calibrate", ":material/tune:"),
    "features": ("Features", ":material/scatter_plot:"),
    "cosines": ("Cosines", ":material/architecture:"),
    "accuracy": ("Accuracy", ":material/target:"),
    "suite": ("Suite", ":material/inventory_2:"),
}

st.set_page_config(page_title="featcal", page_icon=":material/healing:", layout="wide")
page = st.navigation(
    [
        st.Page(ROOT / "pages" / f"{name}.py", title=title, icon=icon, url_path=name, default=name == "drift")
        for name, (title, icon) in PAGES.items()
    ]
)
note = st.caption("Loading torch and transformers …")  # no spinner: drawing one takes a core from the imports
wait_until_warm()
from app import state, view  # noqa: E402

note.empty()

view.suite_selector()
page.run()
state.map_worker()

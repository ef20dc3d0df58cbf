"""Entry of the app: `streamlit run app/main.py` in a clone, or `featcal app` from anywhere."""

from __future__ import annotations

import sys
from pathlib import Path

import streamlit as st

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from app import charts, preview, tables  # noqa: E402
from featcal.errors import FeatcalError  # noqa: E402
from featcal.launch import is_warm, wait_until_warm  # noqa: E402
from featcal.progress import keep_memory  # noqa: E402

PAGES = {
    "drift": ("Drift", ":material/stacked_bar_chart:"),
    "calibrate": ("Calibrate", ":material/tune:"),
    "features": ("Features", ":material/scatter_plot:"),
    "cosines": ("Cosines", ":material/architecture:"),
    "accuracy": ("Accuracy", ":material/target:"),
    "suite": ("Suite", ":material/inventory_2:"),
}

keep_memory()
st.set_page_config(page_title="featcal", page_icon=":material/healing:", layout="wide")
page = st.navigation(
    [
        st.Page(ROOT / "pages" / f"{name}.py", title=title, icon=icon, url_path=name, default=name == "drift")
        for name, (title, icon) in PAGES.items()
    ]
)


def first_chart() -> None:
    """What the app opens on, as it was measured before for these very files, while torch is loading."""
    table = preview.kept()
    if table is None or st.query_params.get("suite", preview.HOME_SUITE) != preview.HOME_SUITE:
        return
    st.header("Where did the merged model go wrong?")
    frames = {"merged": tables.per_layer(table, tables.ALL_TASKS, relative=True)}
    st.plotly_chart(charts.drift_layers(frames, relative=True), key="first-chart", alt="Drift per layer, kept")


opening = st.empty()
if not is_warm():
    with opening.container():  # no spinner: drawing one takes a core from the imports
        if page.title == "Drift":
            first_chart()
        st.caption("Loading torch and transformers …")
wait_until_warm()
from app import state, view  # noqa: E402

opening.empty()

state.map_worker().wait()
try:
    view.suite_selector()
    page.run()
except FeatcalError as error:
    view.problem(error)
finally:
    state.map_worker().start_when_quiet()

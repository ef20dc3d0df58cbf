"""Start the app: `streamlit run app/main.py` in a clone, or `featcal app` from anywhere."""

from __future__ import annotations

import sys
from pathlib import Path

import streamlit as st

ROOT = Path(__file__).resolve().parents[1]
# streamlit puts the folder of this file on the path, not its parent, and runs the file again and again.
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from app import preview  # noqa: E402
from featcal.figures import charts, tables  # noqa: E402
from featcal.server.launch import is_warm, wait_until_warm  # noqa: E402
from featcal.system.errors import FeatcalError  # noqa: E402
from featcal.system.progress import keep_memory  # noqa: E402

PAGES = {
    "drift": ("Drift", ":material/stacked_bar_chart:"),
    "calibrate": ("Calibrate", ":material/tune:"),
    "features": ("Features", ":material/scatter_plot:"),
    "cosines": ("Cosines", ":material/architecture:"),
    "accuracy": ("Accuracy", ":material/target:"),
    "runs": ("Runs", ":material/history:"),
    "leaderboard": ("Leaderboard", ":material/leaderboard:"),
    "suite": ("Suite", ":material/inventory_2:"),
    "bring": ("Bring your own", ":material/drive_folder_upload:"),
    "jobs": ("Jobs", ":material/pending_actions:"),
}
FIRST, HOME_PAGE = "drift", "home"

keep_memory()
files = {name: ROOT / "pages" / f"{name}.py" for name in PAGES}
# The icon is part of the title, which draws it with streamlit's own font: as `icon` it would be fetched from Google.
titles = {name: f"{icon} {title}" for name, (title, icon) in PAGES.items()}
# The page that the app opens on has the app's own address; its name leads there too.
home = st.Page(files[FIRST], title=titles[FIRST], url_path=HOME_PAGE, default=True)
also = st.Page(files[FIRST], title=titles[FIRST], url_path=FIRST, visibility="hidden")
others = [st.Page(files[name], title=titles[name], url_path=name) for name in PAGES if name != FIRST]
page = st.navigation([home, also, *others])
name = page.url_path or FIRST
HERE = ROOT / "app"
st.set_page_config(page_title=f"{PAGES[name][0]} · featcal", page_icon=str(HERE / "mark.svg"), layout="wide")
st.logo(str(HERE / "logo.svg"), icon_image=str(HERE / "mark.svg"), size="large")
st.html(HERE / "style.css")


def first_chart() -> None:
    """Draw what the app opens on, as it was measured before for these very files, while torch is loading."""
    table = preview.read_kept()
    if table is None or st.query_params.get("suite", preview.HOME_SUITE) != preview.HOME_SUITE:
        return
    st.header("Where did the merged model go wrong?")
    frames = {"merged": tables.layer_rows(table, tables.ALL_TASKS, relative=True)}
    st.plotly_chart(charts.drift_layers(frames, relative=True), key="first-chart", alt="Drift per layer, kept")


opening = st.empty()
if not is_warm():
    with opening.container():  # no spinner: drawing one takes a core from the imports
        if name == FIRST:
            first_chart()
        st.caption("Loading torch and transformers …")
# Two threads must not import torch at once: the server's own is at it.
wait_until_warm()
from app import catalogue, state, stopped, tour, view  # noqa: E402

opening.empty()

# While a page runs, the map process must not start to compile beside it.
state.map_worker().wait()
state.begin(page.url_path or HOME_PAGE)
try:
    with stopped.warn_if_stopped():
        with st.sidebar.container(gap=None):
            view.suite_selector()
            state.mirror_in_address()
        view.show_ignored()
        tour.box(name, FIRST)
        said = st.container()
        page.run()
        if name not in ("leaderboard", "suite", "bring", "jobs"):
            catalogue.verdict(said)
except FeatcalError as error:
    view.problem(error)
finally:
    state.map_worker().start_when_quiet()

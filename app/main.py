"""Start the app: `streamlit run app/main.py` in a clone, or `featcal app` from anywhere."""

from __future__ import annotations

import sys
from pathlib import Path

import streamlit as st

ROOT = Path(__file__).resolve().parents[1]
# streamlit puts the folder of this file on the path, not its parent, and runs the file again and again.
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from featcal.server.launch import is_warm, release_warm_up, wait_until_warm  # noqa: E402
from featcal.system.environment import ignore_own_warnings_of_torch  # noqa: E402
from featcal.system.errors import FeatcalError  # noqa: E402
from featcal.system.progress import keep_memory  # noqa: E402

SECTIONS = {
    "Diagnose": {
        "verdict": ("Verdict", ":material/gavel:", "What did merging do?"),
        "drift": ("Drift", ":material/bar_chart:", "Where did the merge go wrong?"),
        "features": ("Features", ":material/scatter_plot:", "Features, before and after"),
        "cosines": ("Cosines", ":material/architecture:", "How close to the experts?"),
        "accuracy": ("Accuracy", ":material/target:", "How accurate is it on the test set?"),
    },
    "Repair": {"calibrate": ("Calibrate", ":material/tune:", "Repair it in closed form")},
    "Keep": {
        "runs": ("Runs and checkpoints", ":material/history:", "What was tried, and what is kept?"),
        "models": ("Models and data", ":material/inventory_2:", "What is loaded?"),
    },
}
PAGES = {name: page for pages in SECTIONS.values() for name, page in pages.items()}
FIRST, HOME_PAGE = "verdict", "home"


def make_pages(name: str) -> list[st.Page]:
    """Return the pages of the menu; the first page is listed a second time, under its own name."""
    file, (title, icon, _) = ROOT / "pages" / f"{name}.py", PAGES[name]
    # Part of the title, the icon is drawn with streamlit's own font: as `icon` it would be fetched from Google.
    title = f"{icon} {title}"
    if name != FIRST:
        return [st.Page(file, title=title, url_path=name)]
    # The page that the app opens on has the app's own address; its name leads there too.
    also = st.Page(file, title=title, url_path=name, visibility="hidden")
    return [st.Page(file, title=title, url_path=HOME_PAGE, default=True), also]


keep_memory()
ignore_own_warnings_of_torch()
menu = {section: [page for name in pages for page in make_pages(name)] for section, pages in SECTIONS.items()}
page = st.navigation(menu, expanded=True)
name = page.url_path or FIRST
HERE = ROOT / "app"
st.set_page_config(page_title=f"{PAGES[name][0]} · featcal", page_icon=str(HERE / "mark.svg"), layout="wide")
st.logo(str(HERE / "logo.svg"), icon_image=str(HERE / "mark.svg"), size="large")
st.html(HERE / "style.css")
top = st.container(horizontal=True, vertical_alignment="center", key="top")
top.title(PAGES[name][2], width="stretch")
tools, corner = (top.container(horizontal=True, width="content") for _ in range(2))


def draw_first_page() -> None:
    """Draw the first page from its cache for the current files, while torch is loading."""
    from app import cards, drawing, first_page

    kept = first_page.read_kept()
    asked = {**st.query_params}
    # What was measured before is of no other model, samples or options.
    if kept is None or asked.pop("suite", first_page.HOME_SUITE) != first_page.HOME_SUITE or asked:
        return
    with st.container(key="headline-kept"):
        cards.draw_cards(kept.cards)
    first_page.write_verdict_lines(kept.verdict)
    figures = first_page.figures(kept)
    for number, (column, figure) in enumerate(zip(st.columns(2), figures, strict=True)):
        alt = "The charts below, as they were measured before"
        drawing.draw_figure(figure, f"first-chart-{number}", alt, {}, column)


opening = st.empty()
if not is_warm():
    with opening.container():  # no spinner: drawing one takes a core from the imports
        st.caption("Loading torch, transformers and the models of the suite: some seconds, once per start.")
    release_warm_up()  # which would hold back this frame
    if name == FIRST:
        with opening.container():
            draw_first_page()
            st.caption("Loading torch, transformers and the models of the suite: some seconds, once per start.")
# Two threads must not import torch at once: the server's own is at it.
wait_until_warm()
from app import catalogue, headline, jobs, page_end, state, tour, view  # noqa: E402

opening.empty()

# While a page runs, the map process must not start to compile beside it.
state.map_worker().put_off_start()
state.begin_page(page.url_path or HOME_PAGE, tools)
headline.forget()
try:
    with page_end.warn_if_stopped():
        with st.sidebar.container(gap=None):
            view.suite_selector()
            state.mirror_in_address()
        jobs.badge(corner)
        view.show_ignored()
        tour.box(name, FIRST)
        place_of_check = st.container()
        page.run()
        headline.finish_headline()
        if name != "models":
            catalogue.show_suite_findings(place_of_check)
except FeatcalError as error:
    view.problem(error)
finally:
    state.map_worker().start_when_quiet()

"""Hold a visitor's selection, and the sessions of suites that all visitors share.

The selection is one value (`app.selection`) in streamlit's session. Controls show and change it; the address bar
mirrors it. An address is read once, when a visit begins; afterwards only controls change what the pages show.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import signature
from typing import Any, TypeVar

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from app.held_sessions import Held
from app.maps import MapWorker
from app.opening import open_resident, suite_bytes
from app.selection import HOME, PageSelection, from_query
from featcal.evaluation.evaluate import Scores
from featcal.server.lengths import is_long, seconds_to_score, share_cores
from featcal.session.fingerprint import Stamp, suite_stamp
from featcal.session.model_ref import ModelRef
from featcal.session.session import Session
from featcal.studies import recording
from featcal.studies.history import How
from featcal.suite.schema import Suite, load_suite
from featcal.suite.views import EvaluationSamples
from featcal.system.errors import FeatcalError, InputError
from featcal.system.formatting import did_you_mean, shorten
from featcal.system.progress import Progress
from featcal.system.sandbox import server_rules

T = TypeVar("T")
AT_ONCE = 1.0
"""Seconds of work before its progress is shown."""
_SELECTION, _PAGE, _LEFT_OUT, _RUNS, _STAMP = "selection", "page", "left out of the address", "runs", "files"
_TOP = "row of the title"
_OF_ANSWERS = {"decisions": "scores", "gains": "answer gains"}
"""Measurements of whole answers, by those of first tokens (`featcal.figures.commands.KINDS`)."""
_RENEWED, _USED = "how often widgets were renewed", "widget that was used"
_address = st.components.v2.component(
    "featcal_address",
    js="""
export default function ({ data }) {
  const address = new URL(window.location.href);
  data.fields.forEach((name) => address.searchParams.delete(name));
  Object.entries(data.shown).forEach(([name, value]) => address.searchParams.set(name, value));
  if (address.href !== window.location.href) {
    window.history.replaceState(window.history.state, "", address.href);
  }
  // Streamlit puts sections into a list that may only hold items: to a screen reader they are labelled groups of links.
  const label = () => [...document.querySelectorAll('[data-testid="stSidebarNavItems"]')].forEach((menu) => {
    menu.setAttribute("role", "none");
    [...menu.children].forEach((section) => {
      section.setAttribute("role", "group");
      section.setAttribute("aria-label", section.querySelector("header span")?.innerText ?? "");
      section.querySelectorAll("li").forEach((item) => item.setAttribute("role", "none"));
    });
  });
  label();
  // It draws them anew whenever it likes.
  window.featcalMenu?.disconnect();
  window.featcalMenu = new MutationObserver(label);
  const side = document.querySelector('[data-testid="stSidebar"]');
  if (side) window.featcalMenu.observe(side, { childList: true, subtree: true });
  const left = window.featcalPage;
  window.featcalPage = address.pathname;
  if (left && left !== address.pathname && window.innerWidth < 768) {  // a phone: the list of pages covers the next one
    document.querySelector('[data-testid="stSidebarCollapseButton"] button')?.click();
  }
}
""",
)


def begin_page(page: str, top: DeltaGenerator) -> None:
    """Begin a run of `page`, whose title is in the row `top`; the first run of a session reads its address."""
    st.session_state[_PAGE], st.session_state[_TOP] = page, top
    st.session_state.pop(_STAMP, None)
    if _SELECTION not in st.session_state:
        st.session_state[_SELECTION], st.session_state[_LEFT_OUT] = from_query(st.query_params.to_dict())


def title_row() -> DeltaGenerator:
    """Return the row of the page's title, which also has the choice of samples."""
    row: DeltaGenerator = st.session_state[_TOP]
    return row


def selection() -> PageSelection:
    """Return this session's selection."""
    chosen: PageSelection = st.session_state[_SELECTION]
    return chosen


def look_at(**changed: Any) -> None:
    """Change the selection; the fields are those of `PageSelection`."""
    st.session_state[_SELECTION] = selection().change(**changed)
    st.session_state[_LEFT_OUT] = []


def ignored_parts() -> list[str]:
    """Return the invalid parts of the session's address, until something is chosen."""
    problems: list[str] = st.session_state[_LEFT_OUT]
    return problems


def clamp(field: str, value: Any, sentence: str) -> None:
    """Clip a field to its range, and keep the sentence that explains it until something is chosen."""
    sentences = [*ignored_parts(), sentence]
    look_at(**{field: value})
    st.session_state[_LEFT_OUT] = sentences


def leave_out_unknown(field: str, known: Sequence[str]) -> str:
    """Remove parts of the address that the suite does not have, and return the sentence about it; "" if there are none.
    A part of a layer counts as that layer."""
    chosen = getattr(selection(), field)
    parts = field == "layer"
    if chosen is None or any(chosen == one or (parts and chosen.startswith(f"{one} ")) for one in known):
        return ""
    sentence = f"The address asks for {field} = {shorten(chosen, 40)!r}, which this suite does not have; left out."
    leave_fields({field: f"{sentence}{did_you_mean(chosen, known)}"})
    return ignored_parts()[-1]


def leave_fields(problems: Mapping[str, str], kept: Mapping[str, Any] | None = None) -> None:
    """Reset fields to the suite's, and keep the sentence that explains it, by field, until something is chosen.

    Args:
        kept: fields that stay, although others that belong to them are reset.
    """
    sentences = [*ignored_parts(), *problems.values()]
    look_at(**dict.fromkeys(problems), **(kept or {}))
    st.session_state[_LEFT_OUT] = sentences


def control(
    draw: Callable[..., T], field: str, shown: Any, default: Any, *args: Any, variant: str = "", **kwargs: Any
) -> T:
    """Draw a widget that shows and changes a field of the selection.

    Args:
        draw: such as `st.sidebar.slider`; gets `args` (a label, then options where it has some) and `kwargs`.
        shown: the current value, one of the options.
        default: the value that the address leaves out.
        variant: distinguishes a second widget for the same field.
    """
    # Every page has widgets of its own: streamlit forgets those of a page that was left, the selection stays.
    name = "-".join(filter(None, (st.session_state[_PAGE], field, variant)))
    used = st.session_state.get(_USED) == name
    if used:
        del st.session_state[_USED]
    # Something else has changed the field, so the widget is a new one: a browser that has not seen the change yet still
    # sends the old widget's value with whatever it asks for, and nobody chose that.
    elif st.session_state.get(_key(name), shown) != shown:
        st.session_state[_RENEWED][name] = st.session_state[_RENEWED].get(name, 0) + 1
    key = _key(name)
    if key not in st.session_state or st.session_state[key] != shown:  # what was chosen, in the order that is kept
        st.session_state[key] = shown
    # A browser that has lost a widget's value falls back to its default, and sends that as chosen.
    kwargs |= _falls_back(draw, shown, *args)
    listed = tuple(args[1]) if kwargs.get("accept_new_options") else ()
    return draw(*args, key=key, on_change=_take, args=(name, key, field, default, listed), **kwargs)


def _falls_back(draw: Callable[..., object], shown: Any, *args: Any) -> dict[str, Any]:
    """Return the argument that sets the default value of a widget."""
    takes = signature(draw).parameters
    if "index" in takes:
        return {"index": list(args[1]).index(shown)}
    return {"default" if "default" in takes else "value": shown}


def _key(name: str) -> str:
    """Return the current key of the widget with this name."""
    renewed = st.session_state.setdefault(_RENEWED, {}).get(name)
    return f"{name}--{renewed}" if renewed else name


def _take(name: str, key: str, field: str, default: Any, listed: Sequence[str]) -> None:
    # Sent by a widget that was replaced meanwhile.
    if key != _key(name):
        return
    st.session_state[_USED] = name
    value = st.session_state[key]
    if listed:
        value = complete_name(value, listed)
    if isinstance(value, list):  # a list is not hashable; with nothing chosen the field is as it was at first
        value = tuple(value) or getattr(HOME, field)
    if isinstance(default, int | float) and not isinstance(default, bool):
        value = type(default)(value)  # a slider that offers other steps by now gives the name of one
    look_at(**{field: getattr(HOME, field) if value == default else value})


def complete_name(typed: str, listed: Sequence[str]) -> str:
    """Return the listed name that begins with a typed text, if there is only one; else the text itself. A name that
    extends another one (`ties:scale=1`, of ties) counts as that one.

    >>> complete_name("calib", ["merged", "calibrated", "calibrated:rho=1"]), complete_name("t", ["ties", "tsv-m"])
    ('calibrated', 't')
    """
    begun = sorted((one for one in listed if one.lower().startswith(typed.strip().lower())), key=len)
    if typed in listed or not begun or any(one[len(begun[0]) :][:1] not in tuple(":@") for one in begun[1:]):
        return typed
    return begun[0]


def mirror_in_address() -> None:
    """Show the selection in the address bar, without a new entry in the browser's history."""
    st.session_state[_RUNS] = st.session_state.get(_RUNS, 0) + 1  # after Back the old address has to be replaced too
    shown = {"fields": [*vars(HOME)], "shown": selection().to_query(), "run": st.session_state[_RUNS]}
    _address(data=shown, key="address", height=1)


@st.cache_resource(show_spinner=False)
def map_worker() -> MapWorker:
    """Return the process that computes UMAPs."""
    return MapWorker()


def suite_reference() -> str:
    """Return the selected suite: an embedded name or a path."""
    return selection().suite


def current_session() -> Session:
    """Open the selected suite; it is opened again when one of its files has changed.

    Raises:
        FeatcalError: the suite cannot be used.
    """
    suite, files = opened_files()
    with st.spinner("Reading the models …"):
        opened = _held_sessions().get(files, lambda: open_resident(suite), lambda: suite_bytes(suite))
    share_cores(opened)
    return opened


def opened_files() -> tuple[Suite, Stamp]:
    """Return the selected suite and its files as they were at the first request of this run.

    Raises:
        FeatcalError: the suite cannot be used.
    """
    if _STAMP not in st.session_state:
        suite = load_suite(suite_reference())
        st.session_state[_STAMP] = suite, suite_stamp(suite)
    found: tuple[Suite, Stamp] = st.session_state[_STAMP]
    return found


def stamp() -> Stamp:
    """Return a key for the current state of the selected suite's files.

    Raises:
        FeatcalError: the suite cannot be used.
    """
    return opened_files()[1]


@st.cache_resource(show_spinner=False)
def _held_sessions() -> Held:
    return Held(server_rules())


def page_score_kind(session: Session, on: EvaluationSamples) -> How:
    """Return the kind of a page's scores: the usual one, but first tokens if whole answers take long."""
    how = recording.kind_of_scores(session)
    return "features" if how == "answers" and is_long(session, seconds_to_score(session, on)) else how


def kind_of_chart(session: Session, on: EvaluationSamples, kind: str) -> str:
    """Return the measurement (`featcal.figures.commands.KINDS`) behind a chart of scores: `kind`, or the one of whole
    answers if the page's scores are those."""
    return _OF_ANSWERS[kind] if page_score_kind(session, on) == "answers" else kind


def answer_scores(
    session: Session, models: Mapping[str, ModelRef], on: EvaluationSamples
) -> tuple[dict[str, Scores], str]:
    """Score models on the samples of the drift measurement, or return none and the reason.

    Raises:
        NumericalError: features that are not finite, unlike missing labels.
    """
    try:
        how = page_score_kind(session, on)
        with progress() as report:
            return {name: recording.score_run(session, model, on, how, report) for name, model in models.items()}, ""
    except InputError as error:
        return {}, str(error)


@contextmanager
def progress(where: DeltaGenerator | None = None) -> Iterator[Progress]:
    """Show a determinate progress bar with the elapsed time, removed when the work is done; none for short work.

    If a newer run of the page is waiting, drawing the bar raises streamlit's own signal and so ends the work.
    """
    place, started = (where or st).empty(), time.perf_counter()

    def report(label: str, done: int, total: int) -> None:
        seconds = time.perf_counter() - started
        if seconds < AT_ONCE:  # drawing takes a core from the work
            return
        text = f"{label}: {done} of {total}, {seconds:.1f} s"
        place.progress(done / total, text=text)

    try:
        yield report
    except FeatcalError:
        place.empty()
        raise
    place.empty()

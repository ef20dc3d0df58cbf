"""Choose the two models that a session looks at, in the sidebar of every page, the same on all of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import streamlit as st

from app import jobs, on_table, opening, options, page_end, state, view
from app.selection import CALIBRATED, HOME
from featcal.figures.names import plain, shorten
from featcal.figures.report.models import label_models
from featcal.figures.run_tables import title
from featcal.figures.theme import Shown
from featcal.session.model_ref import MERGED, ModelRef
from featcal.session.session import Session
from featcal.studies import library
from featcal.studies.history import History
from featcal.studies.recording import hash_of
from featcal.suite.methods import EXPERT, merger_names
from featcal.suite.name_grammar import name_on
from featcal.system.errors import InputError
from featcal.system.formatting import exactly, percent

NOTHING = "nothing"
"""In the list of second models: none."""
SHOWN_EXPERT = Shown(EXPERT, "expert")
SHOWN_BASE = Shown("base", "base")


@dataclass(frozen=True)
class Compared:
    """The models of a page by what charts call them, A first."""

    models: Mapping[str, ModelRef]

    @property
    def a(self) -> str:
        return next(iter(self.models))

    @property
    def b(self) -> str | None:
        """Return the second model; None where one is looked at alone."""
        return next(iter([*self.models][1:]), None)

    @property
    def pair(self) -> tuple[str, str] | None:
        """Return both models, where there are two."""
        return None if self.b is None else (self.a, self.b)

    @property
    def calibration(self) -> ModelRef | None:
        """Return the second model, else the first, where it is calibrated here."""
        found = [model for model in self.models.values() if model.config is not None]
        return found[-1] if found else None


def choose_in_sidebar(session: Session) -> Compared:
    """Choose both models in the sidebar, with the controls of the calibrated one, and make the calibrated ones."""
    options.chosen_config(session)  # what cannot be used is said on the page
    with st.sidebar:
        offered = offered_models(session)
        for field, label, first in (("a", "Model A", {}), ("b", "Model B", {NOTHING: NOTHING})):
            now, home = getattr(state.selection(), field) or NOTHING, getattr(HOME, field) or NOTHING
            _choose(field, label, now, home, first | offered)
        chosen = state.selection()
        if chosen.b is not None:
            swapped = {"a": chosen.b, "b": chosen.a}
            st.button(
                "Swap A and B", on_click=state.select, kwargs=swapped, icon=":material/swap_vert:", type="tertiary"
            )
        if state.selection().calibrates:
            options.controls_in_sidebar(session)
    return make_chosen(session)


def choose_merge(session: Session) -> str:
    """Let the merge that is calibrated be chosen in the sidebar, as model A, and return its name; where model A cannot
    be calibrated say why, offer the merge on the table and end the page."""
    with _end_explained(), st.sidebar:
        a = state.selection().a
        now = on_table.find_merge(session).name if a == CALIBRATED else a
        offered = offered_models(session)
        del offered[CALIBRATED]
        _choose("a", "Model A", now, HOME.a, offered)
    with _end_explained():
        why, merge = on_table.why_not(session, session.resolve(now)), on_table.find_merge(session).name
    if why:
        st.info(f"{plain(now)} {why}: this page calibrates merges.", icon=":material/info:")
        chosen = {"a": merge, "b": CALIBRATED}
        st.button(f"Calibrate {plain(merge)}", type="primary", on_click=state.select, kwargs=chosen)
        page_end.end_page()
    return now


def with_calibrated(session: Session, merge: str) -> Compared:
    """Return a merge that `choose_merge` gave, and its calibration, whatever B is."""
    return _make(session, [merge, CALIBRATED])


def _choose(field: str, label: str, now: str, home: str, offered: Mapping[str, str]) -> None:
    """Let a model be chosen from a list, or typed."""
    note = (
        "A name as `featcal drift --model` takes it, or its beginning; type a scale, a task's expert, or a checkpoint "
        "folder. Runs that are pinned on the Runs page stand here too."
    )
    state.control(
        st.selectbox,
        field,
        now,
        home,
        label,
        list(dict.fromkeys([*offered, now])),
        accept_new_options=True,
        format_func=lambda name: offered.get(name, name),
        help=note,
    )


def make_chosen(session: Session) -> Compared:
    """Return what the selection names, made where it is a calibration; end the page where a name stands for nothing."""
    return _make(session, _chosen_names())


def resolve_chosen(session: Session) -> dict[str, ModelRef]:
    """Return what the selection names, not made.

    Raises:
        InputError: a name that stands for nothing.
    """
    return _label(session, _chosen_names())


def _chosen_names() -> list[str]:
    selection = state.selection()
    return list(dict.fromkeys(filter(None, (selection.a or HOME.a, selection.b))))


def _make(session: Session, texts: list[str]) -> Compared:
    with _end_explained():
        found = _label(session, texts)
        with state.progress() as report:
            for model in found.values():
                if model.config is not None:
                    jobs.ensure_calibrated(session, model, report)
                else:
                    session.fit.weights(model)
    compared = Compared(found)
    _show_settings(session, compared)
    return compared


@contextmanager
def _end_explained() -> Iterator[None]:
    """End the page with one button back to the merged model where a name stands for nothing, or cannot be made."""
    try:
        yield
    except InputError as error:
        view.problem(error)
        back = {"a": HOME.a, "b": CALIBRATED if state.selection().calibrates else None}
        if (state.selection().a or HOME.a, state.selection().b) == (back["a"], back["b"]):
            back |= {"b": None, **dict.fromkeys(state.selection().options())}  # the options are what fails
        st.button("Back to the merged model", type="primary", on_click=state.select, kwargs=back)
        page_end.end_page()


def offered_models(session: Session) -> dict[str, str]:
    """Return names of models and what lists call them, in groups: what any suite has, pinned runs of this one, mergers
    with the score of the suite's table of methods, the best first, experts."""
    merge, has_base = MERGED.name, session.family.is_base_known
    with suppress(InputError):  # a name that stands for nothing is said where the models are made
        merge = on_table.find_merge(session).name
    anchor = name_on(f"anchor:rho={exactly(opening.defaults(session).rho)}", merge)
    first = ["merged", CALIBRATED, *(["base"] if has_base else []), anchor]
    pinned = [run for run in History().runs(hash_of(session)) if run.pinned]
    runs = {run.model: f"{shorten(title(run), 40)} · pinned run" for run in pinned if run.model != "expert"}
    scored = _scores_of_methods(state.reference(), hash_of(session))
    ranked = sorted(merger_names() if has_base else (), key=lambda name: -scored.get(name, -1.0))
    merges = {name: f"{name} · merge{f', {percent(scored[name])} %' if name in scored else ''}" for name in ranked}
    experts = [f"expert:{task}" for task in session.tasks]
    return dict(zip(first, first, strict=True)) | runs | merges | dict(zip(experts, experts, strict=True))


@st.cache_data(ttl="1m", show_spinner=False)
def _scores_of_methods(reference: str, suite_hash: str) -> dict[str, float]:
    """Return the average score of every method in the first table of methods of a suite; none where there is none."""
    studies = library.studies_of_suite(reference, suite_hash, library.own()[0])
    tables = [study for study in studies if study.kind == library.TABLE]
    found = tables[0].summaries() if tables else []
    return {one.method: one.average.mean for one in found if one.average is not None}


def _show_settings(session: Session, compared: Compared) -> None:
    """Draw one line for every model whose name does not say all of it."""
    with st.container(key="model-settings"):
        for shown, model in compared.models.items():
            if model.config is not None:
                st.caption(f"{shown}: {options.describe(model, session)}")
            elif model.name != shown:
                st.caption(f"{shown}: {plain(model.name)}")


def _label(session: Session, texts: list[str]) -> dict[str, ModelRef]:
    return label_models(
        (text, on_table.find_calibration(session) if text == CALIBRATED else session.resolve(text)) for text in texts
    )

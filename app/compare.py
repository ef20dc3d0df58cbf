"""Choose the subject of a session, the merge under repair, and the model that it is compared with, in the sidebar of
every page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import streamlit as st

from app import headline, jobs, on_table, opening, options, page_end, state, view
from app.selection import CALIBRATED, HOME, NOTHING
from featcal.figures.names import cut_text, plain, short_model
from featcal.figures.report.models import label_models
from featcal.figures.run_tables import run_title
from featcal.figures.theme import Shown
from featcal.server.lengths import is_long, seconds_to_make
from featcal.session.model_ref import MERGED, ModelRef
from featcal.session.session import Session
from featcal.studies import library
from featcal.studies.history import History
from featcal.studies.recording import hash_of
from featcal.suite.methods import EXPERT, merger_names
from featcal.suite.name_grammar import name_on
from featcal.suite.views import EvaluationSamples
from featcal.system.errors import InputError
from featcal.system.formatting import exactly, percent
from featcal.system.progress import silent

SHOWN_EXPERT = Shown(EXPERT, "expert")
SHOWN_BASE = Shown("base", "base")


@dataclass(frozen=True)
class Compared:
    """The models of a page by their names in charts, the merge under repair first."""

    models: Mapping[str, ModelRef]

    @property
    def merge(self) -> str:
        return next(iter(self.models))

    @property
    def other_model(self) -> str | None:
        """Return the model with which the merge is compared; None if the merge is shown alone."""
        return next(iter([*self.models][1:]), None)

    @property
    def pair(self) -> tuple[str, str] | None:
        """Return both models, if there are two."""
        return None if self.other_model is None else (self.merge, self.other_model)

    @property
    def calibration(self) -> ModelRef | None:
        """Return the second model, else the first, if the session calibrates it."""
        found = [model for model in self.models.values() if model.config is not None]
        return found[-1] if found else None


def choose_in_sidebar(session: Session, scored_on: EvaluationSamples | None = None) -> Compared:
    """Draw the choice of both models in the sidebar and the headline about them, and make the calibrated ones.

    Args:
        scored_on: samples of the headline's scores; None for those of the measurements.
    """
    return make_models(session, choose_models(session, scored_on))


def choose_models(session: Session, scored_on: EvaluationSamples | None = None) -> Compared:
    """Draw the choice of both models in the sidebar as `choose_in_sidebar` does, without making them."""
    options.chosen_config(session)  # what cannot be used is said on the page
    with end_explained():
        _draw_choice(session)
        compared = Compared(_label(session, _chosen_names(session)))
    headline.begin_headline(session, compared.models, scored_on)
    return compared


def choose_to_repair(session: Session) -> Compared:
    """Draw the choice in the sidebar as `choose_in_sidebar` does, and return the merge and its repair, even if another
    comparison is chosen; if the subject cannot be calibrated explain why, offer the merge and end the page."""
    with end_explained():
        _draw_choice(session)
        subject, merge = session.resolve(state.selection().merge), on_table.find_merge(session)
        why = on_table.why_not(session, subject)
    if why:
        st.info(f"{plain(state.selection().merge)} {why}: this page calibrates merges.", icon=":material/info:")
        chosen = {"merge": merge.name, "beside": CALIBRATED}
        st.button(f"Calibrate {plain(merge.name)}", type="primary", on_click=state.look_at, kwargs=chosen)
        page_end.end_page()
    with end_explained():
        compared = Compared(_label(session, [subject.name, CALIBRATED]))
    headline.begin_headline(session, compared.models)
    return compared


def make_models(session: Session, compared: Compared) -> Compared:
    """Make the calibrated ones of some models; end the page if one cannot be made."""
    with end_explained(), state.progress() as report:
        for model in compared.models.values():
            if model.config is not None:
                jobs.ensure_calibrated(session, model, report)
            else:
                session.fit.weights(model)
    return compared


def adopt_models(session: Session, compared: Compared) -> Compared:
    """Take over those of some models that a job calibrates, or end the page with its progress; quick ones are made
    where they are measured."""
    for model in compared.models.values():
        if model.config is not None and is_long(session, seconds_to_make(session, model)):
            with end_explained():
                jobs.ensure_calibrated(session, model, silent)
    return compared


def resolve_chosen(session: Session) -> dict[str, ModelRef]:
    """Resolve the selected models without making them.

    Raises:
        InputError: an unknown name.
    """
    return _label(session, _chosen_names(session))


def _draw_choice(session: Session) -> None:
    """Draw the lists of the merge and of the model compared with it."""
    chosen, offered = state.selection(), offered_models(session)
    subjects = {name: words for name, words in offered.items() if name not in ("base", "anchor")}
    subjects = {name: words for name, words in subjects.items() if not name.startswith(("anchor:", "expert:"))}
    with st.sidebar:
        _choose("merge", "Merge under repair", chosen.merge, HOME.merge, subjects)
        others = {CALIBRATED: "its repair", NOTHING: NOTHING} | offered
        others.pop(chosen.merge, None)
        _choose("beside", "Compare with", chosen.beside, HOME.beside, others)
        _draw_chip(session)


def _choose(field: str, label: str, now: str, home: str, offered: Mapping[str, str]) -> None:
    """Draw the choice of a model from a list, or by typing: a method, a folder, a Hub id, any name as for `--model`."""
    state.control(
        st.selectbox,
        field,
        now,
        home,
        label,
        list(dict.fromkeys([*offered, now])),
        accept_new_options=True,
        format_func=lambda name: offered.get(name) or (short_model(name) if "/" in name else name),
        placeholder="method, folder, Hub id or run",
    )


def _draw_chip(session: Session) -> None:
    """Draw the options of the repair as one button that leads to the page where they are chosen."""
    if state.selection().beside != CALIBRATED or on_table.why_not(session, session.resolve(state.selection().merge)):
        return
    model = on_table.find_calibration(session)
    words = plain(options.summarise_options(model, session))
    # Not a callback: `switch_page` works in the run of a page alone.
    if st.button(words, "model-settings", help=plain(model.name), icon=":material/tune:", type="tertiary"):
        state.look_at(bench=None)
        st.switch_page("../pages/calibrate.py")


def _chosen_names(session: Session) -> list[str]:
    """Return the names of the shown models: without a repair if there can be none, or if its job is not done."""
    chosen = state.selection()
    if chosen.beside in (NOTHING, chosen.merge):
        return [chosen.merge]
    if chosen.beside == CALIBRATED and (
        on_table.why_not(session, session.resolve(chosen.merge))
        or not jobs.is_quick_or_done(session, on_table.find_calibration(session))
    ):
        return [chosen.merge]
    return [chosen.merge, chosen.beside]


@contextmanager
def end_explained() -> Iterator[None]:
    """End the page with one button back to the suite's merge, for a name that is unknown or cannot be made."""
    try:
        yield
    except InputError as error:
        view.problem(error)
        back: dict[str, Any] = {"merge": HOME.merge, "beside": HOME.beside}
        if (state.selection().merge, state.selection().beside) == (HOME.merge, HOME.beside):
            back |= {"beside": NOTHING, **dict.fromkeys(state.selection().options())}  # the options are what fails
        st.button("Back to the merged model", type="primary", on_click=state.look_at, kwargs=back)
        page_end.end_page()


def offered_models(session: Session) -> dict[str, str]:
    """Return names of models and their labels in lists, in groups: those of every suite, pinned runs of this one,
    mergers with their scores in the suite's table of methods, best first, and experts."""
    merge, has_base = MERGED.name, session.family.is_base_known
    with suppress(InputError):  # a name that stands for nothing is said where the models are made
        merge = on_table.find_merge(session).name
    anchor = name_on(f"anchor:rho={exactly(opening.defaults(session).rho)}", merge)
    first = {"merged": "merged, the suite's own", **({"base": "base"} if has_base else {}), anchor: short_model(anchor)}
    pinned = [run for run in History().runs(hash_of(session)) if run.pinned]
    titles = {run.id: cut_text(run_title(run), 40) for run in pinned if run.model != "expert"}
    twice = {title for title, count in Counter(titles.values()).items() if count > 1}
    # A list chooses by what it shows: two runs of one title could not be told apart.
    marks = {one: f"{title} · {one[:6]}" if title in twice else title for one, title in titles.items()}
    runs = {run.model: f"{marks[run.id]} · pinned run" for run in pinned if run.id in marks}
    scored = _scores_of_methods(state.suite_reference(), hash_of(session))
    ranked = sorted(merger_names() if has_base else (), key=lambda name: -scored.get(name, -1.0))
    merges = {name: f"{name} · merge{f', {percent(scored[name])} %' if name in scored else ''}" for name in ranked}
    return first | runs | merges | {f"expert:{task}": f"expert, {task}" for task in session.tasks}


@st.cache_data(ttl="1m", show_spinner=False)
def _scores_of_methods(reference: str, suite_hash: str) -> dict[str, float]:
    """Return the average score of every method in the first table of methods of a suite; none without a table."""
    studies = library.studies_of_suite(reference, suite_hash, library.own()[0])
    tables = [study for study in studies if study.kind == library.TABLE]
    found = tables[0].summaries() if tables else []
    return {one.method: one.average.mean for one in found if one.average is not None}


def _label(session: Session, texts: list[str]) -> dict[str, ModelRef]:
    found = (on_table.find_calibration(session) if text == CALIBRATED else session.resolve(text) for text in texts)
    return label_models(zip(texts, found, strict=True), session.family)

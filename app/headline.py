"""Show the gain of the repair at the top of every page, as far as it is measured; the rest is computed on request."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from app import cards, jobs, state
from app.cards import Card, HeadlineNumbers
from app.selection import CALIBRATED
from featcal.evaluation.comparison import Comparison, compare_scores
from featcal.evaluation.evaluate import Scores
from featcal.figures import tables
from featcal.figures.names import plain
from featcal.figures.verdict.measure import is_repairable
from featcal.session.model_ref import EVERY_EXPERT, ModelRef
from featcal.session.session import Session
from featcal.suite.views import EvaluationSamples
from featcal.system.errors import InputError

_NOW, _MISSING = "headline", "headline: why there are no scores"


@dataclass(frozen=True)
class _Headline:
    """Subject of the headline on the current page, and its place."""

    place: DeltaGenerator
    session: Session
    models: Mapping[str, ModelRef]
    on: EvaluationSamples
    scored_on: EvaluationSamples
    kept: Sequence[Card] = ()
    """Cards of an earlier start with the same files, models and samples."""

    @property
    def key(self) -> Hashable:
        """Return a cache key for the headline's scores."""
        return state.stamp(), tuple(model.key for model in self.models.values()), self.scored_on

    @property
    def score_kind(self) -> str:
        """Return the kind of the headline's scores."""
        whole = self.scored_on.samples is None
        return "answers" if whole else state.page_score_kind(self.session, self.scored_on)

    def find_scores(self, model: ModelRef) -> Scores | None:
        """Return the scores of a model if they are cached."""
        measure = self.session.measure
        if self.score_kind == "answers":
            return measure.scores(model, self.scored_on) if measure.has_scores(model, self.scored_on) else None
        has = measure.has_features(model, self.scored_on) and measure.has_quick_scores(model, self.scored_on)
        return measure.quick_scores(model, self.scored_on) if has else None


def forget() -> None:
    """Forget the headline of the previous page."""
    st.session_state.pop(_NOW, None)


def begin_headline(
    session: Session, models: Mapping[str, ModelRef], scored_on: EvaluationSamples | None = None
) -> None:
    """Draw the headline here, with cached values.

    Args:
        models: the merge under repair, and the model that it is compared with, if there is one.
        scored_on: samples of the scores; None for those of the measurements.
    """
    on = EvaluationSamples(state.selection().n)
    now = st.session_state[_NOW] = _Headline(st.container(key="headline").empty(), session, models, on, scored_on or on)
    with now.place.container():
        cards.draw_cards(_make_cards(now))


def show_kept(kept: Sequence[Card]) -> None:
    """Show the cards that an earlier start measured for this page."""
    now: _Headline | None = st.session_state.get(_NOW)
    assert now is not None
    st.session_state[_NOW] = replace(now, kept=kept)
    with now.place.container():
        cards.draw_cards(kept)


def finish_headline() -> None:
    """Redraw the headline with the page's measurements, and a button for missing ones."""
    now: _Headline | None = st.session_state.get(_NOW)
    if now is None:
        return
    found = _make_cards(now)
    missing = [one.label for one in found if one.change == cards.UNKNOWN]
    # A look at the test split is for the Accuracy page to count.
    unscored = now.scored_on.split == "test"
    with now.place.container():
        cards.draw_cards(found)
        if len(now.models) == 1 and _is_repair_left_out(now):
            # Not a callback: `switch_page` works in the run of a page alone.
            if st.button("Repair it", "headline-repair", icon=":material/tune:", type="tertiary"):
                state.look_at(bench=None)
                st.switch_page("../pages/calibrate.py")
        elif missing and not unscored:
            label = f"Measure {', '.join(missing).lower()}"
            if st.button(plain(label), "headline-measure", icon=":material/straighten:", type="tertiary"):
                _measure(now)
                st.rerun()


def shown_cards() -> list[Card]:
    """Return the current cards; none if the page has no headline."""
    now: _Headline | None = st.session_state.get(_NOW)
    return [] if now is None else _make_cards(now)


def _is_repair_left_out(now: _Headline) -> bool:
    """Say whether the subject is compared with its repair, which a job has to make first."""
    (model,) = now.models.values()
    return state.selection().beside == CALIBRATED and is_repairable(model)


def _make_cards(now: _Headline) -> list[Card]:
    if now.kept:
        return [*now.kept]
    measure = now.session.measure
    scores = [found for model in now.models.values() if (found := now.find_scores(model)) is not None]
    whole = len(scores) == len(now.models)
    expert = now.find_scores(EVERY_EXPERT) if whole else None
    known = [model for model in now.models.values() if measure.has_features(model, now.on)]
    drift = [float(tables.relative_drift_table(measure.features(model, now.on)).iloc[-1]) for model in known]
    metric = tables.metric_name({"": scores[0]}) if scores else "score"
    return cards.make_cards(
        HeadlineNumbers(
            metric,
            now.scored_on.split or now.session.split,
            scores if whole else (),
            expert,
            _compare(scores) if whole else None,
            drift if len(drift) == len(now.models) else (),
            st.session_state.get(_MISSING, {}).get(now.key, ""),
        )
    )


def _compare(scores: Sequence[Scores]) -> Comparison | None:
    """Compare two models; None for a single one, or if both were not scored on the same samples in the same way."""
    with suppress(InputError):
        return compare_scores(scores[0], scores[1]) if len(scores) == 2 else None
    return None


def _measure(now: _Headline) -> None:
    """Measure the values of the cards; the reason for missing scores is remembered."""
    with state.progress() as report:
        for model in now.models.values():
            if model.config is not None:
                jobs.ensure_calibrated(now.session, model, report)
            now.session.measure.features(model, now.on, report)
    everyone = {**now.models, "expert": EVERY_EXPERT}
    _, missing = state.answer_scores(now.session, everyone, now.scored_on)
    if missing:
        st.session_state.setdefault(_MISSING, {})[now.key] = "no scores"

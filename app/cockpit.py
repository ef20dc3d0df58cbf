"""Draw the charts of the Calibrate page: the drift under the chosen options, and the known results of recipes."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

import pandas as pd
import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from app import opening, state, view
from app.downloads import Numbers
from featcal.drift.ledger import Features
from featcal.evaluation.evaluate import Scores
from featcal.figures import charts, tables
from featcal.session.model_ref import ModelRef
from featcal.session.session import Session
from featcal.studies.history import History
from featcal.studies.recording import hash_of, run_of
from featcal.suite.calibration_options import CalibrationConfig
from featcal.suite.views import EvaluationSamples
from featcal.system.formatting import percent

HEIGHT = 300
"""Pixels of both charts, so that they fit with the controls into a window of 1280 × 720."""
_SHOWN = "drift that was shown"


@dataclass(frozen=True)
class _Drawn:
    """Drift by model and layer, as last drawn."""

    of: Hashable
    """Files, samples and merge of the drawing (`_drawing_key`)."""
    config: CalibrationConfig
    drifts: Mapping[str, pd.Series]


def _drawing_key(on: EvaluationSamples, merge: ModelRef) -> Hashable:
    """Return a key for lines of drift apart from the options: files, samples and the merge."""
    return state.stamp(), on, merge.key


def score_of(features: Features, scores: Scores | None) -> str:
    """Return the single number that rates a model: its score in %, or the cosine without scores."""
    return f"{features.macro_cosine:.3f}" if scores is None else percent(scores.average)


def known_recipes(session: Session, merge: ModelRef, on: EvaluationSamples) -> dict[str, str]:
    """Return the results of every recipe at its defaults on a merge and the same samples, as far as the history has
    them."""
    known = {run.id: run for run in History().runs(hash_of(session))}
    how, given = state.page_score_kind(session, on), {}
    samples = opening.defaults(session, None, state.selection().samples).samples
    for recipe in opening.recipes(session):
        other = session.resolve(opening.defaults(session, recipe, samples), merge)
        run = known.get(run_of(session, other).id)
        found = run and run.find_measured(how, on.split or session.split, on.samples, on.seed)
        if found and found.scores:
            given[recipe] = f"{percent(found.mean)}\u00a0%"
    return given


def preview_chart(
    place: DeltaGenerator, on: EvaluationSamples, last: ModelRef, layer: str, drift: float
) -> DeltaGenerator | None:
    """Redraw the last result with the drift after one block under other options; return the chart, for the next redraw.
    None if another result was shown.

    Args:
        last: the calibration that the preview starts from.
    """
    config, of = last.require_calibration()
    shown: list[_Drawn] = st.session_state.get(_SHOWN, [])
    if not shown or (shown[-1].of, shown[-1].config) != (_drawing_key(on, of), config):
        return None
    figure = charts.compare_drift(shown[-1].drifts, preview=(layer, drift)).update_layout(height=HEIGHT)
    alt = f"Drift per layer of the last result, and the preview of {layer}: {drift:.3f}"
    return view.picture(figure, "previewed", alt, "preview", place)


def drift_chart(
    place: DeltaGenerator,
    on: EvaluationSamples,
    model: ModelRef,
    drifts: Mapping[str, pd.Series],
    numbers: Numbers,
) -> None:
    """Draw the drift of both models, and as a dotted line that of the calibrated one with the previous options on the
    same samples.

    Args:
        place: of the chart, or the chart that the preview was drawn into.
        model: the calibrated one.
        drifts: by model and layer, the calibrated model's second.
    """
    config, of = model.require_calibration()
    shown: list[_Drawn] = st.session_state.setdefault(_SHOWN, [])
    now = _Drawn(_drawing_key(on, of), config, drifts)
    if not shown or shown[-1].of != now.of:
        shown[:] = [now]
    elif shown[-1].config != config:
        shown[:] = [shown[-1], now]
    ghost = [*shown[0].drifts.values()][1] if shown[0].config != config else None
    figure = charts.compare_drift(drifts, ghost).update_layout(height=HEIGHT)
    alt = f"Drift per layer before and after: {tables.describe_ranges(drifts)}"
    view.picture(figure, "compared", alt, numbers.name, place)

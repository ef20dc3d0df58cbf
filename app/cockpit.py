"""Draw the cockpit of the Calibrate page: what the options give, in one line."""

from __future__ import annotations

from collections.abc import Mapping

from streamlit.delta_generator import DeltaGenerator

from app import export, flips, view
from app.compare import EXPERT
from featcal.drift.ledger import Features
from featcal.evaluation.evaluate import Scores
from featcal.figures import sample_tables, tables
from featcal.figures.names import plain
from featcal.session.session import Session
from featcal.suite.calibration_options import CalibrationConfig
from featcal.system.formatting import percent

KEY = "result"
_MEANING = (
    "From the first model to the calibrated one. Scores are of what the experts reach, cosines are to the experts."
)


def result(
    place: DeltaGenerator,
    session: Session,
    config: CalibrationConfig,
    features: Mapping[str, Features],
    scores: Mapping[str, Scores],
) -> None:
    """Draw what the calibrated model is worth, beside it the button that writes it.

    Args:
        features: of both models, the calibrated one second.
        scores: of both models and the experts; empty where there are none.
    """
    row = place.container(horizontal=True, vertical_alignment="center", key=KEY)
    row.markdown(result_line(features, scores), width="stretch", help=_MEANING + (f" {view.NOISE}" if scores else ""))
    export.button(session, config, row, place)


def result_line(features: Mapping[str, Features], scores: Mapping[str, Scores]) -> str:
    """Return the scores of both models with their difference and its interval, the experts', and both cosines."""
    (a, before), (b, after) = features.items()
    cosine = f"cosine **{before.macro_cosine:.3f} → {after.macro_cosine:.3f}**"
    if not scores:
        return cosine
    first, second, expert = (percent(scores[model].average) for model in (a, b, EXPERT))
    gain = flips.gain(scores, (a, b))
    said = "" if gain is None else f" ({sample_tables.difference_words(gain)})"
    score = f"{plain(tables.metric_name(scores).capitalize())} **{first} → {second} %**{said} of {expert}"
    return f"{score} · {cosine}"

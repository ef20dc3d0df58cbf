"""The cockpit of the Calibrate page: its one line of result."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from app_pages import healthy, opened, result_line

from featcal.evaluation.paired import compare_scores
from featcal.session.session import open_session
from featcal.studies import recording
from featcal.suite.calibration_options import CalibrationConfig
from featcal.suite.views import EvaluationSamples
from featcal.system.formatting import percent, points

pytestmark = [pytest.mark.usefixtures("instant_maps"), pytest.mark.filterwarnings("ignore")]  # streamlit warns a lot
CONFIG = CalibrationConfig(samples=64)
ON = EvaluationSamples(64)


def test_the_result_is_one_line_of_scores_and_cosines(tiny_suite_file: Path) -> None:
    app = opened(tiny_suite_file, "calibrate", rho="1.4")
    assert healthy(app)
    session, config = open_session(tiny_suite_file, resident=True), replace(CONFIG, rho=1.4)
    merged, calibrated, expert = (
        recording.score(session, model, ON, "features") for model in ("merged", config, "expert")
    )
    gain = compare_scores(merged, calibrated).average
    before, after = (session.measure.features(model, ON).macro_cosine for model in ("merged", config))
    noise = ", within noise" if gain.is_within_noise else ""
    assert result_line(app) == (
        f"Accuracy {percent(merged.average)} → {percent(calibrated.average)} % "
        f"({points(gain.difference)} points, {points(gain.low)} to {points(gain.high)}{noise}) "
        f"of {percent(expert.average)} · cosine {before:.3f} → {after:.3f}"
    )
    assert not app.metric

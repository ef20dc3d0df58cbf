"""The cockpit of the Calibrate page: its line of result, and the search for good options."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from app_pages import button, control, export_command, healthy, opened, result_line

from app import jobs, options
from featcal.evaluation.paired import compare_scores
from featcal.server.kinds import KINDS, Work
from featcal.session.model_names import select_command
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


def test_found_options_are_taken_over_as_they_were_found(
    tiny_suite_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []
    found: list[dict[str, Any]] = []

    def ensure(kind: str, args: dict[str, Any], seconds: float) -> dict[str, Any] | None:
        if kind == "select" and seconds > 0 and asked and not found:
            found.append(KINDS[kind](Work(str(tiny_suite_file), args, tmp_path, lambda *_: None)))
        asked.append(args)
        return found[0] if found else None

    monkeypatch.setattr(jobs, "ensure", ensure)
    app = opened(tiny_suite_file, "calibrate", samples="8", lam="0.2")
    assert healthy(app)
    assert asked == [{"options": {"samples": 8}}]
    command = select_command(str(tiny_suite_file), {"samples": 8})
    assert command == f"featcal select {tiny_suite_file} --samples 8"
    assert command in [one.value for one in app.code]
    app.run()
    (document,) = found
    margin, chosen = document["margin"], document["chosen"]
    table = next(one.value for one in app.dataframe if "against the default" in one.value)
    assert len(table) == len(document["candidates"]) == 8
    shown = f"{margin['difference']:+.4f} [{margin['low']:+.4f}, {margin['high']:+.4f}]"
    assert table[table[""].str.contains("chosen")]["against the default"].tolist() == [shown]
    button(app, "Take these options over").click().run()
    assert healthy(app)
    assert export_command(app).rsplit(" --out", 1)[0] == document["command"].rsplit(" --out", 1)[0]
    assert control(app, "recipe").value == chosen["recipe"]
    assert button(app, "These options are taken over").disabled


def test_fields_leave_out_what_the_recipe_brings(tiny_suite_file: Path) -> None:
    session = open_session(tiny_suite_file, resident=True)
    own = options.opening.defaults(session)
    refined = options.opening.defaults(session, "refined", 8)
    assert {*options.fields_of(session, own).values()} == {None}
    told = {name: value for name, value in options.fields_of(session, refined).items() if value is not None}
    assert told == {"recipe": "refined", "samples": 8}
    # The suite's own λ is another than that of the recipe.
    moved = options.fields_of(session, replace(refined, lam=own.lam, samples=64))
    assert (moved["lam"], moved["samples"]) == (own.lam, None)

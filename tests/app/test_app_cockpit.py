"""The cockpit of the Calibrate page: its line of result, the search for good options, and the way back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from app_pages import button, control, export_command, headline, healthy, opened, shown_model

from app import jobs, options, state
from app.trail import Trail
from featcal.evaluation.comparison import compare_scores
from featcal.figures import charts, tables
from featcal.figures.commands import command_lines
from featcal.figures.commands.measurement import ChartSource
from featcal.server.kinds import KINDS, Work
from featcal.session.session import open_session
from featcal.studies import recording
from featcal.suite.calibration_options import NUMBERS, RECIPES, CalibrationConfig
from featcal.suite.command_lines import select_line
from featcal.suite.views import EvaluationSamples
from featcal.system.formatting import exactly, percent, points

pytestmark = [pytest.mark.usefixtures("instant_maps"), pytest.mark.filterwarnings("ignore")]  # streamlit warns a lot
CONFIG = CalibrationConfig(samples=64)
ON = EvaluationSamples(64)


def test_the_headline_says_what_the_repair_brings(tiny_suite_file: Path) -> None:
    app = opened(tiny_suite_file, "calibrate", rho="1.4")
    assert healthy(app)
    session, config = open_session(tiny_suite_file, resident=True), replace(CONFIG, rho=1.4)
    merged, calibrated, expert = (
        recording.score_run(session, model, ON, "features") for model in ("merged", config, "expert")
    )
    gain = compare_scores(merged, calibrated).average
    before, after = (
        float(tables.relative_drift_table(session.measure.features(model, ON)).iloc[-1]) for model in ("merged", config)
    )
    noise = ", within noise" if gain.is_within_noise else ""
    gap = expert.average - merged.average
    worst = min(merged.tasks, key=lambda task: merged.tasks[task].value - expert.tasks[task].value)
    first, second, best = (percent(one.tasks[worst].value) for one in (merged, calibrated, expert))
    assert headline(app) == {
        "Accuracy, validation": (
            f"{percent(merged.average)} → {percent(calibrated.average)} %",
            f"{points(gain.difference)} points",
            f"({points(gain.low)} to {points(gain.high)}{noise})",
        ),
        "Gap closed": ("–", "no gap to the experts", "")
        if gap < 0.0005
        else (
            f"{100 * gain.difference / gap:.0f} %",
            f"of {percent(gap)} points",
            f"to the experts' {percent(expert.average)} %",
        ),
        "Final drift": (
            f"{before:.2f} → {after:.2f}",
            f"{100 * (after / before - 1):+.0f} %",
            "of the expert feature's norm",
        ),
        "Worst task": (f"{first} → {second} %", f"its expert {best} %", ""),
    }
    # On a narrow screen no sign stands alone in the next line.
    assert not [one.label for one in app.metric if " %" in f"{one.value} {one.delta} {one.proto.delta_description}"]


@pytest.mark.slow
def test_lines_of_drift_are_of_the_same_samples_and_the_same_first_model(
    tiny_suite_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[tuple[set[str], float | None]] = []
    draw = charts.compare_drift

    def noted(drifts: Any, ghost: Any = None, preview: Any = None) -> Any:
        drawn.append(({*drifts}, None if ghost is None else float(ghost.iloc[-1])))
        return draw(drifts, ghost, preview)

    monkeypatch.setattr(charts, "compare_drift", noted)
    app = opened(tiny_suite_file, "calibrate", n="8", samples="6")
    control(app, "rho").set_value(1.5).run()
    (_, none), *_, (_, before) = drawn
    assert none is None
    assert before is not None  # what the options before gave on 8 samples
    control(app, "n").set_value(16).run()
    assert drawn[-1][1] is None
    control(app, "rho").set_value(2.0).run()
    assert drawn[-1][1] not in (None, before)
    control(app, "merge").set_value("ties").run()
    assert drawn[-1][1] is None  # another merge's drift is no ghost of this one's
    drawn.clear()
    control(app, "rho").set_value(1.5).run()
    assert all("ties" in models and "merged" not in models for models, _ in drawn)
    assert healthy(app)


def test_charts_of_whole_answers_have_the_commands_that_score_them(
    tiny_suite_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = open_session(tiny_suite_file)
    assert state.kind_of_chart(session, ON, "decisions") == "decisions"
    monkeypatch.setattr(state, "page_score_kind", lambda *_: "answers")
    kinds = {kind: state.kind_of_chart(session, ON, kind) for kind in ("decisions", "gains")}
    measured = {kind: ChartSource(name, "lm-mini", ("merged",), ON) for kind, name in kinds.items()}
    assert command_lines(measured["decisions"]) == (
        "featcal evaluate lm-mini --model merged --eval-samples 64 --seed 42 --json",
    )
    assert "featcal evaluate" in measured["gains"].kind.note


@pytest.mark.slow
@pytest.mark.parametrize("a", ["merged", "ties"])
def test_found_options_are_taken_over_as_they_were_found(
    a: str, tiny_suite_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []
    found: list[dict[str, Any]] = []

    def ensure(kind: str, args: dict[str, Any], seconds: float) -> dict[str, Any] | None:
        if kind == "select" and seconds > 0 and asked and not found:
            found.append(KINDS[kind](Work(str(tiny_suite_file), args, tmp_path, lambda *_: None)))
        asked.append(args)
        return found[0] if found else None

    monkeypatch.setattr(jobs, "ensure", ensure)
    app = opened(tiny_suite_file, "calibrate", merge=a, samples="8", lam="0.2")
    assert healthy(app)
    assert asked == [{"options": {"samples": 8}, **({"model": a} if a == "ties" else {})}]
    command = select_line(str(tiny_suite_file), {"samples": 8}, a)
    assert command == f"featcal select {tiny_suite_file}{' --of ties' * (a == 'ties')} --samples 8"
    assert command in [one.value for one in app.code]
    app.run()
    (document,) = found
    margin, chosen = document["margin"], document["chosen"]
    table = next(one.value for one in app.dataframe if "against the default" in one.value)
    assert len(table) == len(document["candidates"]) == 9
    shown = f"{margin['difference']:+.4f} [{margin['low']:+.4f}, {margin['high']:+.4f}]"
    assert table[table[""].str.contains("chosen")]["against the default"].tolist() == [shown]
    button(app, "Use these options").click().run()
    assert healthy(app)
    assert export_command(app).rsplit(" --out", 1)[0] == document["command"].rsplit(" --out", 1)[0]
    assert control(app, "recipe").value == chosen["recipe"]
    assert button(app, "These options are in use").disabled


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


def test_a_trail_goes_back_and_forth_until_something_else_is_chosen() -> None:
    trail, steps = Trail(), [replace(CONFIG, rho=rho) for rho in (2.0, 2.1, 2.2, 2.3)]
    for one in (*steps, steps[-1]):
        trail.visit(one)
    assert (trail.find_step(-1), trail.find_step(1)) == (steps[2], None)  # the second of three moves
    trail.move(-1)
    trail.visit(steps[2])  # the page is drawn with it
    trail.move(-1)
    assert (trail.find_step(0), trail.find_step(-1), trail.find_step(1), trail.find_step(-2)) == (
        steps[1],
        steps[0],
        steps[2],
        None,
    )
    trail.move(5)
    assert trail.find_step(0) == steps[1]
    trail.visit(replace(CONFIG, rho=1.0))
    assert (trail.find_step(-1), trail.find_step(1)) == (steps[1], None)
    for number in range(7):
        trail.note("here", replace(CONFIG, seed=number), f"8{number}.0")
    trail.note("elsewhere", CONFIG, "70.0")
    trail.note("here", replace(CONFIG, seed=4), "84.5")
    last = [(2, "82.0"), (3, "83.0"), (4, "84.5"), (5, "85.0"), (6, "86.0")]
    assert [(one.seed, score) for one, score in trail.recent("here", CONFIG).items()] == last
    # The defaults and the best stay, however long ago they were tried.
    for number in range(7, 12):
        trail.note("here", replace(CONFIG, seed=number), "60.0")
    later = [(number, "60.0") for number in range(7, 12)]
    assert [(one.seed, score) for one, score in trail.recent("here", CONFIG).items()] == [last[-1], *later]
    recent = trail.recent("here", replace(CONFIG, seed=0))
    assert [(one.seed, score) for one, score in recent.items()] == [(0, "80.0"), last[-1], *later]
    assert trail.best("here") == replace(CONFIG, seed=6)
    assert trail.best("nowhere") is None


@pytest.mark.slow
def test_moves_are_undone_and_the_last_models_are_a_click_away(tiny_suite_file: Path) -> None:
    app = opened(tiny_suite_file, "calibrate", samples="8")
    assert (button(app, "Undo").disabled, button(app, "Redo").disabled) == (True, True)
    for rho in (1.8, 1.6, 1.4):
        control(app, "rho").set_value(rho).run()
    session, scores = open_session(tiny_suite_file, resident=True), {}
    for rho in (2.0, 1.8, 1.6, 1.4):
        config = replace(CONFIG, samples=8, rho=rho)
        scores[rho] = percent(recording.score_run(session, config, ON, "features").average)
    chips = [one.label for one in app.button if str(one.key).startswith("chip-")]
    assert chips == [f"n 8 · {scores[2.0]}", *(f"ρ {rho} · n 8 · {scores[rho]}" for rho in (1.8, 1.6, 1.4))]
    button(app, "Undo").click().run()
    assert (shown_model(app), control(app, "rho").value) == ("λ 0.05 · ρ 1.6 · α 0.3 · n 8", 1.6)
    button(app, "Redo").click().run()
    assert control(app, "rho").value == 1.4
    button(app, f"ρ 1.8 · n 8 · {scores[1.8]}").click().run()
    assert control(app, "rho").value == 1.8
    button(app, "Undo").click().run()
    assert (control(app, "rho").value, healthy(app)) == (1.4, True)
    # The history may know other recipes too, from tests before.
    assert any(one.value.startswith(f"At their defaults: paper {scores[2.0]}\u00a0%") for one in app.caption)


@pytest.mark.slow
def test_the_recommended_recipe_is_a_click_away(tiny_suite_file: Path) -> None:
    app = opened(tiny_suite_file, "calibrate", samples="8", rho="1.5")
    recommended = "Recommended: informed"
    button(app, recommended).click().run()
    own = options.opening.defaults(open_session(tiny_suite_file, resident=True), "informed", 8)
    assert control(app, "recipe").value == "informed"
    assert {name: control(app, name).value for name in NUMBERS["informed"]} == {
        name: getattr(own, name) for name in NUMBERS["informed"]
    }
    assert recommended not in [one.label for one in app.button]


@pytest.mark.parametrize("recipe", RECIPES)
def test_why_the_defaults_are_what_they_are(tiny_suite_file: Path, recipe: str) -> None:
    session = open_session(tiny_suite_file, resident=True)
    config = options.opening.defaults(session, recipe, 8)
    first, second, third = options.defaults_explained(session, config).split(". ")
    assert ("chosen in its place" in first) == (recipe != "paper")
    for name in NUMBERS[recipe]:
        assert f"{options.OPTIONS[name].symbol} {exactly(getattr(config, name))}" in second
    assert ("the same for every number of samples" in third) == (recipe != "refined")
    if recipe == "refined":
        assert "λ (0.05 at 8, 0.01 at 16, 0.0032 at 32, 0.001 at 64, 0.001 at 128, 0.001 at 256)" in third

"""The Calibrate page as an instrument: parts, previews, where it helps, the anchor alone, seeds, conditioning."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from app_pages import (
    button,
    charts,
    control,
    export_command,
    fields,
    final_drifts,
    go,
    healthy,
    name_of,
    opened,
    shown_model,
)
from tiny_clip import BLOCKS, TASKS

from app import cockpit
from featcal.evaluation.evaluate import Scores, TaskScore
from featcal.export.card_parts import load_card
from featcal.figures import repair_charts, repair_tables, tables
from featcal.session.fits import Fits
from featcal.session.session import open_session
from featcal.suite.calibration_options import CalibrationConfig
from featcal.suite.views import DriftOptions, EvaluationSamples
from featcal.system.errors import NumericalError
from featcal.system.formatting import percent
from featcal.system.json_files import read_json

pytestmark = [pytest.mark.usefixtures("instant_maps"), pytest.mark.filterwarnings("ignore")]  # streamlit warns a lot
CONFIG = CalibrationConfig(samples=64)
ON = EvaluationSamples(64)


def chooser(app: Any, field: str) -> Any:
    return next(one for one in app.multiselect if name_of(one) == f"calibrate-{field}")


def table(app: Any, column: str) -> Any:
    return next(one.value for one in app.dataframe if column in one.value)


def said(app: Any, words: str) -> list[str]:
    return [one.value for one in app.caption if words in one.value]


def trace(app: Any, name: str) -> Any:
    """Return the trace of that name in the first chart; None where it has none."""
    drawn = json.loads(app.get("plotly_chart")[0].proto.spec)["data"]
    found = next((one for one in drawn if one["name"] == name), None)
    return found and {axis: found[axis] for axis in ("x", "y")}


@pytest.mark.slow
def test_parts_are_chosen_on_the_page_and_shown_on_all(tiny_suite_file: Path) -> None:
    app = opened(tiny_suite_file, "calibrate")
    whole = final_drifts(app)[1]
    assert [chooser(app, name).value for name in ("blocks", "maps", "tasks")] == [[], [], []]
    chooser(app, "blocks").set_value(["block 2", "block 0"]).run()
    chooser(app, "tasks").set_value([TASKS[1]]).run()
    assert healthy(app)
    assert final_drifts(app)[1] != whole
    said = f"λ 0.05 · ρ 2 · α 0.3 · n 64 · only block 0, block 2 · only {TASKS[1]}"
    assert shown_model(app) == said
    assert f"--blocks 'block 0,block 2' --tasks {TASKS[1]} --out" in export_command(app)
    assert export_command(app).endswith(f"-block-0-block-2-{TASKS[1]}")
    go(app, "drift")
    assert healthy(app)
    assert shown_model(app) == said
    go(app, "calibrate")
    assert chooser(app, "blocks").value == ["block 0", "block 2"]
    chooser(app, "blocks").set_value([]).run()
    chooser(app, "tasks").set_value([]).run()
    assert shown_model(app) == "λ 0.05 · ρ 2 · α 0.3 · n 64"
    assert final_drifts(app)[1] == whole


@pytest.mark.slow
def test_what_is_written_says_what_its_dtype_costs(own_suite_file: Path, tmp_path: Path) -> None:
    content = yaml.safe_load(own_suite_file.read_text())
    own_suite_file.write_text(yaml.safe_dump(content | {"merged": content["merged"] | {"dtype": "bfloat16"}}))
    app = opened(own_suite_file, "calibrate")
    app.text_input(key="folder").set_value(str(tmp_path / "mine"))
    button(app, "Write the checkpoint").click().run()
    assert healthy(app)
    share = percent(read_json(tmp_path / "mine" / "featcal.json")["storing"]["share"])
    (said,) = [one.value for one in app.caption if one.value.startswith("Note: ")]
    assert f"rounding to bfloat16 moves the weights by {share}\u00a0% of what calibration moved them" in said


def test_parts_come_from_the_address(tiny_suite_file: Path) -> None:
    app = opened(tiny_suite_file, "calibrate", blocks="block 1", maps="mlp,attention", seed="7")
    assert healthy(app)
    assert (chooser(app, "blocks").value, chooser(app, "maps").value) == (["block 1"], [])  # all kinds are no choice
    assert "--seed 7 --blocks 'block 1' --out" in export_command(app)
    session = open_session(tiny_suite_file, resident=True)
    measured = session.measure.features(replace(CONFIG, blocks=("block 1",), seed=7), ON)
    assert final_drifts(app)[1] == f"{tables.relative_drift_table(measured).iloc[-1]:.2f}"


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"blocks": "blok 1"}, "Did you mean 'block 1'"),
        ({"lam": "-1", "alpha": "7"}, "lam = -1.0 cannot be used and is left out: lam is -1; it"),
        ({"recipe": "refine", "rho": "1.4"}, "recipe = refine cannot be used and is left out: recipe is 'refine'"),
    ],
)
def test_what_cannot_be_used_is_left_out_with_a_sentence(
    tiny_suite_file: Path, asked: dict[str, str], said: str
) -> None:
    app = opened(tiny_suite_file, "calibrate", samples="8", **asked)
    assert healthy(app)
    left_out = [one.value for one in app.warning if "left out" in one.value]
    assert len(left_out) == len(asked) - ("rho" in asked)
    assert said in left_out[0]
    assert shown_model(app) == f"λ 0.05 · ρ {asked.get('rho', '2')} · α 0.3 · n 8"
    assert fields(app, "select_slider") >= {"lam", "rho", "alpha", "samples"}


def test_a_preview_comes_first_and_the_exact_run_takes_its_place(
    tiny_suite_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    previews: list[tuple[str, float]] = []
    drawn = cockpit.preview_chart

    def note(place: Any, on: Any, last: Any, layer: str, drift: float) -> Any:
        previews.append((layer, drift))
        return drawn(place, on, last, layer, drift)

    monkeypatch.setattr(cockpit, "preview_chart", note)
    app = opened(tiny_suite_file, "calibrate", layer="block 1")  # of the Drift page
    shown = trace(app, "calibrated")["y"]
    assert previews == []
    control(app, "rho").set_value(1.2).run()
    assert healthy(app)
    session, other = open_session(tiny_suite_file, resident=True), replace(CONFIG, rho=1.2)
    tasks = session.measure.features(other, ON).tasks.values()
    exact = sum(task.layers[1].relative_drift for task in tasks) / len(TASKS)
    assert previews == [("block 0", pytest.approx(exact, rel=1e-4))]  # and not a share of the change
    assert not said(app, "are being computed")
    assert trace(app, "preview") is None
    assert trace(app, "before")["y"] == shown
    control(app, "samples").set_value(32).run()  # other features: nothing can be said before
    assert healthy(app)
    assert len(previews) == 1

    def fail(*_: object, **__: object) -> None:
        raise NumericalError("not positive definite; raise lam")

    monkeypatch.setattr("featcal.session.fits.calibrate_family", fail)
    held, last = session.fit.preview(replace(other, samples=32), "block 0", ON), trace(app, "calibrated")["y"]
    control(app, "rho").set_value(0.4).run()
    assert not app.exception
    now = held.solve(replace(CONFIG, samples=32, rho=0.4)).drift.values()
    assert trace(app, "preview")["x"][-1] == "block 0"
    assert trace(app, "preview")["y"] == pytest.approx([last[0], sum(now) / len(TASKS)])
    assert trace(app, "calibrated")["y"] == last
    assert len(said(app, "The other blocks are being computed")) == 1
    assert "not positive definite" in app.error[0].value


def test_the_anchor_alone_stands_beside_the_result(tiny_suite_file: Path) -> None:
    app = opened(tiny_suite_file, "calibrate", rho="1.5")
    frame = table(app, "final drift").set_index("model")
    assert list(frame.index) == ["merged", "anchor only, rho 1.5", "calibrated"]
    session = open_session(tiny_suite_file, resident=True)
    measured, scored = (
        session.measure.features("anchor:rho=1.5", ON),
        session.measure.quick_scores("anchor:rho=1.5", ON),
    )
    row = frame.loc["anchor only, rho 1.5"]
    assert row["score, %"] == pytest.approx(100 * scored.average)
    drifts = [task.layers[-1].relative_drift for task in measured.tasks.values()]
    assert row["final drift"] == pytest.approx(sum(drifts) / len(drifts))
    merged, anchor, calibrated = frame["score, %"]
    assert any(f"from merged at {merged:.1f}\u00a0%: the anchor alone {anchor - merged:+.1f} points, the data on top "
               f"of it {calibrated - anchor:+.1f}, both together {calibrated - merged:+.1f} points" in one.value
               for one in app.caption)  # fmt: skip
    (shown,) = (one for one in app.dataframe if "score, %" in one.value)
    assert json.loads(shown.proto.columns)["score, %"]["type_config"]["format"] == "%.1f"
    app = opened(tiny_suite_file, "calibrate", rho="1.5", merge="ties")
    frame, anchor = table(app, "final drift").set_index("model"), session.measure.features("anchor:rho=1.5@ties", ON)
    assert list(frame.index) == ["ties", "anchor only, rho 1.5", "calibrated"]
    drifts = [task.layers[-1].relative_drift for task in anchor.tasks.values()]
    assert frame.loc["anchor only, rho 1.5", "final drift"] == pytest.approx(sum(drifts) / len(drifts))
    assert drifts != [task.layers[-1].relative_drift for task in measured.tasks.values()]


@pytest.mark.slow
def test_where_it_helps_is_a_map_of_tasks_and_layers(tiny_suite_file: Path) -> None:
    app = opened(tiny_suite_file, "calibrate", booked="true")
    assert healthy(app)
    assert charts(app) == 4
    session = open_session(tiny_suite_file, resident=True)
    before, after = (session.measure.features(model, ON) for model in ("merged", CONFIG))
    changed = repair_tables.drift_change(before, after)
    assert len(changed) == len(TASKS) * (BLOCKS + 2)
    row = changed[(changed["task"] == TASKS[1]) & (changed["layer"] == "block 1")].iloc[0]
    own = after.tasks[TASKS[1]].layers[2].relative_drift - before.tasks[TASKS[1]].layers[2].relative_drift
    assert row["change"] == pytest.approx(own)
    ledgers = [session.measure.drift(model, DriftOptions(64, attribution=True)) for model in ("merged", CONFIG)]
    booked = repair_tables.contribution_change(ledgers[0], ledgers[1])
    for task in TASKS:
        final = after.tasks[task].layers[-1].relative_drift - before.tasks[task].layers[-1].relative_drift
        assert booked[booked["task"] == task]["change"].sum() == pytest.approx(final, abs=1e-5)
    drawn = [json.loads(one.proto.spec)["data"][0] for one in app.get("plotly_chart")]
    assert [one["type"] for one in drawn].count("heatmap") == 2
    figure = repair_charts.change_map(changed, "drift").data[0]
    assert figure.z.shape == (len(TASKS), BLOCKS + 2)
    assert all(colour.startswith("#") for _, colour in figure.colorscale)  # numbers are legible on either ground
    assert figure.z[1][2] == pytest.approx(own)
    assert (figure.zmin, figure.zmax) == (-abs(figure.z).max(), abs(figure.z).max())
    assert figure.customdata[1][2][0] == pytest.approx(before.tasks[TASKS[1]].layers[2].relative_drift)


@pytest.mark.slow
def test_three_seeds_show_their_spread(tiny_suite_file: Path) -> None:
    app = opened(tiny_suite_file, "calibrate", samples="8", spread="true", seed="5")
    assert healthy(app)
    assert charts(app) == 4
    frame = table(app, "range").set_index("task")
    session = open_session(tiny_suite_file, resident=True)
    own = [100 * session.measure.quick_scores(replace(CONFIG, samples=8, seed=seed), ON).average for seed in (5, 6, 7)]
    average = frame.loc["average"]
    assert [average[f"seed {seed}"] for seed in (5, 6, 7)] == pytest.approx(own)
    assert average["mean"] == pytest.approx(sum(own) / 3)
    assert (average["lowest"], average["highest"]) == pytest.approx((min(own), max(own)))
    assert average["range"] == pytest.approx(max(own) - min(own))


def test_a_spread_keeps_tasks_apart() -> None:
    right = torch.tensor([0, 1, 1, 0])

    def scores(a: float, b: float) -> Scores:
        tasks = {name: TaskScore("accuracy", value, right, right) for name, value in (("a", a), ("b", b))}
        return Scores("s", "m", "test", tasks)

    frame = repair_tables.spread_table({1: scores(0.5, 0.9), 2: scores(0.7, 0.5)}).set_index("task")
    assert frame.loc["a", ["mean", "lowest", "highest", "range"]].tolist() == pytest.approx([60, 50, 70, 20])
    assert frame.loc["average", ["mean", "range"]].tolist() == pytest.approx([65, 10])
    bars = repair_charts.spread_bars(frame.reset_index(), "accuracy, %").data[0]
    assert (bars.error_y.array[0], bars.error_y.arrayminus[0]) == pytest.approx((10, 10))


@pytest.mark.slow
def test_conditioning_is_measured_when_asked_for(tiny_suite_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    real = Fits.conditioning

    def counted(self: Fits, *args: Any) -> Any:
        asked.append(args)
        return real(self, *args)

    monkeypatch.setattr(Fits, "conditioning", counted)
    app = opened(tiny_suite_file, "calibrate")
    assert asked == []
    control(app, "conditioning").set_value(True).run()
    assert healthy(app)
    frame = table(app, "effective_rank")
    assert len(frame) == 4 * (BLOCKS - 1) + 5
    assert frame["condition"].max() <= 1 + len(TASKS) / 0.05
    worst = frame.loc[frame["condition"].idxmax()]
    assert any(f"{worst['condition']:.3g}, {worst['layer']}" in one.value for one in app.caption)


@pytest.mark.slow
def test_the_refined_recipe_has_controls_and_defaults_of_its_own(tiny_suite_file: Path) -> None:
    app = opened(tiny_suite_file, "calibrate", lam="0.2", sources="true")
    control(app, "recipe").set_value("refined").run()
    assert healthy(app)
    assert shown_model(app) == "refined · λ 0.001 · ρ 2 · α 0.6 · β 0.5 · n 64"
    assert control(app, "beta").value == 0.5
    assert "--recipe refined --lam 0.001 --rho 2 --alpha 0.6 --beta 0.5" in export_command(app)
    assert any("block 0 comes first, as a point in the chart" in one.value for one in app.caption)
    session = open_session(str(tiny_suite_file))
    found = session.measure.features(session.resolve("calibrated:recipe=refined,samples=64"), ON)
    assert final_drifts(app)[1] == f"{tables.relative_drift_table(found).iloc[-1]:.2f}"
    control(app, "beta").set_value(0.0).run()
    assert shown_model(app) == "refined · λ 0.001 · ρ 2 · α 0.6 · β 0 · n 64"
    app.session_state["selection"] = app.session_state["selection"].change(tab="Feature sources")
    go(app, "drift")
    assert healthy(app)
    assert any("compare objectives of the paper's recipe" in one.value for one in app.caption)
    go(app, "calibrate")
    control(app, "recipe").set_value("paper").run()
    assert shown_model(app) == "λ 0.05 · ρ 2 · α 0.3 · n 64"


@pytest.mark.slow
def test_cautious_is_one_switch_for_two_numbers(tiny_suite_file: Path) -> None:
    app = opened(tiny_suite_file, "calibrate")
    assert "cautious" not in fields(app, "toggle")
    assert "weigh_tokens" not in fields(app, "toggle")
    control(app, "recipe").set_value("informed").run()
    assert healthy(app)
    assert control(app, "cautious").value is False
    control(app, "cautious").set_value(True).run()
    assert healthy(app)
    assert (control(app, "alpha").value, control(app, "beta").value) == (0.3, 0.0)
    assert "--alpha 0.3 --beta 0 --mu 0.1" in export_command(app)
    assert "cautious" not in export_command(app)
    control(app, "beta").set_value(0.5).run()
    assert control(app, "cautious").value is False
    control(app, "cautious").set_value(True).run()
    control(app, "cautious").set_value(False).run()
    assert healthy(app)
    assert "--alpha 0.6 --beta 0.5 --mu 0.1" in export_command(app)
    control(app, "weigh_tokens").set_value(True).run()
    assert healthy(app)
    assert "--weigh-tokens --out" in export_command(app)
    control(app, "recipe").set_value("paper").run()
    assert healthy(app)
    assert "weigh" not in export_command(app)


@pytest.mark.slow
def test_what_was_written_shows_its_card_and_the_way_to_the_hub(tiny_suite_file: Path, tmp_path: Path) -> None:
    app = opened(tiny_suite_file, "calibrate")
    app.text_input(key="folder").set_value(str(tmp_path / "mine"))
    button(app, "Write the checkpoint").click().run()
    assert healthy(app)
    file = tmp_path / "mine" / "README.md"
    assert file.read_text().strip() in [one.value for one in app.code]
    assert f"featcal push {tmp_path / 'mine'} OWNER/NAME --license ID" in [one.value for one in app.code]
    seen = load_card(file.parent).data.eval_results or []  # what the page showed
    assert {one.dataset_split for one in seen} == {"validation"}
    button(app, "Score on the test split and fill in the card").click().run()
    assert healthy(app)
    scores = open_session(tiny_suite_file).measure.scores(str(file.parent), EvaluationSamples(None, "test"))
    found = [one for one in load_card(file.parent).data.eval_results or [] if one.dataset_split == "test"]
    assert [one.metric_value for one in found] == [one.value for one in scores.tasks.values()]
    assert file.read_text().strip() in [one.value for one in app.code]

"""Walks through several pages in one session: whatever was chosen, on whichever page, is what every page shows."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from app_pages import (
    PAGES,
    button,
    control,
    controls,
    export_command,
    final_drifts,
    go,
    headline,
    healthy,
    name_of,
    opened,
    shown_model,
)
from clip_config import clip_config
from safetensors.torch import load_file, save_file
from streamlit.testing.v1 import AppTest
from suite_edits import Edit

from app import catalogue, export, selection, state
from app.selection import HOME, PageSelection, from_query
from featcal.calibration.calibrate import CalibrationResult, calibrate_family
from featcal.family.opening import Family
from featcal.figures import tables
from featcal.preflight.check import Preflight
from featcal.session.fingerprint import suite_stamp
from featcal.session.session import open_session
from featcal.suite.calibration_options import CalibrationConfig
from featcal.suite.views import EvaluationSamples
from featcal.system.errors import InputError

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("instant_maps"),
    pytest.mark.filterwarnings("ignore"),
]  # streamlit warns a lot
OPTIONS = {"lam": "0.0002", "rho": "1.2", "alpha": "0.35", "samples": "8"}
SHOWN = "λ 0.0002 · ρ 1.2 · α 0.35 · n 8"


def walk(app: AppTest, pages: tuple[str, ...], expected: str, **held: Any) -> None:
    """Every page in turn shows this calibrated model, and these values wherever it has a control for them."""
    for page in pages:
        go(app, page)
        assert healthy(app), page
        assert shown_model(app) == expected, page
        for field, value in held.items():
            assert all(one.value == value for one in controls(app, field)), (page, field)


@pytest.mark.parametrize(
    "pages", [PAGES, pytest.param(PAGES[::-1], marks=pytest.mark.nightly)], ids=["forwards", "backwards"]
)
def test_options_from_a_link_hold_on_every_page(tiny_suite_file: Path, pages: tuple[str, ...]) -> None:
    app = opened(tiny_suite_file, pages[0], beside="calibrated", n="16", task="signs", **OPTIONS)
    walk(app, pages, SHOWN, n=16, task="signs")


def test_options_set_by_hand_on_one_page_hold_on_every_other(tiny_suite_file: Path) -> None:
    app = opened(tiny_suite_file, "calibrate")
    for field, value in OPTIONS.items():
        control(app, field).set_value(float(value) if "." in value else int(value)).run()
    walk(app, PAGES[::-1], SHOWN)
    go(app, "calibrate")
    control(app, "rho").set_value(0.7).run()
    assert shown_model(app) == SHOWN.replace("ρ 1.2", "ρ 0.7")
    walk(app, PAGES, SHOWN.replace("ρ 1.2", "ρ 0.7"))


def test_options_set_by_a_button_hold_on_every_page(tiny_suite_file: Path) -> None:
    app = opened(tiny_suite_file, "calibrate", **OPTIONS)
    button(app, "Defaults").click().run()
    walk(app, ("calibrate", "drift", "calibrate", "accuracy"), "λ 0.05 · ρ 2 · α 0.3 · n 64")


def test_the_tour_keeps_the_calibrated_model(tiny_suite_file: Path) -> None:
    app = opened(tiny_suite_file)
    for page in ("calibrate", "features", "cosines", "accuracy", "drift"):
        go(app, page)
        assert healthy(app)
        assert shown_model(app) == "λ 0.05 · ρ 2 · α 0.3 · n 64", page


def test_a_calibration_that_was_switched_off_stays_off(tiny_suite_file: Path) -> None:
    app = opened(tiny_suite_file, "features", beside="calibrated")
    control(app, "beside").set_value("nothing").run()
    for page in ("cosines", "drift", "features"):
        assert shown_model(go(app, page)) is None


@pytest.mark.parametrize(
    ("typed", "taken"),
    [("ANCH", "anchor:rho=2"), ("expert:s", "expert:signs"), ("expert:", None), ("tsvm", None), ("ties:scale", None)],
)
def test_the_beginning_of_one_listed_name_is_that_name(tiny_suite_file: Path, typed: str, taken: str | None) -> None:
    app = opened(tiny_suite_file, "cosines", n="8")
    control(app, "beside").options.append(typed)
    control(app, "beside").set_value(typed).run()
    assert app.session_state["selection"].beside == (taken or typed)
    assert control(app, "beside").value == (taken or typed)
    assert bool(app.error) == (taken is None)
    assert ("Did you mean 'tsv-m'?" in "".join(one.value for one in app.error)) == (typed == "tsvm")


def test_another_suite_starts_from_its_own_options(tiny_suite_file: Path, edit_suite: Edit) -> None:
    other = edit_suite(lambda content: content.update(name="other", calibration={"rho": 1.5, "samples": 9}))
    app = opened(tiny_suite_file, "calibrate", task="signs", layer="block 0", **OPTIONS)
    control(app, "suite").options.append(str(other))  # what is typed into the field
    control(app, "suite").set_value(str(other)).run()
    assert shown_model(app) == "λ 0.05 · ρ 1.5 · α 0.3 · n 9"
    walk(app, ("cosines", "accuracy", "runs", "models"), "λ 0.05 · ρ 1.5 · α 0.3 · n 9", task="pets")
    walk(app, ("features",), "λ 0.05 · ρ 1.5 · α 0.3 · n 9", task="pets")
    assert control(app, "layer").value == "head"  # what it begins with


def test_pages_show_the_numbers_of_the_model_they_name(own_suite_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[CalibrationConfig] = []

    def counted(family: Family, config: CalibrationConfig, **more: Any) -> CalibrationResult:
        computed.append(config)
        return calibrate_family(family, config, **more)

    monkeypatch.setattr("featcal.session.fits.calibrate_family", counted)
    app = opened(own_suite_file, "calibrate", **OPTIONS)
    drift = final_drifts(app)[1]
    go(app, "cosines")
    session = open_session(own_suite_file, resident=True)  # the app holds it
    config = clip_config(lam=0.0002, rho=1.2, alpha=0.35, samples=8)
    assert (
        drift == f"{tables.relative_drift_table(session.measure.features(config, EvaluationSamples(64))).iloc[-1]:.2f}"
    )
    assert computed == [config]  # and nothing else on the way


def test_the_offered_folder_says_what_is_written(tiny_suite_file: Path, edit_suite: Edit, tmp_path: Path) -> None:
    app = opened(tiny_suite_file, "calibrate")
    control(app, "rho").set_value(2.1).run()
    control(app, "biases").set_value(False).run()
    name = "tiny-lam0.05-rho2.1-alpha0.3-n64-no-biases"
    assert app.text_input(key="folder").value == name
    assert export_command(app).endswith(f"--rho 2.1 --alpha 0.3 --samples 64 --no-biases --out {name}")
    app.text_input(key="folder").set_value(str(tmp_path / "mine")).run()
    assert export_command(app).endswith(f"--out {tmp_path / 'mine'}")
    other = edit_suite(lambda content: content.update(name="my suite"))
    control(app, "suite").options.append(str(other))
    control(app, "suite").set_value(str(other)).run()
    assert app.text_input(key="folder").value == "my-suite-lam0.05-rho2-alpha0.3-n64"


def test_what_is_written_has_the_options_that_its_name_says(
    tiny_suite_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    app = opened(tiny_suite_file, "calibrate", **OPTIONS)
    control(app, "rho").set_value(2.1).run()
    button(app, "Write").click().run()
    assert healthy(app)
    record = json.loads((tmp_path / "tiny-lam0.0002-rho2.1-alpha0.35-n8" / "featcal.json").read_text())
    assert {name: record["config"][name] for name in OPTIONS} == {"lam": 2e-4, "rho": 2.1, "alpha": 0.35, "samples": 8}
    control(app, "rho").set_value(2.2).run()
    app.text_input(key="folder").set_value("tiny-lam0.0002-rho2.1-alpha0.35-n8")
    button(app, "Write").click().run()
    assert "exists" in app.error[0].value
    assert not app.success  # of the write before


def test_what_was_written_belongs_to_its_suite(
    tiny_suite_file: Path, edit_suite: Edit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    app = opened(tiny_suite_file, "calibrate", **OPTIONS)
    button(app, "Write").click().run()
    assert app.success
    other = edit_suite(
        lambda content: content.update(
            name="other", calibration={"lam": 0.0002, "rho": 1.2, "alpha": 0.35, "samples": 8}
        )
    )
    control(app, "suite").options.append(str(other))
    control(app, "suite").set_value(str(other)).run()
    assert shown_model(app) == SHOWN
    assert not app.success


def test_a_calibration_that_raises_the_drift_says_so(tiny_suite_file: Path) -> None:
    app = opened(tiny_suite_file, "calibrate", rho="1000000")
    assert "raise the final drift of pets, signs" in app.warning[0].value
    control(app, "rho").set_value(2.0).run()
    assert not app.warning


def test_a_folder_that_cannot_be_is_a_message(tiny_suite_file: Path) -> None:
    app = opened(tiny_suite_file, "calibrate", **OPTIONS)
    for name in ("", "   ", "a\x07b", "x" * 300, "~nobody-at-all/x"):
        app.text_input(key="folder").set_value(name)
        button(app, "Write").click().run()
        assert not app.exception, name
        assert len(app.error) == 1, name


@pytest.mark.parametrize(("lam", "shown"), [("0.03", "λ 0.03"), ("0.0123456789", "λ 0.0123456789")])
def test_values_between_the_steps_of_a_slider_are_taken_as_they_are(
    tiny_suite_file: Path, lam: str, shown: str
) -> None:
    app = opened(tiny_suite_file, "calibrate", lam=lam)
    assert str(shown_model(app)).startswith(shown + " ·")
    assert f"--lam {lam} " in export_command(app)
    next(one for one in app.number_input if name_of(one) == "calibrate-rho-typed").set_value(2.345).run()
    assert f"{shown} · ρ 2.345 · α 0.3" in str(shown_model(app))
    assert control(app, "rho").value == 2.345


def test_a_step_that_is_not_offered_any_more_changes_nothing(tiny_suite_file: Path) -> None:
    """A browser may send it: its page was drawn before the last move arrived."""
    app = opened(tiny_suite_file, "calibrate", rho="1.5")
    slider = control(app, "rho")
    slider.options.append("6.5")
    slider.set_value("6.5").run()
    assert healthy(app)
    assert control(app, "rho").value == 1.5
    assert "ρ 1.5 " in str(shown_model(app))


def test_a_value_beyond_the_slider_leads_back_onto_it(tiny_suite_file: Path) -> None:
    app = opened(tiny_suite_file, "calibrate", rho="6")
    assert control(app, "rho").value == 6.0
    control(app, "rho").set_value(3.0).run()
    assert control(app, "rho").value == 3.0
    assert "ρ 3 " in str(shown_model(app))
    app.run()
    assert control(app, "rho").value == 3.0


@pytest.mark.parametrize(
    ("query", "said"),
    [({"lam": "much"}, "lam = 'much'"), ({"samples": "0"}, "samples = '0'"), ({"sources": "perhaps"}, "sources")],
)
def test_an_address_that_says_nothing_usable_is_told(tiny_suite_file: Path, query: dict[str, str], said: str) -> None:
    app = opened(tiny_suite_file, "models", **query)
    assert healthy(app)
    assert said in app.warning[0].value
    control(app, "n").set_value(32).run()
    assert not any(said in one.value for one in app.warning)


def test_a_layer_or_task_that_the_suite_does_not_have_is_told(tiny_suite_file: Path) -> None:
    app = opened(tiny_suite_file, "drift", n="8", layer="block 99", task="pest")
    assert healthy(app)
    said = [one.value for one in app.warning]
    assert len(said) == 2
    assert "task = 'pest', which this suite does not have; left out. Did you mean 'pets'?" in said[0]
    assert "layer = 'block 99', which this suite does not have; left out." in said[1]
    assert not {"layer", "task"} & {*app.session_state["selection"].to_query()}
    assert len(app.run().warning) == 2  # until something is chosen
    control(app, "n").set_value(16).run()
    assert not app.warning
    for known in ("block 1", "block 1 attention", "head"):
        assert not opened(tiny_suite_file, "drift", n="8", layer=known).warning
    (said,) = (one.value for one in opened(tiny_suite_file, "drift", n="8", task="signs foo").warning)
    assert "task = 'signs foo', which this suite does not have" in said


def test_an_expert_that_guesses_is_told() -> None:
    """Three classes, 36.7 %: what a wrong file gives. With 60 % it is an expert, if not a good one."""
    frame = pd.DataFrame({"task": ["a", "b", "c"], "expert, %": [36.7, 60.0, 36.7], "classes": [3, 3, None]})
    counts = {"a": 64, "b": 64, "c": 64}
    assert catalogue.guessing(frame, counts) == ["a"]
    assert catalogue.guessing(frame, counts | {"a": 6400}) == []  # so many samples tell 36.7 % from a third
    assert catalogue.guessing(frame.drop(columns="expert, %"), counts) == []
    alone = pd.DataFrame({"task": ["a"], "expert, %": [100.0], "classes": [3]})
    assert catalogue.guessing(alone, {"a": 1}) == []  # of one sample nothing can be told


def test_a_button_too_is_a_choice(tiny_suite_file: Path) -> None:
    app = opened(tiny_suite_file, "calibrate", lam="much")
    assert "lam = 'much'" in app.warning[0].value
    button(app, "Defaults").click().run()
    assert not app.warning


def test_an_option_outside_its_range_is_a_message(tiny_suite_file: Path) -> None:
    app = opened(tiny_suite_file, "calibrate", alpha="1.5")
    assert healthy(app)
    assert "alpha is 1.5" in app.warning[0].value
    assert shown_model(app) == "λ 0.05 · ρ 2 · α 0.3 · n 64"


def test_the_address_bar_mirrors_the_selection(tiny_suite_file: Path) -> None:
    def shown(app: AppTest) -> dict[str, str]:
        sent = [json.loads(one.proto.json) for one in app.get("bidi_component") if "shown" in one.proto.json]
        (found,) = [one["shown"] for one in sent]
        return dict(found)

    app = opened(tiny_suite_file, "calibrate", n="32", somebody="else")
    control(app, "rho").set_value(0.5).run()
    expected = {"suite": str(tiny_suite_file), "n": "32", "rho": "0.5"}
    assert shown(app) == expected
    assert shown(go(app, "drift")) == expected
    go(app, "calibrate")
    control(app, "rho").set_value(2.0).run()  # the suite's own: not worth an entry
    go(app, "features")
    control(app, "task").set_value("signs").run()
    assert shown(app) == {"suite": str(tiny_suite_file), "n": "32", "task": "signs"}


def test_a_selection_comes_back_from_its_own_address() -> None:
    numbers = {"lam": 3e-7, "rho": 2.1, "alpha": 0.35, "beta": 0.25, "samples": 8, "seed": 7}
    more = {"recipe": "refined", "biases": False, "blocks": ("block 0",), "picked": (3, 0)}
    looked_at = {
        "suite": "t5-mini",
        "task": "b",
        "layer": "block 1",
        "n": 16,
        "merge": "ties:scale=1",
        "beside": "base",
    }
    chosen = PageSelection(**looked_at, **numbers, **more)
    assert from_query(chosen.to_query()) == (chosen, [])
    assert HOME.to_query() == {}
    assert set(selection.OF_A_SUITE) < set(vars(HOME))


def test_captions_state_the_samples_that_were_measured_on(edit_suite: Edit) -> None:
    def shorten(content: dict[str, Any]) -> None:
        for split, limit in (("calibration", 5), ("validation", 7), ("test", 9)):
            content["tasks"]["pets"][split]["limit"] = limit

    app = opened(edit_suite(shorten), "calibrate", samples="8")
    captions = " ".join(one.value for one in app.caption)
    assert "Measured on 7 to 12 validation samples per task" in captions
    assert "Fewer calibration samples than the 8 requested: pets 5." in captions
    assert "a, b, c on 7 to 12 validation samples" in " ".join(one.value for one in go(app, "cosines").caption)
    assert "Mean over 7 to 12 validation samples per task" in " ".join(one.value for one in go(app, "drift").caption)
    assert "expert on 7 to 12 validation samples" in " ".join(one.value for one in go(app, "models").caption)
    assert "9 to 12 test samples per task" in " ".join(one.value for one in go(app, "accuracy").caption)


def test_a_changed_file_changes_what_is_shown(own_suite_file: Path) -> None:
    app = opened(own_suite_file, "calibrate")
    seen = [headline(app)]
    for changed in ("experts/pets/model.safetensors", "samples.safetensors", "suite.yaml"):
        file = own_suite_file.parent / changed
        if file == own_suite_file:
            file.write_text(file.read_text().replace("scale: 0.5", "scale: 0.9"))
        else:
            moved = {
                name: one + 0.3 * torch.randn_like(one) if one.is_floating_point() else one
                for name, one in load_file(file).items()
            }
            save_file(moved, file, {"format": "pt"})
            os.utime(file, ns=(10**18, 10**18))
        app.run()
        assert healthy(app)
        seen.append(headline(app))
        assert seen[-1] != seen[-2], changed


def test_everything_that_a_suite_reads_here_is_looked_at(
    tmp_path: Path, edit_suite: Edit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Homes, links to folders and back up again, local folders of the kind `hub`, references with a '+'."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("USERPROFILE", str(tmp_path / "home"))
    files = ("home/base/a", "linked/b", "data/c", "below/in/e", "x+y/d", "arch.json", "w.pt")
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "merged").symlink_to(tmp_path / "linked")
    (tmp_path / "data" / "link").symlink_to(tmp_path / "below")
    (tmp_path / "below" / "up").symlink_to(tmp_path / "data")

    def change(content: dict[str, Any]) -> None:
        content.update(base="~/base", merged=str(tmp_path / "merged"))
        pets, signs = (content["tasks"][name] for name in ("pets", "signs"))
        pets.update(expert=str(tmp_path / "x+y"), test={"hub": str(tmp_path / "data"), "split": "test"})
        signs.update(expert=f"open_clip:{tmp_path / 'arch.json'}:{tmp_path / 'w.pt'}")

    suite = state.load_suite(edit_suite(change))
    before = suite_stamp(suite)
    assert suite_stamp(suite) == before
    for name in files:
        (tmp_path / name).write_text("changed")
        after = suite_stamp(suite)
        assert after != before, name
        before = after


@pytest.mark.parametrize("name", ["x" * 300, "a\0b", "~nobodyhere/x"], ids=["long", "null byte", "home of nobody"])
@pytest.mark.parametrize("kind", ["model", "open_clip", "hub", "tensors"])
def test_impossible_paths_are_refused_when_the_suite_is_opened(edit_suite: Edit, kind: str, name: str) -> None:
    def change(content: dict[str, Any]) -> None:
        if kind in ("model", "open_clip"):
            content["base"] = name if kind == "model" else f"open_clip:ViT-B-32:{name}"
        else:
            content["tasks"]["pets"]["test"] = (
                {kind: name, "split": "test"} if kind == "hub" else {kind: name, "key": "k"}
            )

    file = edit_suite(change)
    suite = state.load_suite(file)
    assert suite_stamp(suite)[2]
    with pytest.raises(InputError, match=r"no path '"):
        open_session(file).measure.scores("base")


def test_output_folders_are_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert export.output_folder("a b") == tmp_path / "a b"
    with pytest.raises(InputError, match="type one"):
        export.output_folder("")


def test_pages_say_what_a_check_has_against_the_suite(own_suite_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Preflight("tiny", ("expert 'pets' does the task of 'signs' better than its own",), None)
    monkeypatch.setattr(catalogue, "check_suite", lambda suite: found)
    app = opened(own_suite_file)
    for page in ("calibrate", "accuracy", "drift"):
        go(app, page)
        assert healthy(app)
        assert "better than its own" in app.warning[0].value

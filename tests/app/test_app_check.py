"""A merge that somebody made is checked by its folder alone: what it was made of is found, and it is the subject."""

from __future__ import annotations

from pathlib import Path

import pytest
from app_pages import button, go, headline, healthy, opened, shown_model
from own_merges import WEIGHTS, plant, write_parents
from streamlit.testing.v1 import AppTest

import featcal
from app import check
from featcal.authoring.from_merge import BEGINNINGS
from featcal.figures import tables
from featcal.session.session import open_session
from featcal.suite.schema import load_suite
from featcal.suite.views import EvaluationSamples
from featcal.system.errors import InputError

pytestmark = [pytest.mark.usefixtures("instant_maps"), pytest.mark.filterwarnings("ignore")]  # streamlit warns a lot


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a base, its experts and nothing else, and a cache of its own."""
    monkeypatch.setenv("FEATCAL_CACHE", str(tmp_path / "cache"))
    write_parents(tmp_path)
    return tmp_path


def checked(suite: Path, folder: Path, **query: str) -> AppTest:
    """The first screen after somebody has typed a folder into its field."""
    app = opened(suite, "verdict", n="4", **query)
    app.text_input(key="check-folder").set_value(str(folder)).run()
    button(app, "Check my merge").click().run()
    return app


@pytest.mark.slow
def test_a_folder_of_mergekit_becomes_the_subject(tiny_suite_file: Path, root: Path) -> None:
    app = checked(tiny_suite_file, plant(root, ""))
    assert healthy(app)
    suite = load_suite(app.session_state["selection"].suite)
    assert (suite.merged, [*suite.tasks]) == (str(root / "healthy"), [*WEIGHTS])
    said = [one.value.replace("\\", "") for one in app.markdown if one.value.startswith("- ")]
    assert said[0].startswith("- **healthy is healthy")
    assert "- By its weights it is the base and 0.50 of 'left' and 0.25 of 'right', as its recipe says." in said
    session, on = open_session(suite, resident=True), EvaluationSamples(4)
    repair = session.resolve("calibrated:samples=64")
    drifts = [
        float(tables.relative_drift_table(session.measure.features(one, on)).iloc[-1]) for one in ("merged", repair)
    ]
    assert headline(app)["Final drift"][0] == " → ".join(f"{one:.2f}" for one in drifts)
    go(app, "calibrate")
    assert healthy(app)
    assert shown_model(app) == "λ 1e-05 · ρ 0.5 · α 0.15 · n 64"
    assert button(app, "Write the checkpoint")


@pytest.mark.slow
def test_who_checks_a_folder_again_leaves_the_file_of_others_alone(tiny_suite_file: Path, root: Path) -> None:
    """Its texts are as many, whatever number somebody looks at: a file that changed would end their session."""
    folder, stamps = plant(root, ""), []
    for n in ("4", "8"):
        app = opened(tiny_suite_file, "verdict", n=n)
        app.text_input(key="check-folder").set_value(str(folder)).run()
        button(app, "Check my merge").click().run()
        file = Path(app.session_state["selection"].suite)
        stamps.append((file, file.stat().st_mtime_ns))
        source = load_suite(file).task(next(iter(WEIGHTS))).calibration
        assert source is not None
        assert source.self_generated is not None
        assert source.self_generated.prompts == BEGINNINGS
    assert stamps[0] == stamps[1]


@pytest.mark.slow
def test_what_is_wrong_with_the_weights_is_said_first(tiny_suite_file: Path, root: Path) -> None:
    app = checked(tiny_suite_file, plant(root, "zeros"))
    said = [one.value for one in app.markdown if one.value.startswith("- ")]
    assert said[0].startswith("- **zeros is broken, in its weights")
    assert any("block 1 is all zeros" in one for one in said)


@pytest.mark.slow
def test_a_merge_that_cannot_be_opened_is_judged_by_its_files(tiny_suite_file: Path, root: Path) -> None:
    """Other settings than the base's are refused wherever features are measured, and are what its owner looks for."""
    app = checked(tiny_suite_file, plant(root, "rope"))
    assert not app.exception
    said = [one.value for one in app.markdown if one.value.startswith("- ")]
    assert said[0].startswith("- **rope ")
    assert any("Rotary positions differ" in one for one in said)
    assert len(app.error) == 1
    assert app.text_input(key="check-folder").value == str(root / "rope")


def test_a_folder_of_featcal_is_opened_with_the_suite_of_its_record(root: Path) -> None:
    featcal.merge(load_suite("clip-mini"), "ties").save(root / "my-ties")
    assert check.find_subject(str(root / "my-ties")) == {"suite": "clip-mini", "merge": str(root / "my-ties")}


def test_a_folder_of_nobody_is_a_message_that_says_what_to_give(tiny_suite_file: Path, root: Path) -> None:
    app = checked(tiny_suite_file, root / "base")
    assert not app.exception
    assert "does not name the models that it was merged from" in app.error[0].value
    assert app.session_state["selection"].suite == str(tiny_suite_file)
    with pytest.raises(InputError, match="nowhere"):
        check.find_subject("nowhere")

"""The list of checkpoints that were written: what still lies where it was written is on it, and nothing else."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from featcal.export.card_parts import load_card
from featcal.family.opening import Family
from featcal.session.session import Session
from featcal.studies import recording
from featcal.studies.checkpoints import Checkpoints, WrittenModel
from featcal.studies.scored_card import tell_measured
from featcal.suite.calibration_options import CalibrationConfig
from featcal.suite.views import EvaluationSamples
from featcal.system.formatting import percent, points

CONFIG, ON = CalibrationConfig(samples=4), EvaluationSamples(8)


@pytest.fixture(scope="module")
def own(tiny: Family) -> Session:
    """Calibrates once for all tests."""
    return Session(tiny)


def written(session: Session, folder: Path, known: Checkpoints) -> WrittenModel:
    session.fit.calibrate(CONFIG).save(folder)
    model = session.resolve(CONFIG)
    before, after = (recording.measure_model(session, one, ON) for one in ("merged", model))
    return known.add(folder, recording.run_of(session, model), "load()", before, after)


def test_what_lies_where_it_was_written_is_found_by_its_run(own: Session, tmp_path: Path) -> None:
    known = Checkpoints(tmp_path / "list")
    assert known.read_all() == []
    first = written(own, tmp_path / "a", known)
    second = written(own, tmp_path / "b", known)
    assert Checkpoints(tmp_path / "list").read_all() == [second, first]  # of another process
    assert known.find(first.run.id) == [second, first]
    assert known.find("0" * 16) == []
    assert first.after == recording.measure_model(own, CONFIG, ON)
    assert sum(first.files.values()) == sum(one.stat().st_size for one in (tmp_path / "a").rglob("*") if one.is_file())
    shutil.move(tmp_path / "b", tmp_path / "c")
    assert known.read_all() == [first]
    shutil.move(tmp_path / "c", tmp_path / "b")
    known.remove(second)
    assert known.read_all() == [first]
    assert second.is_there
    assert known.problems == []


def test_a_folder_with_another_model_is_not_what_was_written(own: Session, tmp_path: Path) -> None:
    known = Checkpoints(tmp_path / "list")
    first = written(own, tmp_path / "a", known)
    shutil.rmtree(tmp_path / "a")
    own.fit.calibrate(CalibrationConfig(samples=4, rho=1.5)).save(tmp_path / "a")
    assert not first.is_there
    assert known.read_all() == []


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_folder_that_was_edited_is_not_what_was_written(own: Session, tmp_path: Path, name: str) -> None:
    """Its measurements are those of other weights; a new card or a chat template changes none."""
    known = Checkpoints(tmp_path / "list")
    first = written(own, tmp_path / "a", known)
    for beside in ("README.md", "chat_template.jinja"):
        (tmp_path / "a" / beside).write_text("new")
    assert known.read_all() == [first]
    with (tmp_path / "a" / name).open("r+b") as file:  # in place, as large as before
        file.seek(-2, 2)
        last = file.read(1)
        file.seek(-2, 2)
        file.write(bytes([last[0] ^ 1]))
    assert not first.is_there
    assert known.read_all() == []


def test_what_is_no_record_is_named_and_the_rest_is_listed(own: Session, tmp_path: Path) -> None:
    known = Checkpoints(tmp_path / "list")
    first = written(own, tmp_path / "a", known)
    (tmp_path / "list" / "x.json").write_text('{"id": 3}')
    assert known.read_all() == [first]
    assert [one for one in known.problems if "x.json holds no record" in one]
    (tmp_path / "file").write_text("")
    lost = Checkpoints(tmp_path / "file" / "list")
    lost.add(tmp_path / "a", first.run, "load()")
    assert "the list of checkpoints is not kept" in lost.problems[0]


def test_a_card_tells_what_was_measured(own: Session, tmp_path: Path) -> None:
    one = written(own, tmp_path / "a", Checkpoints(tmp_path / "list"))
    before = load_card(tmp_path / "a").text
    model = own.resolve(CONFIG)
    compared = own.measure.compare("merged", model, ON)
    tell_measured(own, tmp_path / "a", model, ON, "features")
    card = load_card(tmp_path / "a")
    assert one.before is not None
    assert one.after is not None
    experts = own.measure.quick_scores("expert", ON)
    for task, apart in {**compared.tasks, "average": compared.average}.items():
        expert = experts.average if task == "average" else experts.tasks[task].value
        interval = f"{points(apart.difference)} ({points(apart.low)} to {points(apart.high)})"
        n = 8 * len(compared.tasks) if task == "average" else 8
        cells = [percent(apart.a), percent(apart.b), interval, percent(expert), str(n)]
        metric = "" if task == "average" else "accuracy"
        assert f"| {task} | {metric} | {' | '.join(cells)} |" in card.text
    for task, drift in one.after.drift.items():
        assert f"| {task} | {one.before.drift[task]:.4f} | {drift:.4f} | 8 |" in card.text
    assert "on the validation split" in card.text
    assert "on validation samples" in card.text
    assert [found.metric_value for found in card.data.eval_results or []] == [
        value.value for value in one.after.scores.values()
    ]
    assert card.text.split("## How it was made")[1] == before.split("## How it was made")[1]

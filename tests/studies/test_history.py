"""The history: nothing that was recorded is lost, changed or taken for something else."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import yaml
from clip_config import clip_config
from hypothesis import given, settings
from hypothesis.strategies import lists, text
from safetensors.torch import load_file, save_file
from tiny_clip import TASKS

from featcal import load_suite
from featcal.export.merge import merge_to_folder
from featcal.family.opening import Family
from featcal.figures import run_tables
from featcal.session.measurements import Measurements
from featcal.session.session import Session
from featcal.studies import history as runs
from featcal.studies.history import History, Looks, RunMeasurement, TaskValue, new_run, suite_hash
from featcal.studies.recording import count_looks, hash_of, measure_model, record, resolve_run, run_of
from featcal.suite.calibration_options import CalibrationConfig
from featcal.suite.name_grammar import format_parts
from featcal.suite.views import EvaluationSamples
from featcal.system.errors import InputError, NumericalError

SUITE = ("tiny", "0123456789abcdef")
BY = {"featcal": "1", "device": "cpu"}
CONFIG = clip_config(samples=8)
FEW = EvaluationSamples(8)


def a_run(number: int = 0) -> runs.HistoryEntry:
    return new_run(SUITE, f"calibrated:lam={number}", {"lam": number + 0.1}, BY)


def measured(value: float = 0.1 + 0.2, samples: int | None = 8) -> RunMeasurement:
    scores = {"pets": TaskValue("accuracy", value, 8), "signs": TaskValue("accuracy", 1.0, 5)}
    return RunMeasurement("features", "validation", samples, 42, scores, {"pets": 1 / 3, "signs": 0.7}, 2.5)


def test_what_comes_back_is_what_went_in_to_the_last_bit(tmp_path: Path) -> None:
    history = History(tmp_path / "a" / "b")
    run = a_run()
    assert history.runs() == []
    assert history.add(run, measured())
    assert history.add(run, measured(0.5, None))
    assert History(history.folder).get(run.id) == replace(run, measured=(measured(), measured(0.5, None)))
    assert history.get(run.id).find_measured("features", "validation", None, 42) == measured(0.5, None)
    assert history.get(run.id).find_measured("features", "test", None, 42) is None
    assert history.problems == []


def test_means_are_those_of_the_tasks() -> None:
    one = measured(0.25)
    assert (one.mean, one.worst, one.worst_task) == (0.625, 0.25, "pets")
    assert one.mean_drift == pytest.approx((1 / 3 + 0.7) / 2, rel=1e-15)
    nothing = replace(one, scores={}, drift={})
    assert all(value != value for value in (nothing.mean, nothing.worst, nothing.mean_drift))
    assert nothing.worst_task == ""


def test_the_same_model_is_the_same_run_and_what_is_recorded_stays(tmp_path: Path) -> None:
    history, first = History(tmp_path), a_run()
    again = replace(a_run(), time="2999", model="calibrated:called=otherwise")
    assert again.id == first.id
    others = [
        new_run(("tiny", "f" * 16), first.model, first.options, BY),
        new_run(SUITE, first.model, {"lam": 7.0}, BY),
        new_run(SUITE, first.model, first.options, {**BY, "featcal": "2"}),
        new_run(SUITE, first.model, {}, BY),
        new_run(SUITE, "merged", {}, BY),
    ]
    assert len({first.id, *(one.id for one in others)}) == 6
    assert history.add(first, measured())
    assert history.add(again, measured(0.9))
    assert history.runs() == [replace(first, measured=(measured(),))]


def test_runs_of_a_suite_the_newest_first(tmp_path: Path) -> None:
    history = History(tmp_path)
    here = [replace(a_run(i), time=f"2026-01-0{i + 1}T00:00:00+00:00") for i in range(3)]
    there = new_run(("other", "f" * 16), "merged", {}, BY)
    for run in (here[1], there, here[2], here[0]):
        history.add(run)
    assert [run.id for run in history.runs(SUITE[1])] == [here[2].id, here[1].id, here[0].id]
    assert len(history.runs()) == 4
    assert history.runs("e" * 16) == []


def test_a_person_names_pins_and_deletes(tmp_path: Path) -> None:
    history, run, other = History(tmp_path), a_run(), a_run(1)
    history.add(run, measured())
    history.add(other, measured())
    history.mark(run.id, "name", "**best** <b>")
    history.mark(run.id, "notes", "two\nlines")
    history.mark(run.id, "pinned", True)
    found = History(tmp_path).get(run.id)
    assert (found.name, found.notes, found.pinned) == ("**best** <b>", "two\nlines", True)
    with pytest.raises(InputError, match="is pinned; unpin it first"):
        history.delete(run.id)
    history.mark(run.id, "pinned", False)
    history.mark(run.id, "name", "")
    assert (history.get(run.id).name, history.get(run.id).pinned) == ("", False)
    history.delete(run.id)
    assert history.runs() == [replace(other, measured=(measured(),))]
    assert {file.name.split(".")[0] for file in (tmp_path / SUITE[1]).iterdir()} == {other.id}
    with pytest.raises(InputError, match=f"no run '{run.id}'"):
        history.delete(run.id)


@pytest.mark.parametrize("name", ["", "..", "../../etc", "0" * 15, "0" * 16, "G" * 16, "/etc/passwd", "a" * 4000])
def test_no_other_file_is_ever_reached(tmp_path: Path, name: str) -> None:
    history = History(tmp_path)
    history.add(a_run())
    for act in (history.get, history.delete, lambda one: history.mark(one, "name", "x")):
        with pytest.raises(InputError, match="no run '"):
            act(name)


@pytest.mark.parametrize("name", ["a\x1b[31mb", "x" * 2001, "\x00"])
def test_names_are_printable_and_bounded(tmp_path: Path, name: str) -> None:
    history, run = History(tmp_path), a_run()
    history.add(run)
    with pytest.raises(InputError, match="at most 2000 printable characters"):
        history.mark(run.id, "name", name)
    assert history.get(run.id).name == ""


WRONG: dict[str, Callable[[dict[str, Any]], str]] = {
    "cut off": lambda good: json.dumps(good)[:-20],
    "empty": lambda good: "",
    "a list": lambda good: "[]",
    "without a field": lambda good: json.dumps({name: good[name] for name in good if name not in ("time", "scores")}),
    "of another type": lambda good: json.dumps({name: [good[name]] for name in good}),
    "not UTF-8": lambda good: "\udcff",
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("which", ["run", "measurement"])
def test_a_broken_record_is_reported_passed_over_and_left_alone(tmp_path: Path, wrong: str, which: str) -> None:
    history, broken, whole = History(tmp_path), a_run(), a_run(1)
    for run in (broken, whole):
        history.add(run, measured())
    ending = ".json" if which == "run" else ".features-validation-8-42.json"
    file = tmp_path / SUITE[1] / f"{broken.id}{ending}"
    content = WRONG[wrong](json.loads(file.read_text())).encode("utf-8", "surrogateescape")
    file.write_bytes(content)
    found = {run.id: run for run in history.runs()}
    assert found[whole.id].measured == (measured(),)
    assert (broken.id in found) == (which == "measurement")
    assert all(found[one].measured == () for one in found if one == broken.id)
    (problem,) = history.problems
    assert str(file) in problem
    assert "left out" in problem
    history.add(broken, measured(0.9))
    assert file.read_bytes() == content


def test_numbers_that_are_none_are_no_record(tmp_path: Path) -> None:
    history, run = History(tmp_path), a_run()
    history.add(run, measured())
    file = tmp_path / SUITE[1] / f"{run.id}.features-validation-8-42.json"
    file.write_text(file.read_text().replace("2.5", "NaN"))
    assert history.get(run.id).measured == ()
    assert len(history.problems) == 1


def test_a_record_under_another_name_is_not_believed(tmp_path: Path) -> None:
    history, run, other = History(tmp_path), a_run(), a_run(1)
    history.add(run)
    place = tmp_path / SUITE[1]
    shutil.copy(place / f"{run.id}.json", place / f"{other.id}.json")
    (place / "notes.txt").write_text("mine")
    (place / f"{other.id}").mkdir()
    assert [one.id for one in history.runs()] == [run.id]
    assert ["another run" in problem for problem in history.problems] == [True]


def test_a_file_in_the_place_of_the_folder_is_said(tmp_path: Path) -> None:
    """An empty list would look as if nothing had ever been measured."""
    (tmp_path / "runs").write_text("")
    history = History(tmp_path / "runs")
    assert (history.runs(), len(history.problems)) == ([], 1)
    assert "Not a directory; its runs are not listed" in history.problems[0]


def test_a_folder_that_cannot_be_written_is_said_and_no_failure(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    history = History(tmp_path / "file" / "runs")
    assert not history.add(a_run(), measured())
    assert not history.add(a_run(1), measured())
    assert not history.look(SUITE[1], "merged", "app")
    assert history.runs() == []
    assert history.looks(SUITE[1]) == Looks(0, 0)
    (problem,) = history.problems
    assert "not kept" in problem
    assert "FEATCAL_CACHE" in problem


@pytest.mark.parametrize("step", ["link", "fsync"])
def test_an_interrupted_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    history, run = History(tmp_path), a_run()

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(os, step, interrupted)
        with pytest.raises(KeyboardInterrupt):
            history.add(run)
    assert list((tmp_path / SUITE[1]).iterdir()) == []
    assert history.add(run)
    assert [one.id for one in history.runs()] == [run.id]


def test_a_file_system_without_hard_links_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "link", refused)
    history, run = History(tmp_path), a_run()
    assert history.add(run, measured())
    assert history.get(run.id).measured == (measured(),)


WRITER = """
import sys
from pathlib import Path
from featcal.studies.history import History, RunMeasurement, TaskValue, new_run
assert "torch" not in sys.modules
history, who = History(Path(sys.argv[1])), sys.argv[2]
for i in range(100):
    own = new_run(("tiny", "0" * 16), f"{who}:{i}", {}, {})
    both = new_run(("tiny", "0" * 16), f"both:{i}", {}, {})
    scores = {"pets": TaskValue("accuracy", i / 100, 100)}
    assert history.add(own, RunMeasurement("features", "validation", 8, 42, scores, {}))
    assert history.add(both, RunMeasurement("features", "validation", 8, 42, scores, {}))
    history.mark(both.id, "name" if who == "one" else "notes", f"{who} {i}")
    assert history.look("0" * 16, f"model {i}", who)
assert history.problems == []
"""


@pytest.mark.slow
def test_two_processes_lose_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    writers = [subprocess.Popen([*command, who], cwd=Path(__file__).parents[2]) for who in ("one", "two")]
    assert [writer.wait(120) for writer in writers] == [0, 0]
    history = History(tmp_path)
    found = {run.model: run for run in history.runs()}
    assert set(found) == {f"{who}:{i}" for who in ("one", "two", "both") for i in range(100)}
    for i in range(100):
        assert {found[f"{who}:{i}"].measured[0].mean for who in ("one", "two", "both")} == {i / 100}
        assert (found[f"both:{i}"].name, found[f"both:{i}"].notes) == (f"one {i}", f"two {i}")
    assert history.looks("0" * 16) == Looks(200, 100)
    assert history.problems == []
    assert not [file for file in (tmp_path / ("0" * 16)).iterdir() if file.name.startswith(".")]


def test_the_hash_is_of_what_the_suite_reads(own_suite_file: Path, tmp_path: Path) -> None:
    def now() -> str:
        return suite_hash(load_suite(own_suite_file))

    before = now()
    content = yaml.safe_load(own_suite_file.read_text())
    own_suite_file.write_text(yaml.safe_dump({**content, "description": "other words", "calibration": {"lam": 0.2}}))
    assert now() == before
    shutil.copytree(own_suite_file.parent, tmp_path / "elsewhere")
    assert suite_hash(load_suite(tmp_path / "elsewhere" / "suite.yaml")) == before
    own_suite_file.write_text(yaml.safe_dump({**content, "merged": {"method": "task-arithmetic", "scale": 0.4}}))
    assert now() != before
    own_suite_file.write_text(yaml.safe_dump(content))
    assert now() == before
    expert = own_suite_file.parent / "experts" / TASKS[0] / "model.safetensors"
    kept = expert.stat()
    tensors = load_file(expert)
    save_file({name: 2 * tensor for name, tensor in tensors.items()}, expert, {"format": "pt"})
    os.utime(expert, ns=(kept.st_atime_ns, kept.st_mtime_ns))
    assert expert.stat().st_size == kept.st_size
    assert now() != before


def test_large_files_count_by_path_size_and_times(
    own_suite_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(path: Path) -> bytes:
        raise AssertionError(f"{path} was read")

    monkeypatch.setattr(runs, "WHOLE", 0)
    monkeypatch.setattr(Path, "read_bytes", read)
    before = suite_hash(load_suite(own_suite_file))
    assert suite_hash(load_suite(own_suite_file)) == before
    shutil.copytree(own_suite_file.parent, tmp_path / "elsewhere")
    assert suite_hash(load_suite(tmp_path / "elsewhere" / "suite.yaml")) != before


@settings(max_examples=30)
@given(lists(text("al,:%+@= /\\\n\u3000é", min_size=1, max_size=8), min_size=1, max_size=3, unique=True))
def test_names_of_tasks_come_back_from_the_history(tmp_path_factory: pytest.TempPathFactory, tasks: list[str]) -> None:
    history = History(tmp_path_factory.mktemp("history"))
    run = new_run((tasks[0], "0" * 16), f"calibrated:tasks={format_parts(tasks)}", {"tasks": tasks}, {})
    found = RunMeasurement("features", "validation", 8, 42, {tasks[0]: TaskValue("accuracy", 0.5, 8)}, {tasks[0]: 0.25})
    assert history.add(run, found)
    assert (history.get(run.id), history.problems) == (replace(run, measured=(found,)), [])


def test_what_is_recorded_is_what_the_session_measured(tiny: Family, tmp_path: Path) -> None:
    session, history = Session(tiny), History(tmp_path)
    assert record(session, CONFIG, FEW, history) == ""
    (run,) = history.runs(hash_of(session))
    (found,) = run.measured
    scores, features = session.measure.quick_scores(CONFIG, FEW), session.measure.features(CONFIG, FEW)
    assert {task: one.value for task, one in found.scores.items()} == {t: s.value for t, s in scores.tasks.items()}
    assert {task: one.n for task, one in found.scores.items()} == dict.fromkeys(TASKS, 8)
    assert dict(found.drift) == {task: one.layers[-1].relative_drift for task, one in features.tasks.items()}
    assert found.samples_key == ("features", "validation", 8, 42)
    took = session.fit.calibrate(CONFIG).record["seconds"]
    assert (found.seconds, found.cpu) == (took["total"], took["processor"])
    assert took["processor"] > 0
    assert CalibrationConfig(**run.options) == CONFIG
    assert session.resolve(run.model).config == CONFIG
    assert run.made_by["device"] == "cpu"
    assert run_of(session, replace(CONFIG, batch_size=3)).id == run.id
    assert run_of(session, replace(CONFIG, seed=43)).id != run.id
    record(session, CONFIG, EvaluationSamples(4), history)
    assert [one.samples for one in history.get(run.id).measured] == [4, 8]


def test_samples_without_answers_have_drift_alone(edit_suite: Callable[..., Path]) -> None:
    def without_labels(content: dict[str, Any]) -> None:
        for task in content["tasks"].values():
            del task["validation"]["labels"]

    from featcal import open_family

    session = Session(open_family(load_suite(edit_suite(without_labels)), "cpu"))
    found = measure_model(session, CONFIG, FEW)
    assert dict(found.scores) == {}
    assert all(value > 0 for value in found.drift.values())
    assert set(found.drift) == set(TASKS)


def test_what_cannot_be_scored_for_another_reason_is_no_record_without_scores(
    tiny: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise InputError("task 'pets': label 9 has no class, the head scores 3")

    session, history = Session(tiny), History(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(Measurements, "quick_scores", fails)
        with pytest.raises(InputError, match="label 9 has no class"):
            record(session, CONFIG, FEW, history)
    assert history.runs() == []
    assert record(session, CONFIG, FEW, history) == ""
    assert set(history.runs()[0].measured[0].scores) == set(TASKS)


def test_a_drift_that_is_no_number_is_an_error_that_says_so(
    tiny: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, history = Session(tiny), History(tmp_path)
    found = session.measure.features(CONFIG, FEW)
    one = found.tasks[TASKS[0]]
    nothing = replace(one.layers[-1], expert_norm=torch.zeros(8), drift=torch.zeros(8))
    tasks = {**found.tasks, TASKS[0]: replace(one, layers=(*one.layers[:-1], nothing))}
    monkeypatch.setattr(Measurements, "features", lambda *_: replace(found, tasks=tasks))
    with pytest.raises(NumericalError, match=rf"task '{TASKS[0]}': the relative final drift of calibrated is nan"):
        record(session, CONFIG, FEW, history)
    assert history.runs() == []


def test_a_history_that_can_be_written_again_is_written(tiny: Family, tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    session = Session(tiny)
    assert "not kept" in record(session, CONFIG, FEW, History(tmp_path / "runs"))
    (tmp_path / "runs").unlink()
    history = History(tmp_path / "runs")
    assert record(session, CONFIG, FEW, history) == ""
    assert len(history.runs()) == 1


def test_a_run_that_somebody_deleted_is_recorded_when_it_is_measured_again(tiny: Family, tmp_path: Path) -> None:
    session, history = Session(tiny), History(tmp_path)
    for _ in range(2):
        assert record(session, CONFIG, FEW, history) == ""
        (run,) = history.runs()
        history.delete(run.id)
    assert history.runs() == []


def test_a_run_of_a_folder_that_was_written_anew_is_not_shown_with_other_weights(tiny: Family, tmp_path: Path) -> None:
    session, folder = Session(tiny), tmp_path / "my-merge"
    merge_to_folder(tiny, "task-arithmetic", 0.5, folder)
    names = str(folder), f"calibrated:rho=1.5,samples=6@{folder}", "merged"
    runs_before = [run_of(session, name) for name in names]
    assert [resolve_run(session, run).name for run in runs_before] == [run.model for run in runs_before]
    file = folder / "model.safetensors"
    save_file({name: 1.5 * tensor for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    for run in runs_before[:2]:
        with pytest.raises(InputError, match=f"its files have changed since run {run.id[:6]} was measured"):
            resolve_run(session, run)
        other = replace(run, made_by={"featcal": "0"})  # of an earlier version nothing is known of its files
        assert resolve_run(session, other).name == run.model
    assert resolve_run(session, runs_before[2]).name == "merged"


def test_a_look_is_a_model_that_was_scored_on_test(
    tiny: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEATCAL_CACHE", str(tmp_path))
    session, history = Session(tiny), History()
    test = EvaluationSamples(4, "test")

    def look(*models: Any, on: EvaluationSamples = test) -> Looks:
        with count_looks(session, models, on, "app", history):
            for model in models:
                session.measure.scores(model, on)
        return history.looks(hash_of(session))

    assert look("merged", "expert") == Looks(2, 2)
    assert look("merged", CONFIG) == Looks(3, 3)
    assert look("merged", on=EvaluationSamples(4, "validation")) == Looks(3, 3)
    assert look("merged", on=EvaluationSamples(5, "test")) == Looks(4, 3)
    with pytest.raises(InputError), count_looks(session, ["base"], test, "app", history):
        raise InputError("nothing was seen")
    assert history.looks(hash_of(session)) == Looks(4, 3)
    assert History().looks(hash_of(session)) == Looks(4, 3)  # of the same folder


def test_tables_of_runs(tmp_path: Path) -> None:
    history = History(tmp_path)
    history.add(a_run(), measured(0.25))
    history.add(a_run(), measured(0.5, None))
    history.add(new_run(SUITE, "merged", {}, BY))
    found = sorted(history.runs(), key=lambda run: run.model)
    table = run_tables.run_table(found)
    assert table["measured on"].tolist() == ["8 validation samples, seed 42", "all validation samples, seed 42", ""]
    assert table["mean"].tolist()[:2] == [62.5, 75.0]
    assert table["worst"].tolist()[:2] == [25.0, 50.0]
    everything = pd.read_csv(StringIO(run_tables.run_export(found).to_csv(index=False)))
    assert everything["score pets"].tolist()[:2] == [0.25, 0.5]
    assert everything["drift pets"].tolist()[:2] == [1 / 3, 1 / 3]
    assert everything["lam"].tolist()[:2] == [0.1, 0.1]
    document = json.loads(json.dumps([run.to_json() for run in found], allow_nan=False))
    assert document[0]["measured"][0]["scores"]["pets"] == {"metric": "accuracy", "value": 0.25, "n": 8}


def test_two_runs_side_by_side() -> None:
    a, b = (new_run(SUITE, "calibrated", {"lam": lam, "rho": 2.0}, BY) for lam in (0.1, 0.2))
    assert run_tables.different(a, b).to_dict("records") == [{"option": "lam", "A": "0.1", "B": "0.2"}]
    here, there = (new_run(SUITE, f"calibrated:lam=0.1{on}", {"lam": 0.1}, BY) for on in ("", "@tsv-m"))
    assert run_tables.different(here, there).to_dict("records") == [{"option": "merge", "A": "merged", "B": "tsv-m"}]
    plain = new_run(SUITE, "merged", {}, BY)
    assert run_tables.different(a, plain)["option"].tolist() == ["model", "lam", "rho"]
    frame = run_tables.compare_runs(measured(0.25), measured(0.5)).set_index("task")
    assert frame.index.tolist() == ["pets", "signs", "mean"]
    assert frame["B − A, points"].tolist() == [25.0, 0.0, 12.5]
    assert frame["B − A, drift"].tolist() == [0.0, 0.0, 0.0]

"""The method table: every row is what single measurements give, is kept, and is found again by nobody else."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from clean_process import end_command, in_clean_process
from click.testing import CliRunner
from scipy import stats
from tiny_clip import TASKS

from featcal import evaluate, measure_drift
from featcal.cli import featcal_command
from featcal.cli.study import whole_numbers
from featcal.family.opening import Family, open_family
from featcal.figures import study_tables
from featcal.session.session import Session
from featcal.studies import maker, runner
from featcal.studies.compare import compare_methods, every_method
from featcal.studies.history import History, TaskValue
from featcal.studies.maker import measure_cost
from featcal.studies.method_lists import with_samples
from featcal.studies.plan import StudyPlan, points_of, views
from featcal.studies.recording import hash_of
from featcal.studies.requirements import needs
from featcal.studies.runner import Point, Row
from featcal.studies.store import RowResult, Rows, StageSeconds
from featcal.studies.study import Study, read_study
from featcal.studies.summary import mean_and_interval, student_bound, summaries
from featcal.suite.methods import NEEDS, method, method_names
from featcal.suite.schema import load_suite
from featcal.system.errors import InputError

METHODS = ["merged", "simple-averaging", "calibrated", "regmean"]
FEW: dict[str, Any] = {"seeds": (42, 43), "samples": 8}


def table(session: Session, methods: Sequence[str] = METHODS, **options: Any) -> Study:
    return compare_methods(session, StudyPlan(methods, **{**FEW, **options}))


class Stopped(Exception):
    """Whoever waited has gone."""


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEATCAL_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def own(tiny: Family) -> Session:
    return Session(tiny)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Rows that are measured, in that order, by the names of their models."""
    names: list[str] = []
    original = runner._measure

    def noted(session: Session, point: Point, *rest: Any) -> Any:
        names.append(point.model)
        return original(session, point, *rest)

    monkeypatch.setattr(runner, "_measure", noted)
    return names


def without_cost(study: Study) -> list[dict[str, Any]]:
    """The rows as documents, but for what differs from run to run."""
    rows = [row.to_json() for row in study.rows]
    return [{name: one for name, one in row.items() if name not in ("seconds", "stages", "peak_bytes")} for row in rows]


@pytest.mark.slow
def test_every_row_is_what_single_measurements_give(own: Session, tiny: Family) -> None:
    study = table(own)
    assert [(row.method, row.point.model, row.point.seed) for row in study.rows] == [
        ("expert", "expert", None),
        ("merged", "merged", None),
        ("simple-averaging", "simple-averaging", None),
        ("calibrated", "calibrated:samples=8,seed=42", 42),
        ("calibrated", "calibrated:samples=8,seed=43", 43),
        ("regmean", "regmean:samples=8,seed=42", 42),
        ("regmean", "regmean:samples=8,seed=43", 43),
    ]
    for row in study.rows:
        scores = evaluate(tiny, row.point.model)
        assert {task: (one.value, one.n) for task, one in row.found.scores.items()} == {
            task: (round(one.value, 6), one.n) for task, one in scores.tasks.items()
        }
        if row.method == "expert":
            continue
        ledger = measure_drift(tiny, row.point.model)
        for task, one in ledger.tasks.items():
            assert row.found.drift[task] == pytest.approx(one.layers[-1].relative_drift, abs=1e-5)
            assert row.found.cosine[task] == pytest.approx(float(one.cosine.mean()), abs=1e-5)
        assert row.found.seconds["make"].wall > 0
    assert study.rows[0].found.drift == dict.fromkeys(TASKS, 0.0)


@pytest.mark.slow
def test_a_study_that_was_ended_goes_on_and_ends_with_the_same_table(own: Session, made: list[str]) -> None:
    def patience(label: str, done: int, total: int) -> None:
        if done == 4:
            raise Stopped

    with pytest.raises(Stopped):
        table(own, progress=patience)
    assert made == ["expert", "merged", "simple-averaging", "calibrated:samples=8,seed=42"]
    made.clear()
    resumed = table(own)
    # Seed by seed, since expert passes are those of a seed; rows stand as they were asked for.
    assert made == ["regmean:samples=8,seed=42", "calibrated:samples=8,seed=43", "regmean:samples=8,seed=43"]
    made.clear()
    again = table(own)
    assert made == []
    assert again == resumed
    elsewhere = table(own, rows=Rows(Rows().folder / "elsewhere"))
    assert len(made) == 7
    assert without_cost(elsewhere) == without_cost(resumed)


def has_rows(folder: Path, count: int) -> bool:
    return len([*folder.glob("*/[!.]*.json")]) >= count


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked")
def test_a_killed_process_leaves_its_finished_rows(
    tiny_suite_file: Path, tiny_suite: Any, tmp_path: Path, made: list[str]
) -> None:
    cheap = ["merged", "calibrated", "ties", "regmean", "dare"]
    models = [word for name in cheap for word in ("--model", name)]
    words = ["compare", tiny_suite_file, *models, "--samples", "8", "--seeds", "42,43"]
    folder = Rows().folder
    when, log = partial(has_rows, folder, 3), tmp_path / "log"
    assert in_clean_process(end_command, words, signal.SIGKILL, when, log) == -signal.SIGKILL
    kept = len([*folder.glob("*/[!.]*.json")])
    session = Session(open_family(tiny_suite, device="cpu"))
    resumed = table(session, cheap)
    assert len(made) == len(resumed.rows) - kept
    assert 3 <= kept < len(resumed.rows)
    whole = table(session, cheap, rows=Rows(tmp_path / "whole"))
    assert without_cost(whole) == without_cost(resumed)
    assert [row.found.failure for row in whole.rows] == [""] * len(whole.rows)


@pytest.mark.slow
def test_other_samples_options_or_files_are_other_rows(
    own: Session, made: list[str], edit_suite: Callable[[Callable[[dict[str, Any]], None]], Path]
) -> None:
    table(own, ["calibrated"], seeds=(42,), samples=8)

    def measured(**options: Any) -> list[str]:
        made.clear()
        table(**{"session": own, "methods": ["calibrated"], "seeds": (42,), **options})
        return [one for one in made if one != "expert"]

    assert measured() == []
    assert measured(methods=["calibrated:samples=8,seed=42"]) == []
    assert measured(samples=7) == ["calibrated:samples=7,seed=42"]
    assert measured(seeds=(44,)) == ["calibrated:samples=8,seed=44"]
    assert measured(methods=["calibrated:lam=0.5"]) == ["calibrated:lam=0.5,samples=8,seed=42"]
    assert measured(methods=["calibrated:lam=0.05"]) == []  # the default, said
    assert measured(on=views(5)) == ["calibrated:samples=8,seed=42"]
    assert measured(on=views(None, "validation")) == ["calibrated:samples=8,seed=42"]
    file = edit_suite(lambda content: content["merged"].update(scale=0.4))
    assert len(measured(session=Session(open_family(load_suite(file), device="cpu")))) == 1


def test_a_method_that_cannot_be_used_is_a_row_that_says_why(own: Session) -> None:
    methods = ["regmean:reduce=2", "calibrated:lamb=1", "./nowhere", "merged"]
    study = table(own, methods)
    by_method = {one.method: one for one in study.summaries()}
    assert "reduce is 2; it lies in [0, 1]" in by_method["regmean:reduce=2"].failure
    assert "no option 'lamb'" in by_method["calibrated:lamb=1"].failure
    assert "nowhere" in by_method["./nowhere"].failure
    assert by_method["./nowhere"].average is None
    assert by_method["merged"].average is not None
    shown = study_tables.markdown(study.summaries())
    assert shown.count("cannot be used") == 3
    (first, *_) = study.summaries()
    assert "`expert:a\\|b`" in study_tables.markdown([replace(first, method="expert:a|b")])
    assert all(line.count("|") == 12 for line in shown.splitlines())


def test_failures_while_a_model_is_made_are_kept_rows(own: Session, made: list[str]) -> None:
    """Rank-deficient systems without a ridge have no solution."""
    for _ in range(2):
        study = table(own, ["calibrated:lam=0,eps=0"], seeds=(42,), samples=1)
        assert "calibrated:lam=0,eps=0" in study.rows[1].point.model
        assert study.rows[1].found.scores == {}
        assert "raise lam" in study.rows[1].found.failure
    assert made == ["expert", "calibrated:lam=0,eps=0,samples=1,seed=42"]


@pytest.mark.parametrize("kind", [MemoryError, torch.OutOfMemoryError, InputError])
def test_what_may_pass_is_said_and_tried_again(
    own: Session, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    """Memory, a disk that is full, a Hub that does not answer: none of them is the method's own failure."""

    def full(*_: Any) -> Any:
        raise kind("no room for 8 GiB")

    with monkeypatch.context() as patched:
        patched.setattr(maker, "_weights", full)
        assert "no room for 8 GiB" in table(own, ["merged"]).rows[1].found.failure
    assert table(own, ["merged"]).rows[1].found.failure == ""


def test_a_damaged_row_is_named_and_measured_again(own: Session, made: list[str]) -> None:
    first = table(own, ["merged"])
    files = [*Rows().folder.glob("*/*.json")]
    assert len(files) == 2
    for file in files:
        file.write_text('{"identity": {}, "found": {"scores": "many"}}')
    rows = Rows()
    assert without_cost(table(own, ["merged"], rows=rows)) == without_cost(first)
    assert len(made) == 4
    assert len(rows.problems) == 2
    assert "holds no record" in rows.problems[0]


@pytest.mark.slow
def test_looks_at_the_test_split_are_counted_once(own: Session) -> None:
    table(own)
    assert History().looks(hash_of(own)) == (7, 7)
    table(own)
    assert History().looks(hash_of(own)) == (7, 7)
    table(own, on=views(None, "validation"))
    assert History().looks(hash_of(own)) == (7, 7)


def row(method: str, seed: int | None, values: dict[str, float], failure: str = "", **at: int) -> Row:
    scores = {} if failure else {task: TaskValue("accuracy", value, 100) for task, value in values.items()}
    flat = {} if failure else dict.fromkeys(values, 0.5)
    seconds = {} if failure else {"make": StageSeconds(2.0, 1.0 if seed is None else seed / 42)}
    return Row(
        Point(method, method, seed, at), ("samples",), RowResult(scores, flat, flat, seconds, {}, 1000, {}, failure)
    )


def test_seeds_are_taken_together() -> None:
    rows = [
        row("expert", None, {"a": 0.8, "b": 1.0}),
        row("m", 42, {"a": 0.4, "b": 0.7}),
        row("m", 84, {"a": 0.6, "b": 0.5}),
        row("half", 42, {"a": 0.4, "b": 0.4}),
        row("half", 84, {}, "no solution"),
        row("never", 42, {}, "refused"),
    ]
    expert, two, half, never = summaries(rows)
    assert expert.normalised == 1
    assert two.average is not None
    assert two.average.mean == pytest.approx(0.55)
    assert (two.average.low, two.average.high) == pytest.approx((0.55, 0.55))
    assert two.tasks == pytest.approx({"a": 0.5, "b": 0.6})
    assert two.normalised == pytest.approx((0.5 / 0.8 + 0.6) / 2)
    assert (two.worst, two.worst_task, two.cpu, two.wall, two.seeds) == (pytest.approx(0.5), "a", 1.5, 2.0, (42, 84))
    assert half.average is not None
    assert (half.average.mean, half.average.low, half.failure, half.seeds) == (0.4, None, "no solution", (42,))
    assert (never.average, never.normalised, never.cpu, never.failure) == (None, None, None, "refused")


def test_places_of_a_study_are_apart_and_have_experts_of_their_own() -> None:
    rows = [
        row("expert", None, {"a": 0.5}, n=8),
        row("m", None, {"a": 0.4}, n=8),
        row("expert", None, {"a": 1.0}, n=16),
        row("m", None, {"a": 0.4}, n=16),
    ]
    assert [(one.at["n"], one.normalised) for one in summaries(rows) if one.method == "m"] == [(8, 0.8), (16, 0.4)]
    assert [one.normalised for one in summaries([rows[0], rows[3]])] == [1.0, 0.8]  # experts are measured at one place


def test_the_interval_is_that_of_students_t() -> None:
    values = [0.3, 0.45, 0.5, 0.41]
    found = mean_and_interval(values)
    low, high = stats.t.interval(0.95, 3, np.mean(values), stats.sem(values))
    assert (found.mean, found.low, found.high) == pytest.approx((np.mean(values), low, high))
    assert mean_and_interval([0.3]).low is None
    # Freedom of every kind: the one that is a plain tangent, even and odd numbers, many.
    bounds = [student_bound(0.95, freedom) for freedom in (1, 2, 3, 4, 9, 10, 99)]
    assert bounds == pytest.approx([stats.t.ppf(0.975, freedom) for freedom in (1, 2, 3, 4, 9, 10, 99)], rel=1e-12)


def test_what_methods_need() -> None:
    for kind in map(method, method_names()):
        assert {*kind.about.needs} <= {*NEEDS}
        split = {"calibration": "samples", "test": "test data"}.get(getattr(kind, "split", ""))
        assert {"samples", "test data"} & {*kind.about.needs} == ({split} if split else set())
        assert needs(kind.kind, "pixels") == kind.about.needs
    assert needs("ties:scale=1", "pixels") == needs("svc@runs/model", "pixels") == ()
    assert needs("calibrated:lam=0.1", "pixels") == ("samples",)
    assert needs("calibrated", "seq2seq") == ("samples", "labels")
    assert needs("calibrated@adamerging-test", "pixels") == ("samples", "test data", "training")
    assert needs("svc@calibrated", "pixels") == ("samples",)
    assert needs("surgery@wudi", "pixels") == ("samples", "training", "modules", "task")


def test_every_method_has_a_name_that_is_one(own: Session) -> None:
    names = every_method(own)
    assert len(names) == len({*names})
    for name in names:
        assert own.resolve(with_samples(name, 8, 42))
    assert [len(points_of(name, 8, (1, 2))) for name in ("merged", "dare", "svc@calibrated", "svc@dare:seed=3")] == [
        1,
        2,
        2,
        1,
    ]


@pytest.mark.parametrize("given", ["", "a", "1.5", "-1", "1,,b"])
def test_seeds_are_whole_numbers(given: str) -> None:
    with pytest.raises(InputError, match="whole numbers"):
        whole_numbers(given, "seeds")


@pytest.mark.skipif(sys.platform != "linux", reason="a peak can be counted anew on Linux alone")
def test_memory_is_that_of_the_work_alone() -> None:
    def peak(megabytes: int) -> float:
        with measure_cost() as cost:
            held = np.ones(megabytes * 125_000)
            assert held.sum() == len(held)
        assert cost.peak_bytes is not None
        return cost.peak_bytes / 1e6

    assert 190 < peak(200) < 230
    assert 40 < peak(50) < 80  # and not the 200 of before


def test_processor_seconds_leave_waiting_out() -> None:
    with measure_cost() as cost:
        time.sleep(0.2)
    assert cost.cpu < 0.1 < cost.wall


def run_command(*arguments: str) -> Any:
    return CliRunner().invoke(featcal_command, ["compare", *arguments], standalone_mode=False)


def test_the_command_prints_every_form_and_writes_the_file(tiny_suite_file: Path, tmp_path: Path) -> None:
    models = ["--model", "merged", "--model", "calibrated:lam=0.1,rho=1"]
    asked = [str(tiny_suite_file), *models, "--samples", "8", "--seeds", "1,2"]
    out = tmp_path / "found.json"
    document = json.loads(run_command(*asked, "--json", "--out", str(out)).stdout)
    assert [one["method"] for one in document["methods"]] == ["expert", "merged", "calibrated:lam=0.1,rho=1"]
    assert document["on"]["scores"] == {"split": "test", "samples": None, "seed": 42}
    assert len(document["rows"]) == 4
    read = read_study(out)
    assert read.to_json() == document
    assert read.text() == out.read_text()
    frame = pd.read_csv(StringIO(run_command(*asked, "--csv").stdout))
    assert frame["model"].tolist() == [one["model"] for one in document["rows"]]
    assert frame["average"].tolist() == pytest.approx([one.mean for one in read.rows])
    lines = run_command(*asked, "--markdown").stdout.splitlines()
    assert lines[0].startswith("| method | average |")
    average = next(one for one in read.summaries() if one.method == "merged").average
    assert average is not None
    assert f"| `merged` | {100 * average.mean:.1f} |" in lines[3]
    assert "calibrated:lam=0.1,rho=1" in run_command(*asked).stdout
    assert isinstance(run_command(*asked, "--out", str(out)).exception, InputError)


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--table"],
        ["--model", "merged", "--seed", "1"],
        ["--model", "merged", "--json", "--csv"],
        ["--model", "base", "--model", "merged", "--table", "--seed", "1"],
        ["--model", "base", "--model", "merged", "--samples", "8", "--eval-samples", "4"],
    ],
)
def test_options_that_mean_nothing_are_refused(tiny_suite_file: Path, options: list[str]) -> None:
    found = CliRunner().invoke(featcal_command, ["compare", str(tiny_suite_file), *options])
    assert found.exit_code == 2


def test_a_file_that_is_no_study_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    for content in ("{}", '{"rows": [{}]}', '{"rows": 3}'):
        file.write_text(content)
        with pytest.raises(InputError, match="not the document of a study"):
            read_study(file)


def test_samples_without_labels_have_drift_and_no_scores(
    edit_suite: Callable[[Callable[[dict[str, Any]], None]], Path],
) -> None:
    def unlabelled(content: dict[str, Any]) -> None:
        for task in content["tasks"].values():
            del task["test"]["labels"]

    session = Session(open_family(load_suite(edit_suite(unlabelled)), device="cpu"))
    study = table(session, ["merged"])
    assert [row.found.scores for row in study.rows] == [{}, {}]
    assert study.rows[1].found.drift.keys() == {*TASKS}
    frame = study_tables.method_table(study.summaries())
    assert frame["average"].isna().all()
    assert frame["drift"].iloc[1] > 0


def test_the_table_of_a_page_has_a_column_for_every_need(own: Session) -> None:
    frame = study_tables.method_table(table(own, ["surgery:steps=3", "merged"]).summaries())
    needed = frame.set_index("method")[list(NEEDS)]
    assert needed.loc["surgery:steps=3"].tolist() == [True, False, False, True, True, True]
    assert not needed.loc["merged"].any()

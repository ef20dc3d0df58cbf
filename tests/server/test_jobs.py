"""Jobs: real processes that report, are cancelled, die, take turns, and outlive whoever asked for them."""

from __future__ import annotations

import inspect
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import streamlit
import torch
from app_pages import button, charts, healthy, opened
from safetensors.torch import load_file
from suite_edits import Edit
from tiny_clip import TASKS

from app import jobs as app_jobs
from featcal.calibration import calibrate as calibration
from featcal.calibration.calibrate import CalibrationResult, calibrate_family, config_for
from featcal.family import opening
from featcal.family.opening import Family, open_family
from featcal.figures.verdict.measure import diagnose_model
from featcal.formats import output
from featcal.formats.weights import is_in_memory
from featcal.preflight import estimates
from featcal.server import kinds, lengths, manager, queue, worker
from featcal.server.orders import order, require_current
from featcal.server.queue import DONE, Job, JobOrder, Queue
from featcal.session import session as sessions
from featcal.session.api import evaluate
from featcal.session.cache import nbytes
from featcal.session.session import Session
from featcal.studies.history import History
from featcal.studies.recording import hash_of
from featcal.studies.sweep import Grid, missing
from featcal.suite.calibration_options import CalibrationConfig
from featcal.suite.schema import load_suite
from featcal.suite.views import EvaluationSamples
from featcal.system.errors import InputError
from featcal.system.progress import silent
from featcal.system.resources import bundle_root, cache_folder, ready_suites

STUB = str(Path(__file__).parents[1] / "fixtures" / "job_worker.py")
PATIENCE = 300.0
"""Seconds for anything here, on a machine that has other things to do."""


def steps(name: str = "", blocks: int = 2, seconds: float = 0.0, **more: Any) -> JobOrder:
    """An order for `job_worker`."""
    args = {"blocks": blocks, "seconds": seconds, "name": name, **more}
    return JobOrder(
        "steps", "no suite", args, str(Path.cwd()), f"{name or 'steps'}-{blocks}-{seconds}-{more}".ljust(40)
    )


@pytest.fixture
def line(tmp_path: Path) -> Queue:
    return Queue(tmp_path / "jobs")


@pytest.fixture
def managed(line: Queue, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Starts a manager whose workers are `job_worker`, in a thread of this process."""
    monkeypatch.setattr(manager, "WORKER", (STUB,))
    running: list[threading.Thread] = []

    def start() -> None:
        running.append(threading.Thread(target=manager.manage, args=(line,)))
        running[-1].start()

    yield start
    for job in line.jobs():
        line.cancel(job.id)
    for one in running:
        one.join(PATIENCE)
        assert not one.is_alive()


def until(line: Queue, job: Job, fits: Callable[[Job], bool]) -> Job:
    """The job once it fits."""
    started = time.monotonic()
    while True:
        found = line.get(job.id)
        assert found is not None
        if fits(found):
            return found
        assert time.monotonic() - started < PATIENCE, f"{found} after {PATIENCE} s"
        assert not found.is_over, f"{found}\n{found.log.read_text() if found.log.is_file() else ''}"
        time.sleep(0.01)


def ended(line: Queue, job: Job) -> Job:
    return until(line, job, lambda one: one.is_over)


def gone(pid: int) -> bool:
    """Whether a process has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_progress_arrives_block_by_block_and_the_result_stays(line: Queue, managed: Callable[[], None]) -> None:
    wanted = steps(blocks=4, seconds=0.3)
    job = line.submit(wanted, "ann")
    assert (job.state, line.result(wanted)) == ("queued", None)
    managed()
    seen = [until(line, job, lambda one, done=done: one.done >= done) for done in (1, 2, 3)]
    assert [one.label for one in seen] == ["stepping"] * 3
    assert [one.total for one in seen] == [4] * 3
    assert seen[0].pid is not None
    left = [one.seconds_left(one.progressed or 0.0) for one in seen]
    assert all(value is not None and value >= 0.29 * (4 - one.done) for one, value in zip(seen, left, strict=True))
    last = ended(line, job)
    assert (last.state, last.done, last.total, last.pid) == ("done", 4, 4, None)
    assert line.result(wanted) == {"blocks": 4}
    assert line.find(wanted) == last
    assert "stepping: 3 of 4" in last.log.read_text()


def test_time_left_is_told_by_the_steps_so_far() -> None:
    job = Job(1, steps(), Path(), "ann", "running", "", "calibrating", 3, 12, 7, 0.0, 90.0, 100.0, 106.0, None)
    assert job.seconds_left(106.0) == pytest.approx(18.0)  # 2 s a block, nine to go
    assert job.seconds_left(107.5) == pytest.approx(16.5)
    assert job.seconds_left(300.0) == 0.0
    assert replace(job, done=0).seconds_left(106.0) is None
    assert replace(job, state="done").seconds_left(106.0) is None


@pytest.mark.slow
def test_cancel_ends_a_job_within_one_block_and_leaves_its_log_alone(line: Queue, managed: Callable[[], None]) -> None:
    job = line.submit(steps(blocks=400, seconds=3.0), "ann")
    managed()
    seen = until(line, job, lambda one: one.done >= 1)
    line.cancel(job.id)
    last = ended(line, job)
    assert last.state == "cancelled"
    assert seen.done <= last.done <= seen.done + 1
    assert [file.name for file in last.folder.iterdir()] == ["log.txt"]
    assert seen.pid is not None
    assert gone(seen.pid)


@pytest.mark.slow
def test_cancel_in_line_never_starts(line: Queue, managed: Callable[[], None]) -> None:
    first, second = line.submit(steps("a"), "ann"), line.submit(steps("b"), "ann")
    line.cancel(first.id)
    managed()
    assert ended(line, second).state == "done"
    cancelled = line.get(first.id)
    assert cancelled is not None
    assert (cancelled.state, cancelled.started) == ("cancelled", None)


@pytest.mark.slow
def test_a_killed_worker_is_told_as_died_and_the_queue_goes_on(line: Queue, managed: Callable[[], None]) -> None:
    first, second = line.submit(steps("a", 400, 0.5), "ann"), line.submit(steps("b"), "ann")
    managed()
    pid = until(line, first, lambda one: one.done >= 1).pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    died = ended(line, first)
    assert died.state == "died"
    assert "SIGKILL" in died.message
    assert "memory" in died.message
    assert line.result(died.order) is None
    assert ended(line, second).state == "done"
    again = line.submit(died.order, "ann")
    assert again.id != died.id
    line.cancel(again.id)


@pytest.mark.slow
def test_a_killed_manager_takes_its_worker_along_and_another_goes_on(line: Queue) -> None:
    code = (
        "import sys; from pathlib import Path; from featcal.server import manager, queue; "
        "manager.WORKER = (sys.argv[2],); manager.manage(queue.Queue(Path(sys.argv[1])))"
    )
    command = [sys.executable, "-c", code, str(line.folder), STUB]
    first, second = line.submit(steps("a", 400, 0.5), "ann"), line.submit(steps("b"), "ann")
    with subprocess.Popen(command) as one:
        pid = until(line, first, lambda job: job.done >= 1).pid
        one.kill()
    running = line.get(first.id)
    assert running is not None
    assert running.state == "running"  # nobody has looked yet
    with subprocess.Popen(command) as other:
        assert ended(line, second).state == "done"
        assert other.wait(PATIENCE) == 0
    died = ended(line, first)
    assert died.state == "died"
    assert "stopped while it ran" in died.message
    assert pid is not None
    started = time.monotonic()
    while not gone(pid):
        assert time.monotonic() - started < PATIENCE
        time.sleep(0.01)


@pytest.mark.slow
def test_visitors_take_turns(line: Queue, managed: Callable[[], None]) -> None:
    """Ann has three in line before Bob and Cid come; each of them waits for one of hers at most, not for three."""
    asked = [line.submit(steps(f"{who}{i}"), who) for who, i in [("ann", 1), ("ann", 2), ("ann", 3), ("bob", 1)]]
    asked += [line.submit(steps(f"{who}{i}"), who) for who, i in [("bob", 2), ("cid", 1)]]
    managed()
    times = {job.order.args["name"]: ended(line, job) for job in asked}
    assert sorted(times, key=lambda name: times[name].started or 0.0) == [
        "ann1",
        "bob1",
        "cid1",
        "ann2",
        "bob2",
        "ann3",
    ]
    runs = sorted((one.started or 0.0, one.ended or 0.0) for one in times.values())
    assert all(one[1] <= other[0] for one, other in pairwise(runs))  # one at a time


def test_who_was_served_before_waits_for_who_was_not(line: Queue) -> None:
    for name in ("a", "b"):
        line.submit(steps(name), "ann")
        claimed = line.claim()
        assert claimed is not None
        line.end(claimed.id, "done")
    line.submit(steps("c"), "ann")
    late = line.submit(steps("d"), "bob")
    claimed = line.claim()
    assert claimed is not None
    assert claimed.id == late.id


def test_the_same_order_is_one_job(line: Queue) -> None:
    one, other = line.submit(steps(), "ann"), line.submit(steps(), "bob")
    assert one.id == other.id
    assert len(line.jobs()) == 1
    assert line.submit(steps("else"), "ann").id != one.id


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ends", "message"),
    [
        ("refused", "blocks: there is no such number; take another"),
        ("broken", "ZeroDivisionError, which featcal did not expect; the log says where"),
    ],
)
def test_a_failing_job_says_why(line: Queue, managed: Callable[[], None], ends: str, message: str) -> None:
    job = line.submit(steps(ends=ends), "ann")
    managed()
    last = ended(line, job)
    assert (last.state, last.message) == ("failed", message)
    assert line.result(job.order) is None
    assert ("Traceback" in last.log.read_text()) == (ends == "broken")


@pytest.mark.slow
def test_one_manager_at_a_time(line: Queue, managed: Callable[[], None]) -> None:
    first = line.submit(steps("a", 400, 0.5), "ann")
    second = line.submit(steps("b"), "ann")
    managed()
    until(line, first, lambda one: one.done >= 1)
    manager.manage(line)  # returns: another has the lock
    waiting, running = line.get(second.id), line.get(first.id)
    assert waiting is not None
    assert running is not None
    assert (running.state, waiting.state) == ("running", "queued")


def test_old_and_large_results_go_first(line: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = []
    for name in ("a", "b", "c"):
        job = line.submit(steps(name), "ann")
        assert line.claim() is not None
        job.folder.mkdir(parents=True)
        (job.folder / "result.json").write_text("{}" + " " * 998)
        line.end(job.id, "done")
        kept.append(job)
    monkeypatch.setattr(queue, "KEPT_BYTES", 2500)
    line.tidy()
    assert [line.result(job.order) for job in kept] == [None, {}, {}]
    assert [job.id for job in line.jobs()] == [kept[2].id, kept[1].id]
    monkeypatch.setattr(queue, "KEPT_DAYS", -1.0)
    line.tidy()
    assert line.jobs() == []
    assert list((line.folder / "results").iterdir()) == []


def test_a_result_that_an_unfinished_job_reads_stays(line: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model of a job can be the checkpoint that another one left."""
    monkeypatch.setattr(queue, "KEPT_BYTES", 0)
    made, newer = line.submit(steps("made"), "ann"), line.submit(steps("newer"), "ann")
    for job in (made, newer):
        assert line.claim() is not None
        job.folder.mkdir(parents=True)
        (job.folder / "result.json").write_text("{}")
        line.end(job.id, "done")
    reads = line.submit(steps("reads", models=["merged", str(made.folder / kinds.CHECKPOINT)]), "bob")
    line.tidy()
    assert line.result(made.order) == {}
    line.cancel(reads.id)
    line.tidy()
    assert line.result(made.order) is None


def test_a_job_is_forgotten_once_it_has_ended_and_its_result_with_the_last_of_its_order(line: Queue) -> None:
    first = line.submit(steps(), "ann")
    line.forget(first.id)  # in line
    assert line.claim() is not None
    line.forget(first.id)  # running
    assert [job.id for job in line.jobs()] == [first.id]
    first.folder.mkdir(parents=True)
    (first.folder / "result.json").write_text("{}")
    line.end(first.id, "done")
    again = line.submit(steps(), "bob")
    line.forget(first.id)
    assert ([job.id for job in line.jobs()], line.result(first.order)) == ([again.id], {})
    line.cancel(again.id)
    for _ in range(2):  # what is gone is forgotten already
        line.forget(again.id)
        assert (line.jobs(), line.result(first.order)) == ([], None)


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="FEATCAL_CACHE"):
        Queue(tmp_path / "file" / "jobs").jobs()


def test_an_order_is_told_by_suite_files_options_and_kind(own_suite_file: Path) -> None:
    one = order("calibrate", str(own_suite_file), {"options": {"rho": 2}})
    assert one.key == order("calibrate", str(own_suite_file), {"options": {"rho": 2}}).key
    others = [
        order("calibrate", str(own_suite_file), {"options": {"rho": 1}}),
        order("scores", str(own_suite_file), {"options": {"rho": 2}}),
        order("scores", str(own_suite_file), {"model": str(own_suite_file.parent / "base")}),
    ]
    (own_suite_file.parent / "base" / "model.safetensors").touch()
    others += [order("calibrate", str(own_suite_file), {"options": {"rho": 2}})]
    others += [order("scores", str(own_suite_file), {"model": str(own_suite_file.parent / "base")})]
    assert len({one.key, *(other.key for other in others)}) == 6
    with pytest.raises(InputError, match="there is no kind of job 'dance'; the kinds are calibrate, scores, sweep"):
        order("dance", str(own_suite_file), {})


@pytest.mark.parametrize(
    ("kind", "args"),
    [
        ("scores", lambda model: {"model": model}),
        ("report", lambda model: {"models": ["merged", model], "samples": 64}),
        ("compare", lambda model: {"methods": ["calibrated", f"svc@{model}"]}),
    ],
)
def test_an_order_is_told_by_the_files_of_every_model_that_it_names(
    own_suite_file: Path, tmp_path: Path, kind: str, args: Callable[[str], dict[str, Any]]
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    weights = folder / "model.safetensors"
    weights.write_bytes(b"one")
    asked = order(kind, str(own_suite_file), args(str(folder)))
    assert order(kind, str(own_suite_file), args(str(folder))).key == asked.key
    weights.write_bytes(b"two")
    assert order(kind, str(own_suite_file), args(str(folder))).key != asked.key
    with pytest.raises(InputError, match="while this ran, the suite, a file that it reads, or featcal itself"):
        require_current(asked, "while this ran")


@pytest.mark.slow
def test_a_ready_suite_is_ordered_by_its_name() -> None:
    name = next(iter(ready_suites()))
    assert order("scores", name, {"model": "merged"}).suite == name


@pytest.mark.slow
def test_a_job_outlives_its_server_and_a_session_takes_its_result(
    tiny: Family, tiny_suite_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server is a process that asks and ends at once; what it asked for is found by the next one."""
    monkeypatch.setenv("FEATCAL_CACHE", str(tmp_path))
    config = config_for(tiny, rho=1.5, samples=8)
    code = (
        "import sys, json; from featcal.server import manager, orders, queue; line = queue.Queue(); "
        "order = orders.order('calibrate', sys.argv[1], json.loads(sys.argv[2])); "
        "print(line.submit(order, 'ann').id); manager.ensure_manager(line)"
    )
    args = {"options": asdict(config)}
    asked = subprocess.run(
        [sys.executable, "-c", code, str(tiny_suite_file), json.dumps(args)], capture_output=True, text=True, check=True
    )
    line = Queue()
    wanted = order("calibrate", str(tiny_suite_file), args)
    job = line.find(wanted)
    assert job is not None
    assert job.id == int(asked.stdout)
    last = ended(line, job)
    assert last.state == "done", last.log.read_text()
    assert (last.done, last.total) == (3, 3)
    document = line.result(wanted)
    assert document is not None
    result = kinds.calibration_from(tiny, config, document)
    direct = calibrate_family(tiny, config)
    names = tiny.adapter.tower
    mine, theirs = result.weights.read(names), direct.weights.read(names)
    assert all(torch.equal(mine[name], theirs[name]) for name in names)
    assert result.config == config
    assert result.record["tasks"] == direct.record["tasks"]
    files = {file.name for file in (last.folder / kinds.CHECKPOINT).iterdir()}
    assert {"model.safetensors", "config.json", "featcal.json"} <= files
    assert sorted(file.name for file in last.folder.iterdir()) == ["checkpoint", "log.txt", "result.json"]


@pytest.mark.parametrize("budget", [28_000, 2**30])
def test_a_calibration_of_a_job_is_kept_whatever_the_room_and_read_from_its_folder(
    tiny: Family, tiny_suite_file: Path, line: Queue, monkeypatch: pytest.MonkeyPatch, budget: int
) -> None:
    config = config_for(tiny, rho=1.5, samples=8)
    job = line.submit(order("calibrate", str(tiny_suite_file), {"options": asdict(config)}), "ann")
    done(line, job)
    document = line.result(job.order)
    assert document is not None
    usual = calibrate_family(tiny, config).weights.read(tiny.adapter.tower)
    monkeypatch.setattr("featcal.session.fits.calibrate_family", None)  # nobody calibrates again
    session = Session(tiny, budget=budget)
    asked: list[CalibrationResult] = []

    def read() -> CalibrationResult:
        asked.append(kinds.calibration_from(tiny, config, document))
        return asked[-1]

    found = session.fit.adopt_calibration(config, read, kinds.is_gone)
    assert nbytes(found, beside=vars(tiny).values()) < 28_000 < sum(one.nbytes for one in usual.values())
    assert session.fit.calibrate(config) is found
    # Options that the recipe brings are left out here: they are the same calibration.
    assert session.fit.adopt_calibration(CalibrationConfig(rho=1.5, samples=8), read, kinds.is_gone) is found
    tensors = session.fit.weights(config).read(tiny.adapter.tower)
    assert all(torch.equal(tensors[name], usual[name]) for name in usual)
    assert not is_in_memory(found.weights, tiny.adapter.blocks()[0].names)
    assert not kinds.is_gone(found)
    assert session.fit.adopt_calibration(config, read, kinds.is_gone) is found
    assert len(asked) == 1
    line.forget(job.id)
    assert kinds.is_gone(found)
    with pytest.raises(InputError, match="no folder"):  # it is read again, and there is nothing to read
        session.fit.adopt_calibration(config, read, kinds.is_gone)


def test_scores_of_a_job_are_those_of_a_session(tiny: Family, tiny_suite_file: Path, line: Queue) -> None:
    args = {"model": "merged", "split": "test", "samples": None, "seed": 42}
    done(line, line.submit(order("scores", str(tiny_suite_file), args), "ann"))
    document = line.result(order("scores", str(tiny_suite_file), args))
    assert document is not None
    found, direct = kinds.scores_from(document), evaluate(tiny)
    assert found.to_json() == direct.to_json()
    for task, one in direct.tasks.items():
        assert torch.equal(torch.as_tensor(one.predictions), torch.as_tensor(found.tasks[task].predictions))
        assert torch.equal(torch.as_tensor(one.labels), torch.as_tensor(found.tasks[task].labels))


@pytest.mark.slow
def test_a_job_takes_the_model_of_another_one_by_its_name(
    tiny: Family, tiny_suite_file: Path, line: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So what it writes says which calibration it is about, and nobody calibrates again."""
    config = config_for(tiny, rho=1.5, samples=8)
    calibration = line.submit(order("calibrate", str(tiny_suite_file), {"options": asdict(config)}), "ann")
    done(line, calibration)
    document = line.result(calibration.order)
    assert document is not None
    session = Session(tiny)
    name = session.resolve(config).name
    direct = session.measure.scores(name, EvaluationSamples(8, "test"))
    monkeypatch.setattr("featcal.session.fits.calibrate_family", None)
    made = {"made": {name: document["out"]}}
    scores = order("scores", str(tiny_suite_file), {"model": name, **made, "split": "test", "samples": 8, "seed": 42})
    done(line, line.submit(scores, "ann"))
    found = line.result(scores)
    assert found is not None
    assert found["tasks"] == direct.to_json()["tasks"]
    args = {"models": ["merged", name], **made, "split": "validation", "samples": 8, "seed": 42}
    report = line.submit(order("report", str(tiny_suite_file), args), "ann")
    monkeypatch.setattr(queue, "KEPT_BYTES", 0)
    line.tidy()
    assert line.result(calibration.order) == document  # an unfinished job reads it
    done(line, report)
    written = line.result(report.order)
    assert written is not None
    verdict = diagnose_model(session, "merged", EvaluationSamples(8, "validation"), name)
    assert written["verdict"] == [*verdict.lines]
    assert name in Path(written["out"]).read_text()


@pytest.mark.slow
def test_a_sweep_of_a_job_fills_the_history(
    tiny: Family, tiny_suite_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEATCAL_CACHE", str(tmp_path))
    line, options = Queue(), asdict(config_for(tiny, samples=4))
    args = {"lam": [0.05], "rho": [1.0, 2.0], "alpha": [0.3], "options": options, "n": 4}
    job = line.submit(order("sweep", str(tiny_suite_file), args), "ann")
    done(line, job)
    document = line.result(job.order)
    assert document is not None
    assert sum(point["kind"] == "calibrated" for point in document["points"]) == 2
    session = Session(tiny)
    grid = Grid((0.05,), (1.0, 2.0), (0.3,), config_for(tiny, samples=4))
    known = History().runs(hash_of(session))
    assert missing(session, grid, EvaluationSamples(4, "validation"), known) == ([], [])
    finished = line.get(job.id)
    assert finished is not None
    assert finished.done == finished.total == len(document["points"])


@pytest.mark.parametrize("suite", ["clip-mini", "t5-mini", "lm-mini"])
def test_a_job_takes_the_options_of_every_architecture_in_full(suite: str) -> None:
    """Also those that change nothing for it, as they are."""
    family = open_family(load_suite(suite))
    config = config_for(family)
    assert kinds._config(family, kinds.job_options(config)) == config


def done(line: Queue, job: Job) -> None:
    """Do a job in this process."""
    claimed = line.claim()
    assert claimed is not None
    assert claimed.id == job.id
    assert worker.work(line, job.id) == 0


@pytest.mark.slow
def test_a_failed_calibration_says_it_in_the_librarys_words_and_leaves_nothing(
    tiny_suite_file: Path, line: Queue, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    for args, message in [
        ({"options": {"alpha": 2.0}}, "alpha is 2; it lies in [0, 1]"),
        ({"out": str(out)}, "exists already"),
    ]:
        job = line.submit(order("calibrate", str(tiny_suite_file), args), "ann")
        assert line.claim() is not None
        assert worker.work(line, job.id) == 1
        failed = line.get(job.id)
        assert failed is not None
        assert failed.state == "failed"
        assert message in failed.message
    assert not list(tmp_path.rglob("*.partial"))


@pytest.mark.parametrize("when", ["in line", "ran"])
def test_a_job_whose_files_change_is_not_filed_under_what_they_were(
    own_suite_file: Path, line: Queue, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    args = {"model": "merged", "split": "test", "samples": 2, "seed": 42}
    job = line.submit(order("scores", str(own_suite_file), args), "ann")
    assert line.claim() is not None
    score = kinds.run_scores

    def change() -> None:
        (own_suite_file.parent / "base" / "model.safetensors").touch()

    def changes(work: kinds.Work) -> dict[str, Any]:
        found = score(work)
        change()
        return found

    if when == "in line":
        change()
    monkeypatch.setattr(worker, "KINDS", {"scores": changes})
    assert worker.work(line, job.id) == 1
    failed = line.get(job.id)
    assert failed is not None
    assert failed.state == "failed"
    assert when in failed.message
    assert "order it again" in failed.message
    assert line.result(job.order) is None
    assert line.result(order("scores", str(own_suite_file), args)) is None


@pytest.mark.parametrize("begun", [False, True])
def test_a_calibration_that_is_ended_leaves_no_partial_folder(
    tiny_suite_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begun: bool
) -> None:
    """But one that was there before stays: it is somebody's interrupted run."""
    out, partial = tmp_path / "out", tmp_path / "out.partial"

    def ends(label: str, at: int, total: int) -> None:
        if at == 2:
            raise SystemExit(worker.CANCELLED)

    work = kinds.Work(str(tiny_suite_file), {"out": str(out), "options": {"samples": 8}}, tmp_path, ends)
    if begun:
        monkeypatch.setattr(output, "remove_partial", lambda *_, **__: None)
    with pytest.raises(SystemExit):
        kinds.run_calibration(work)
    assert not out.exists()
    assert partial.exists() == begun
    if begun:  # what it had finished is not computed again
        monkeypatch.undo()
        assert len(list((partial / "blocks").glob("*.safetensors"))) == 2
        with pytest.raises(SystemExit):
            kinds.run_calibration(work)
        assert partial.exists()
        assert kinds.run_calibration(replace(work, progress=lambda *_: None))["out"] == str(out)
        assert not partial.exists()


WINNER = """
import sys, torch
from types import SimpleNamespace
from featcal.formats.output import OutputFolder
with OutputFolder(sys.argv[1]) as folder:
    folder.put(SimpleNamespace(name="a", names=["w"]), {"w": torch.ones(3)})
    print("begun", flush=True)
    if not sys.stdin.readline():
        sys.exit(1)
    folder.adopt(SimpleNamespace(name="a"), "model.safetensors")
    folder.commit()
"""


@pytest.mark.slow
@pytest.mark.parametrize("other", ["writes", "died"])
def test_a_job_that_is_refused_leaves_what_another_process_writes_or_has_left(
    tiny_suite_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    """A person calibrates to the same folder while the job reads its models and samples."""
    out, blocks, draw = tmp_path / "out", tmp_path / "out.partial" / "blocks", calibration.own_passes
    command = [sys.executable, "-c", WINNER, str(out)]
    started: list[subprocess.Popen[str]] = []

    def begin_meanwhile(*given: Any) -> Any:
        winner = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(winner)
        assert winner.stdout is not None
        assert winner.stdout.readline() == "begun\n"
        if other == "died":
            winner.communicate(timeout=PATIENCE)
        return draw(*given)

    monkeypatch.setattr(calibration, "own_passes", begin_meanwhile)
    work = kinds.Work(str(tiny_suite_file), {"out": str(out), "options": {"samples": 8}}, tmp_path, lambda *_: None)
    with pytest.raises(InputError, match="is writing to" if other == "writes" else "left from an interrupted run"):
        kinds.run_calibration(work)
    assert sorted(file.name for file in blocks.iterdir()) == ["a.json", "a.safetensors"]
    if other == "writes":
        started[0].communicate("go on\n", timeout=PATIENCE)
        assert started[0].returncode == 0
        assert load_file(out / "model.safetensors")["w"].tolist() == [1, 1, 1]
        assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_long_is_what_takes_longer_than_a_process_to_start_or_is_of_a_large_model(
    tiny: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = Session(tiny)
    assert not lengths.is_long(session, lengths.LONG_IF_SMALL)
    assert lengths.is_long(session, lengths.LONG_IF_SMALL + 0.1)
    monkeypatch.setattr(lengths, "SMALL", 100)
    assert not lengths.is_long(session, lengths.LONG)
    assert lengths.is_long(session, lengths.LONG + 0.1)


def test_tiny_models_leave_a_core_to_the_browser(tiny: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    session, before = Session(tiny), torch.get_num_threads()

    def threads(cores: int) -> int:
        monkeypatch.setattr(lengths, "_threads_at_first", lambda: cores)
        with ThreadPoolExecutor(1) as visitor:
            visitor.submit(lengths.share_cores, session).result()
            return visitor.submit(torch.get_num_threads).result()

    assert [threads(cores) for cores in (5, 2, 1)] == [4, 1, 1]
    monkeypatch.setattr(opening, "TINY", 100)
    assert threads(5) == 5
    assert torch.get_num_threads() == before  # of other visitors


def test_estimates_grow_with_samples(tiny: Family) -> None:
    session = Session(tiny)
    few, many = (lengths.seconds_to_calibrate(session, config_for(tiny, samples=n, batch_size=1)) for n in (2, 12))
    assert 2 * few < many < 12 * few
    left_open = CalibrationConfig(samples=12, batch_size=1, blocks=("block 0,block 1,block 2",))
    assert lengths.seconds_to_calibrate(session, left_open) == many
    made = {name: lengths.seconds_to_make(session, name) for name in ("regmean:samples=2", "fisher:samples=2", "tsv-m")}
    assert made["regmean:samples=2"] < lengths.seconds_to_make(session, "regmean:samples=12")
    assert made["fisher:samples=2"] == 10 * made["regmean:samples=2"]
    assert made["tsv-m"] == 0


def test_estimates_are_of_the_parts_that_are_calibrated(tiny: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimates, "gemm_rate", lambda _: 1e6)  # a slow machine: operations outweigh calls
    monkeypatch.setattr(estimates, "CALL", 0.0)
    session, layers = Session(tiny), tiny.adapter.block_layers()

    def seconds(**options: Any) -> float:
        return lengths.seconds_to_calibrate(session, config_for(tiny, samples=8, **options))

    whole, (one, *_) = seconds(), TASKS
    assert seconds(tasks=[one]) < whole
    # whatever is calibrated, the expert and the student go through every block
    walked = estimates.scoring_seconds(
        tiny.adapter, lengths.draw_sizes(session, EvaluationSamples(8, "calibration")), 64, {}
    )
    blocks = [seconds(blocks=[layer]) for layer in layers]
    assert all(2 * walked < block < whole for block in blocks)
    assert sum(block - 2 * walked for block in blocks) == pytest.approx(whole - 2 * walked)
    maps = [seconds(maps=[part]) for part in tiny.adapter.parts()]
    assert sum(part - 3 * walked for part in maps) == pytest.approx(whole - 3 * walked)


# The app.


@pytest.fixture
def slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, instant_maps: None) -> Queue:
    """Everything is long, and no manager comes: the test does the jobs itself."""
    monkeypatch.setenv("FEATCAL_CACHE", str(tmp_path))
    monkeypatch.setattr(app_jobs, "is_long", lambda *_: True)
    monkeypatch.setattr(app_jobs, "ensure_manager", lambda _: None)
    assert cache_folder() == tmp_path
    streamlit.cache_resource.clear()  # what another test has measured in this process would be there at once
    sessions._open.clear()
    return Queue()


@pytest.mark.filterwarnings("ignore")
def test_a_page_is_drawn_anew_as_pieces_come(slow: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    """After every twentieth part of them, and not more often."""

    class Anew(Exception):
        pass

    def renew() -> None:
        raise Anew

    monkeypatch.setattr(app_jobs.st, "rerun", renew)
    job = slow.submit(order("sweep", "clip-mini", {"lam": [1.0]}), "ann")
    slow.claim()
    slow.report(job.id, "sweep", 5, 40)
    look = inspect.unwrap(app_jobs._follow)
    for shown in (None, 5, 4):
        look(job.id, shown)
    with pytest.raises(Anew):
        look(job.id, 3)
    slow.end(job.id, DONE)
    with pytest.raises(Anew):
        look(job.id, 40)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_page_asks_waits_and_shows_the_result(tiny_suite_file: Path, slow: Queue) -> None:
    app = opened(tiny_suite_file, "calibrate", rho="1.3", samples="8")
    assert healthy(app)
    assert charts(app) == 0
    assert slow.jobs() == []
    button(app, "Start").click().run()
    assert healthy(app)
    (job,) = slow.jobs()
    assert job.order.args["options"]["rho"] == 1.3
    assert [one for one in app.button if one.label == "Cancel"]
    done(slow, job)
    app.run()
    assert healthy(app)
    assert charts(app) == 3
    assert not [one for one in app.button if one.label == "Cancel"]
    other = opened(tiny_suite_file, "calibrate", rho="1.3", samples="8")  # another visitor finds it
    assert charts(other) == 3
    assert len(slow.jobs()) == 1
    slow.forget(job.id)  # with its folder: what was read from there is asked for again
    other.run()
    assert healthy(other)
    assert charts(other) == 0
    assert button(other, "Start")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_page_says_how_a_job_ended_and_starts_it_again(tiny_suite_file: Path, slow: Queue) -> None:
    app = opened(tiny_suite_file, "calibrate", rho="1.4", samples="8")
    button(app, "Start").click().run()
    button(app, "Cancel").click().run()
    assert [job.state for job in slow.jobs()] == ["cancelled"]
    app.run()
    assert "cancelled" in app.info[0].value
    button(app, "Start again").click().run()
    assert sorted(job.state for job in slow.jobs()) == ["cancelled", "queued"]
    claimed = slow.claim()
    assert claimed is not None
    slow.end(claimed.id, "died", "its process was ended by SIGKILL")
    app.run()
    assert "died: its process was ended by SIGKILL" in app.warning[0].value
    button(app, "Start again").click().run()
    claimed = slow.claim()
    assert claimed is not None
    slow.end(claimed.id, "failed", "lam: *too* small")
    app.run()
    assert app.error[0].value == r"lam: \*too\* small"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_jobs_page_lists_cancels_and_removes(tiny_suite_file: Path, slow: Queue) -> None:
    first = slow.submit(order("calibrate", str(tiny_suite_file), {"options": {"rho": 1.0}}), "ann")
    second = slow.submit(order("calibrate", str(tiny_suite_file), {"options": {"rho": 2.0}}), "bob")
    assert slow.claim() is not None
    slow.report(first.id, "calibrating", 1, 3)
    app = opened(tiny_suite_file, "jobs")
    assert healthy(app)
    assert sum(one.label == "Cancel" for one in app.button) == 2
    app.button(key=f"listed-cancel-{second.id}").click().run()
    assert healthy(app)
    assert slow.find(second.order).state == "cancelled"  # type: ignore[union-attr]
    slow.end(first.id, "done")
    app.run()
    assert [one.label for one in app.button if one.key.startswith("remove-")] == ["Remove with its result"] * 2
    app.button(key=f"remove-{first.id}").click().run()
    assert [job.id for job in slow.jobs()] == [second.id]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_another_merge_is_calibrated_by_a_job(tiny_suite_file: Path, tiny: Family, slow: Queue) -> None:
    app = opened(tiny_suite_file, "drift", beside="calibrated:samples=8@ties", n="8")
    assert charts(app) == 0
    button(app, "Start").click().run()
    (job,) = slow.jobs()
    assert (job.order.args["model"], job.order.args["options"]["samples"]) == ("ties", 8)
    assert "model ties" in app_jobs.job_title(job.order)
    done(slow, job)
    app.run()
    assert healthy(app)
    assert charts(app) > 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_scores_that_are_there_stay_where_another_job_was_cancelled(tiny_suite_file: Path, slow: Queue) -> None:
    app = opened(tiny_suite_file, "accuracy", beside="ties")
    while starts := [one for one in app.button if one.label == "Start"]:
        starts[0].click().run()
    for job in slow.jobs():
        done(slow, job)
    app.run()
    assert charts(app) == 1
    button(app, "Score ties").click().run()
    button(app, "Cancel").click().run()
    app.run()
    assert healthy(app)
    assert [one.value for one in app.info if "cancelled" in one.value]
    assert charts(app) == 1


@pytest.mark.parametrize(("kind", "words"), [("sweep", "finished parts are kept"), ("scores", "nothing is kept")])
def test_what_is_left_of_a_cancelled_job(kind: str, words: str, line: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    monkeypatch.setattr(app_jobs.st, "info", lambda text, **_: shown.append(text))
    monkeypatch.setattr(app_jobs, "_log", lambda _: None)
    job = line.submit(JobOrder(kind, "no suite", {}, str(Path.cwd()), kind.ljust(40)), "ann")
    app_jobs._show_end(replace(job, state="cancelled"))
    assert words in shown[0]


def test_where_a_job_is_in_one_line(line: Queue) -> None:
    job = line.submit(steps(), "ann")
    line.submit(steps("b"), "ann")
    assert app_jobs.progress_line(job, time.time(), line) == "in line; 1 other job unfinished, visitors take turns"
    at = replace(job, order=replace(job.order, kind="calibrate"), state="running", started=90.0, since=100.0)
    assert "being read, 12 s so far" in app_jobs.progress_line(at, 102.0, line)
    at = replace(at, label="calibrating", done=3, total=12, progressed=106.0)
    assert app_jobs.progress_line(at, 106.0, line) == "calibrating: block 4 of 12, 16 s so far, about 18 s left"
    at = replace(at, done=12)
    assert app_jobs.progress_line(at, 140.0, line) == "calibrating: writing the result, 50 s so far"
    line.cancel(job.id)
    assert app_jobs.progress_line(at, 140.0, line) == "ending …"


def test_a_visitor_is_told_by_the_cookie_and_never_by_its_content(monkeypatch: pytest.MonkeyPatch) -> None:
    def comes(cookie: str) -> str:
        monkeypatch.setattr(app_jobs.st, "context", SimpleNamespace(cookies={"_streamlit_xsrf": cookie}))
        return app_jobs.visitor()

    assert comes("2|secret") == comes("2|secret")
    assert comes("2|secret") != comes("2|other")
    assert "secret" not in comes("2|secret")


def test_pages_are_ended_by_what_takes_the_notice_of_stop_away() -> None:
    root = bundle_root()
    files = [*root.glob("app/*.py"), *root.glob("pages/*.py")]
    assert len(files) > 20
    assert [file.name for file in files if "st.stop()" in file.read_text(encoding="utf-8")] == ["page_end.py"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("instant_maps")
def test_a_page_that_ends_early_is_not_called_stopped() -> None:
    for page in ("accuracy", "models"):
        app = opened("/nowhere/suite.yaml", page)
        assert not app.exception
        assert not app.warning
        assert [one.label for one in app.button] == ["Open clip-mini instead"]


def test_methods_are_scored_on_the_split_that_the_suite_has(edit_suite: Edit, tmp_path: Path) -> None:
    """Without a test split every row failed once its model was made, and nothing was kept."""

    def drop_test(content: dict[str, Any]) -> None:
        for task in content["tasks"].values():
            del task["test"]

    args = {"methods": ["merged", "base"], "seeds": [42], "samples": 4}
    suite = str(edit_suite(drop_test))
    found = kinds.run_comparison(kinds.Work(suite, args, tmp_path, silent))
    assert found["on"]["scores"]["split"] == load_suite(suite).scored_split != "test"
    assert {row["method"]: row["failure"] for row in found["rows"]} == dict.fromkeys(("expert", "merged", "base"), "")

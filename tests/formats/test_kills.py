"""A process that is killed at any of its file operations: what lies there then is no model to anybody, and the next run
ends as if nothing had happened."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from typing import Any

import open_clip  # noqa: F401  before processes are forked, each of which would import it
import pytest
from clean_process import end_command, in_clean_process
from command_line import Run as Command
from kills import STUDY, WRITES, content, in_a_process, require_none_loads, same_model, trials
from lanes import rows
from turns import NIGHTLY, has_its_turn

from featcal.calibration.calibrate import calibrate_to_folder, config_for
from featcal.family.opening import Family, open_family
from featcal.server.queue import JobOrder, Queue
from featcal.studies.history import History, HistoryEntry, RunMeasurement, TaskValue, new_run
from featcal.suite.schema import load_suite

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked")
OPERATIONS = ("open", "os.rename", "os.mkdir", "os.link", "os.remove", "os.rmdir", "os.chmod", "shutil.rmtree")


def observed(place: Path, work: Callable[[], object], operate: Callable[[int], object]) -> Callable[[], object]:
    """The same work for a child, which calls `operate` with its number before every operation below `place`."""

    def watched() -> None:
        numbers = count()

        def audit(event: str, arguments: tuple[Any, ...]) -> None:
            if event in OPERATIONS and str(arguments[0]).startswith(f"{place}{os.sep}"):
                operate(next(numbers))

        sys.addaudithook(audit)
        work()

    return watched


def killed_at(place: Path, point: int, work: Callable[[], object]) -> Callable[[], object]:
    """The same work, killed before its operation number `point` below `place`."""
    return observed(place, work, lambda number: os.kill(os.getpid(), signal.SIGKILL) if number == point else None)


def count_operations(place: Path, work: Callable[[], object]) -> int:
    """Do the work in a child; return how many operations below `place` it took."""
    reading, writing = os.pipe()
    assert in_a_process(observed(place, work, lambda _: os.write(writing, b"."))) == 0
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        return len(pipe.read())


def kill_at_random_moments(family: Family, place: Path) -> list[tuple[str, str]]:
    return list(trials(family, place, 15, 0))


@pytest.mark.slow
def test_killed_at_random_moments(tiny: Family, tmp_path: Path) -> None:
    """What `benchmarks/kills.py` does with a larger suite and two hundred kills."""
    found = in_clean_process(kill_at_random_moments, tiny, tmp_path)
    assert [name for name, _ in found] == 3 * [*WRITES]
    assert sum(what in {"something half done", "nothing"} for _, what in found) >= 5


def kill_and_resume(name: str, family: Family, place: Path, point: int, expected: Mapping[str, Any]) -> bool:
    """Kill a write at one of its operations, hold what lies there and the run after it against a whole one; return
    False where the write was finished, as it had fewer operations."""
    write, out = WRITES[name], place / "out"
    place.mkdir()
    ended = in_a_process(killed_at(place, point, lambda: write(family, out, False)))
    if os.WIFEXITED(ended):
        assert os.WEXITSTATUS(ended) == 0
        return False
    assert os.WTERMSIG(ended) == signal.SIGKILL
    if (out / STUDY).exists() if name == "studied" else out.exists():
        assert content(out) == expected, f"killed at operation {point}"
    else:
        left = sorted(one for one in place.rglob("*") if one.is_dir())
        assert in_a_process(lambda: require_none_loads(left, expected)) == 0, f"killed at operation {point}"
        assert in_a_process(lambda: write(family, out, True)) == 0, f"after a kill at operation {point}"
        assert content(out) == expected, f"resumed after a kill at operation {point}"
        assert list(place.iterdir()) == [out]
    return True


def test_a_merge_that_is_killed_half_way(tiny: Family, tmp_path: Path) -> None:
    WRITES["merged"](tiny, tmp_path / "whole", False)
    expected = content(tmp_path / "whole")
    assert in_clean_process(kill_and_resume, "merged", tiny, tmp_path / "killed", 12, expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.nightly] * NIGHTLY) for name in sorted(WRITES)])
def test_killed_at_its_file_operations(name: str, tiny: Family, tmp_path: Path) -> None:
    """At those whose turn it is on this commit; at every one in a nightly run."""
    in_clean_process(kill_at_operations, name, tiny, tmp_path)


def kill_at_operations(name: str, family: Family, place: Path) -> None:
    whole, counted = place / "whole", place / "counted"
    counted.mkdir()
    points = range(count_operations(counted, lambda: WRITES[name](family, counted / "out", False)))
    assert len(points) >= 8
    assert in_a_process(lambda: WRITES[name](family, whole, False)) == 0
    expected = content(whole)
    drawn = [point for point in points if has_its_turn(f"{name} {point}")] or [len(points) // 2]
    for point in drawn:
        assert kill_and_resume(name, family, place / f"at {point}", point, expected), f"no operation {point}"


WRITTEN = ("blocks/vision_model.encoder.layers.1.safetensors", "model/model.safetensors")


@pytest.mark.parametrize("file", rows(WRITTEN, quick=(), slow=WRITTEN[:1]))
def test_the_command_killed_while_it_runs(file: str, run: Command, tmp_path: Path) -> None:
    """What it left is no output, and the same command with --resume gives that of a whole run."""
    out, whole = tmp_path / "killed" / "out", tmp_path / "whole"
    words = ["calibrate", "clip-mini", "--samples", "8", "--device", "cpu", "--out", out]
    there = (out.with_name("out.partial") / file).exists
    assert in_clean_process(end_command, words, signal.SIGKILL, there, tmp_path / "log") == -signal.SIGKILL
    assert not out.exists()
    assert run(*words, "--resume")[0] == 0
    family = open_family(load_suite("clip-mini"), "cpu")
    calibrate_to_folder(family, config_for(family, samples=8), whole)
    assert same_model(content(out), content(whole))
    assert [*out.parent.iterdir()] == [out]


def killed_after(done: int, seconds: float, step: Callable[[int], object]) -> int:
    """Take steps in a child that is killed so long after step `done`; how many it had finished by then."""
    reading, writing = os.pipe()

    def work() -> None:
        for number in range(10_000):
            step(number)
            os.write(writing, b".")

    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(1)
    os.close(writing)
    finished = 0
    while finished <= done:
        finished += len(os.read(reading, 1))
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    while more := os.read(reading, 4096):
        finished += len(more)
    os.close(reading)
    return finished


@pytest.mark.slow
def test_history_and_queue_hold_what_was_finished_before_a_kill(tmp_path: Path) -> None:
    in_clean_process(kill_history_and_queue, tmp_path)


def kill_history_and_queue(tmp_path: Path) -> None:
    """Nothing is half there: at most the one step that was under way is in them beside what was finished."""
    history, line, dice = History(tmp_path / "runs"), Queue(tmp_path / "jobs"), random.Random(0)
    scores = {"pets": TaskValue("accuracy", 0.75, 8)}
    measured = RunMeasurement("features", "test", 8, 42, scores, {"pets": 0.5}, 1.5)

    def run(number: int) -> HistoryEntry:
        return new_run(("tiny", "0123456789abcdef"), f"calibrated:lam={number}", {"lam": number}, {"featcal": "1"})

    def step(number: int) -> None:
        kept = history.add(run(number), measured)
        job = line.submit(JobOrder("steps", "tiny", {"number": number}, str(tmp_path), f"{number:040}"), "visitor")
        claimed = line.claim()
        assert kept
        assert claimed == line.get(job.id)
        line.report(job.id, "block", 1, 2)
        line.end(job.id, "done")

    for trial in range(12):
        shutil.rmtree(history.folder, ignore_errors=True)
        shutil.rmtree(line.folder, ignore_errors=True)
        finished = killed_after(trial % 4, dice.uniform(0, 0.03), step)
        found = {one.id: one for one in history.runs()}
        assert not history.problems
        assert (
            {run(number).id for number in range(finished)} <= found.keys() <= {run(n).id for n in range(finished + 1)}
        )
        assert all(found[run(number).id].measured == (measured,) for number in range(finished))
        jobs = {job.order.args["number"]: job.state for job in line.jobs()}
        assert {number: jobs.pop(number) for number in range(finished)} == dict.fromkeys(range(finished), "done")
        assert jobs.keys() <= {finished}
        line.end_all("its process was killed")  # what a manager does first
        step(finished)  # the one under way goes on, whatever of it was done
        assert len(history.runs()) == finished + 1
        assert not line.busy()

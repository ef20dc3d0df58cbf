"""A process that is killed at any of its file operations: what lies there then is no model to anybody, and the next run
ends as if nothing had happened."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kills import STUDY, WRITES, content, in_a_process, require_none_loads, trials

from featcal.family import Family

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked")]
OPERATIONS = ("open", "os.rename", "os.mkdir", "os.link", "os.remove", "os.rmdir", "os.chmod", "shutil.rmtree")


def killed_at(place: Path, count: int, work: Callable[[], object]) -> Callable[[], object]:
    """The same work, killed before its operation number `count` below `place`."""

    def doomed() -> None:
        seen = 0

        def audit(event: str, arguments: tuple[Any, ...]) -> None:
            nonlocal seen
            if event in OPERATIONS and str(arguments[0]).startswith(str(place)):
                if seen == count:
                    os.kill(os.getpid(), signal.SIGKILL)
                seen += 1

        sys.addaudithook(audit)
        work()

    return doomed


def test_killed_at_random_moments(tiny: Family, tmp_path: Path) -> None:
    """What `benchmarks/kills.py` does with a larger suite and two hundred kills."""
    found = list(trials(tiny, tmp_path, 15, 0))
    assert [name for name, _ in found] == 3 * [*WRITES]
    assert sum(what in {"something half done", "nothing"} for _, what in found) >= 5


@pytest.mark.parametrize("name", sorted(WRITES))
def test_killed_at_every_file_operation(name: str, tiny: Family, tmp_path: Path) -> None:
    write = WRITES[name]
    whole = tmp_path / "whole"
    write(tiny, whole, False)
    expected, points = content(whole), 0
    while True:
        place = tmp_path / f"at {points}"
        place.mkdir()
        out = place / "out"
        ended = in_a_process(killed_at(place, points, lambda: write(tiny, out, False)))  # noqa: B023
        if os.WIFEXITED(ended):
            assert os.WEXITSTATUS(ended) == 0
            break
        assert os.WTERMSIG(ended) == signal.SIGKILL
        if (out / STUDY).exists() if name == "studied" else out.exists():
            assert content(out) == expected, f"killed at operation {points}"
        else:
            left = sorted(one for one in place.rglob("*") if one.is_dir())
            assert in_a_process(lambda: require_none_loads(left, expected)) == 0, f"killed at operation {points}"  # noqa: B023
            assert in_a_process(lambda: write(tiny, out, True)) == 0, f"after a kill at operation {points}"  # noqa: B023
            assert content(out) == expected, f"resumed after a kill at operation {points}"
            assert list(place.iterdir()) == [out]
        points += 1
    assert points >= 8

"""Every shipped suite runs as it is on a Hub with its repositories: from nothing, once more, and without a network."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub.box import Box, play
from hub.session import Result, environment, run_session
from lanes import rows

from featcal.suite.schema import load_suite
from featcal.system.resources import ready_suites

SUITES = list(ready_suites())


def commands(suite: str) -> dict[str, list[str]]:
    """Return the command lines of a first visit, by the command."""
    # Language models are scored by a harness elsewhere, so their suites have no test split.
    split = [] if "test" in load_suite(suite).splits() else ["--split", "calibration"]
    few = ["--eval-samples", "4"]
    return {
        "check": ["check", suite],
        "drift": ["drift", suite, *few],
        "calibrate": ["calibrate", suite, "--samples", "8", "--out", "repaired"],
        "evaluate": ["evaluate", suite, *few, *split],
        "diagnose": ["diagnose", suite, *few],
        "export": ["export", "repaired", "--out", "exported"],
    }


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Box]:
    with play(tmp_path_factory.mktemp("hub")) as played:
        yield played


def assert_success(suite: str, results: list[Result]) -> None:
    names = [*commands(suite), "the app's first page"]
    assert {name: err[-2000:] for name, (status, _, err) in zip(names, results, strict=True) if status} == {}


def digest(folder: Path) -> str:
    weights = sorted(folder.glob("*.safetensors"))
    assert weights
    return hashlib.sha256(b"".join(file.read_bytes() for file in weights)).hexdigest()


@pytest.mark.parametrize("suite", rows(SUITES, quick=[], slow=SUITES))
def test_a_suite_runs_cold_warm_and_offline(suite: str, box: Box, tmp_path: Path) -> None:
    box.stock(suite)
    visits = {"cold": {}, "warm": {}, "offline": {"HF_HUB_OFFLINE": "1", "FEATCAL_CACHE": str(tmp_path / "another")}}
    asked, digests = {}, set()
    for visit, more in visits.items():
        (tmp_path / visit).mkdir()
        where = environment(box.address, tmp_path / "home", **more)
        assert_success(suite, run_session([*commands(suite).values()], where, tmp_path / visit, suite))
        digests.add(digest(tmp_path / visit / "repaired"))
        asked[visit] = [one["path"] for one in box.hub.requests]
        box.hub.requests.clear()
    assert len(digests) == 1
    assert any("/_cdn/" in path for path in asked["cold"])  # where large files are fetched from
    assert [path for path in asked["warm"] if "/_cdn/" in path] == []
    assert asked["offline"] == []

"""Every shipped suite runs as it is on a Hub with its repositories: from nothing, once more, and without a network."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub.box import Box, play
from hub.session import FIXTURES, Result, environment, run_session
from lanes import rows

from featcal.system.resources import ready_suites

SUITES = list(ready_suites())
OF_EVERY_KIND = ("clip-vit-base-patch32-ta8", "flan-t5-base-glue", "gpt2-glue", "mergebench-llama-3.2-3b")
"""Suites that have their turn on commits; one takes minutes, so the others wait for the night."""


def commands(suite: str) -> dict[str, list[str]]:
    """Return the command lines of a first visit, by the command."""
    few = ["--eval-samples", "4"]
    return {
        "check": ["check", suite],
        "drift": ["drift", suite, *few],
        "calibrate": ["calibrate", suite, "--samples", "8", "--out", "repaired"],
        "evaluate": ["evaluate", suite, *few],
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


@pytest.mark.parametrize("suite", rows(SUITES, quick=[], slow=OF_EVERY_KIND))
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


@pytest.mark.slow
def test_sizes_of_the_real_files_are_told(box: Box, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    suite = "clip-vit-base-patch32-ta8"
    box.stock(suite)
    monkeypatch.setattr(box.hub, "real_sizes", True)
    words = ["check", suite, "--json"]
    ((status, out, err),) = run_session([words], environment(box.address, tmp_path), tmp_path)
    assert status == 0, err[-2000:]
    found = {one["ref"].partition(" ")[0]: one for one in json.loads(out)["downloads"]}
    base, expert = found["openai/clip-vit-base-patch32"], found["tanganke/clip-vit-base-patch32_sun397"]
    assert base["pickled_bytes"] == 605_247_071
    assert base["pickled_bytes"] < base["bytes"] < 612_000_000  # with the vocabulary
    assert 349_850_000 < expert["bytes"] < 349_860_000
    assert max(one["bytes"] for one in found.values()) > 7_280_000_000  # sun397
    assert [one["path"] for one in box.hub.requests if "pytorch_model" in one["path"]] == []


@pytest.mark.slow
def test_one_command_starts_the_hub(tmp_path: Path) -> None:
    command = [sys.executable, str(FIXTURES / "hub"), "gpt2-glue", "--port", "0", "--folder", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as started:
        try:
            assert started.stdout is not None
            line = started.stdout.readline()
            address = line.partition("HF_ENDPOINT=")[2].split()[0]
            with urllib.request.urlopen(f"{address}/api/models/tanganke/gpt2_cola") as answer:
                assert json.load(answer)["cardData"] == {"datasets": ["nyu-mll/glue"]}
        finally:
            started.terminate()

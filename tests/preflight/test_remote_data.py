"""Data sets on the Hub before they are fetched: what a run would fetch of them, and what it could not read."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hub_data_sets import Log, fetched, forget, go_offline, play, serving
from suite_edits import Edit

from featcal.preflight import remote
from featcal.preflight.check import Preflight, check_suite
from featcal.samples import hub_rows
from featcal.samples.hub import read_hub
from featcal.samples.sources import preview_samples as look_at
from featcal.suite.schema import load_suite
from featcal.system.errors import InputError

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def repositories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("repositories")


@pytest.fixture(scope="module")
def address(repositories: Path) -> Iterator[str]:
    yield from serving(repositories)


@pytest.fixture
def log(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Log:
    return play(address, tmp_path, monkeypatch)


def look(edit_suite: Edit, **source: Any) -> Preflight:
    """Check a suite one of whose tasks is tested on a data set on the Hub."""
    return check_suite(
        load_suite(edit_suite(lambda content: content["tasks"]["pets"].update(test=source))), probe=False
    )


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ({"hub": "me/pictures", "split": "training"}, "data set 'me/pictures' has no split 'training' (splits: "),
        ({"hub": "me/bare", "split": "valid"}, "has no split 'valid' (splits: 'train', 'test', 'contrast')"),
        ({"hub": "me/pictures", "split": "test", "config": "full"}, "has no configuration 'full' (configurations: "),
        ({"hub": "me/pictures", "split": "test", "image": "img"}, "'img', which is not there (columns: image, label)"),
        ({"hub": "me/scripted", "split": "test"}, "is read by a script of its own (scripted.py), which `datasets`"),
        ({"hub": "me/empty", "split": "test"}, "data set 'me/empty' has no files that `datasets` reads"),
        # What no card says is not known, and no problem.
        ({"hub": "me/bare", "split": "test", "image": "img"}, None),
    ],
)
def test_what_cannot_be_read_is_a_problem_before_anything_is_fetched(
    source: dict[str, Any], said: str | None, edit_suite: Edit, log: Log
) -> None:
    found = look(edit_suite, **source)
    # Beside this the Hub's client asks once for names of agents.
    paths = {one["path"].partition("?")[0] for one in log()} - {"/api/agent-harnesses"}
    assert paths == {f"/api/datasets/{source['hub']}"}
    if said is None:
        assert found.problems == ()
    else:
        (problem,) = found.problems
        assert problem.startswith("task 'pets', test samples: ")
        assert said in problem


def test_a_run_fetches_what_check_has_said(edit_suite: Edit, log: Log, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(remote, "free_bytes", lambda folder: 10_000)
    (download,) = (found := look(edit_suite, hub="me/pictures", split="test")).downloads
    assert (download.ref, download.files) == ("me/pictures (test)", 2)
    assert download.copied_bytes == found.prepared_bytes == 8000  # as the card says
    note = "or written to read it, 9.8 KiB are free on the disk of the Hub's local cache"
    assert any(note in one for one in found.notes)
    log()
    read_hub("me/pictures", tmp_path, None, "test", None)
    assert sum(one["bytes"] for one in log() if fetched([one])) == download.bytes
    assert look(edit_suite, hub="me/pictures", split="test").downloads == ()
    (problem,) = look(edit_suite, hub="me/pictures", split="tset").problems
    assert problem.startswith("task 'pets', test samples: data set 'me/pictures' has no split 'tset'")
    (other,) = look(edit_suite, hub="me/pictures", split="train").downloads
    assert other.ref == "me/pictures (train)"


def test_without_a_card_copies_are_as_large_as_what_is_fetched(edit_suite: Edit, log: Log) -> None:
    (download,) = look(edit_suite, hub="me/bare", split="test").downloads
    assert download.copied_bytes == download.bytes > 0


def test_row_groups_of_the_draw_are_what_check_has_said(edit_suite: Edit, log: Log, monkeypatch: Any) -> None:
    monkeypatch.setattr(hub_rows, "WORTH", 0)
    monkeypatch.setattr(hub_rows, "_TAIL", 3000)

    def change(content: dict[str, Any]) -> None:
        content["calibration"] = {"samples": 3, "seed": 7}
        content["tasks"]["pets"]["calibration"] = {"hub": "me/pictures", "split": "train"}

    suite = load_suite(edit_suite(change))
    (download,) = check_suite(suite, probe=False).downloads
    assert download.ref == "me/pictures (train)"
    log()
    look_at(suite, "pets", "calibration", 3, 7)
    assert sum(one["bytes"] for one in log() if fetched([one])) == download.bytes
    assert check_suite(suite, probe=False).downloads == ()
    assert not fetched(log())
    suite = load_suite(edit_suite(lambda content: [change(content), content["calibration"].update(samples=20)]))
    (download,) = check_suite(suite, probe=False).downloads
    assert download.copied_bytes == 30_000
    forget()
    go_offline(monkeypatch)
    (problem,) = check_suite(suite, probe=False).problems
    here = re.search(
        r"\(task 'pets', calibration samples, of which (\d+) of 20 are here, enough for --samples \1\)", problem
    )
    assert here is not None
    count = int(here[1])
    assert 3 <= count < 20
    look_at(suite, "pets", "calibration", count, 7)
    with pytest.raises(InputError, match="HF_HUB_OFFLINE is set"):
        look_at(suite, "pets", "calibration", count + 1, 7)


def test_check_looks_at_what_is_here_and_fetches_nothing_newer(
    edit_suite: Edit, log: Log, repositories: Path, tmp_path: Path
) -> None:
    read_hub("me/bare", tmp_path, None, "test", None)
    forget()
    newer = repositories / "datasets" / "me" / "bare" / "main" / "newer.txt"
    newer.write_text("another commit")
    log()
    look(edit_suite, hub="me/bare", split="test")
    newer.unlink()
    assert not [one for one in log() if "me/bare" in one["path"]]


def test_the_cache_of_data_sets_is_asked_for_where_something_goes_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its folder is on a disk without room only for what is copied into it; otherwise nobody needs the package."""
    asked: list[str] = []
    monkeypatch.setattr(remote, "_datasets_cache", lambda: asked.append("once") or "/")
    weights = remote.Download("owner/model", "model", 1, 100)
    ((named, wanted, _),) = [one for one in remote.needed_on_disks([weights]) if one[1]]
    assert (named, wanted, asked) == ("the Hub's local cache", 100, [])
    rows = remote.Download("owner/rows", "data set", 1, 0, copied_bytes=7)
    assert sum(one[1] for one in remote.needed_on_disks([weights, rows])) == 107
    assert asked == ["once"]

"""Files that appear at once and whole."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from featcal.system.atomic_files import put, put_new, temporary_path


@pytest.mark.parametrize("write", [put, put_new])
def test_what_fails_in_the_middle_leaves_nothing(tmp_path: Path, write: Callable[..., None]) -> None:
    def fails(place: Path) -> None:
        place.write_text("half")
        assert not (tmp_path / "file").exists()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "file", fails)
    with pytest.raises(UnicodeEncodeError):
        write(tmp_path / "file", "\ud800")
    assert list(tmp_path.iterdir()) == []
    write(tmp_path / "file", "été")
    assert (tmp_path / "file").read_bytes() == "été".encode()
    assert [one.name for one in tmp_path.iterdir()] == ["file"]


def test_a_name_as_long_as_the_system_takes_is_written(tmp_path: Path) -> None:
    file = tmp_path / f"{'報' * 83}.html"
    assert len(file.name.encode()) == 254
    put(file, "x")
    assert file.read_text() == "x"


def test_put_replaces_and_put_new_does_not(tmp_path: Path) -> None:
    put(tmp_path / "file", "one")
    put(tmp_path / "file", lambda place: place.write_text("two"))
    with pytest.raises(FileExistsError):
        put_new(tmp_path / "file", "three")
    assert (tmp_path / "file").read_text() == "two"


def test_of_two_that_write_anew_at_once_the_first_wins(tmp_path: Path) -> None:
    def another_first(place: Path) -> None:
        place.write_text("second")
        (tmp_path / "file").write_text("first")

    with pytest.raises(FileExistsError):
        put_new(tmp_path / "file", another_first)
    assert (tmp_path / "file").read_text() == "first"
    assert [one.name for one in tmp_path.iterdir()] == ["file"]


def test_an_old_file_stays_until_the_new_one_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path / "file", "old")

    def refused(*_: object) -> None:
        raise OSError("no space")

    monkeypatch.setattr(os, "fsync", refused)
    with pytest.raises(OSError, match="no space"):
        put(tmp_path / "file", "new")
    assert (tmp_path / "file").read_text() == "old"


def test_names_in_the_making_are_hidden_and_differ(tmp_path: Path) -> None:
    names = {temporary_path(tmp_path / ("x" * 250)).name for _ in range(20)}
    assert len(names) == 20
    assert all(name.startswith(".") and len(name) < 256 for name in names)

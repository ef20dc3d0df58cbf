"""Locks that end with their holder."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from featcal.system.locks import try_lock


def test_a_lock_on_a_file_that_was_replaced_keeps_nobody_off_and_is_not_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect, file = sqlite3.connect, tmp_path / "a" / "lock"

    def connect_before_it_is_moved(*given: Any, **options: Any) -> sqlite3.Connection:
        made = connect(*given, **options)
        os.rename(file.parent, tmp_path / "b")
        file.parent.mkdir()
        file.touch()
        return made

    with monkeypatch.context() as patched:
        patched.setattr(sqlite3, "connect", connect_before_it_is_moved)
        with try_lock(file, 0) as mine:
            assert not mine
    with try_lock(file, 0) as mine, try_lock(file, 0) as another:
        assert (mine, another) == (True, False)

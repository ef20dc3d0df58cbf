"""Locks that end with their holder."""

from __future__ import annotations

import os
import sqlite3
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from featcal.system.locks import try_lock


def test_a_lock_on_a_file_that_was_replaced_keeps_nobody_off_and_is_not_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a" / "lock"

    class Late(sqlite3.Connection):
        def execute(self, *given: Any) -> sqlite3.Cursor:
            os.rename(file.parent, tmp_path / "b")
            file.parent.mkdir()
            file.touch()
            return super().execute(*given)

    with monkeypatch.context() as patched:
        patched.setattr(sqlite3, "connect", partial(sqlite3.connect, factory=Late))
        with try_lock(file, 0) as mine:
            assert not mine
    with try_lock(file, 0) as mine, try_lock(file, 0) as another:
        assert (mine, another) == (True, False)

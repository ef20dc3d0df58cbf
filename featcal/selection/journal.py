"""A study as a journal, one line per change: for a disk that several machines share, where SQLite is not to be used."""

from __future__ import annotations

import errno
from contextlib import ExitStack
from pathlib import Path

from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from featcal.locks import locked

ENDING = ".journal"
"""How the name of such a file ends; a study in any other file is a SQLite database."""
_BEGINNING = b'{"op_code":'
"""Of every line."""


def journal(file: Path, patience: float) -> JournalStorage:
    """The storage in a file, which is made where there is none.

    Args:
        patience: seconds to wait for another process that appends.

    Raises:
        OSError: the file does not begin as a journal does, or cannot be read.
    """
    with file.open("a+b") as lines:
        lines.seek(0)
        if not _BEGINNING.startswith(lines.read(len(_BEGINNING))):
            raise OSError(errno.EINVAL, "it is no journal of a study", str(file))
    return JournalStorage(JournalFileBackend(str(file), _Appending(file, patience)))  # type: ignore[arg-type]  # no base class of it is public


class _Appending:
    """Optuna's lock while lines are appended, as one that the system takes back: Optuna's own stays when its process
    dies. Half a line that such a process left is taken away, since what would be appended to it could not be read."""

    def __init__(self, file: Path, patience: float) -> None:
        self._file, self._patience = file, patience
        self._held = ExitStack()

    def acquire(self) -> bool:
        if not self._held.enter_context(locked(self._file.with_name(f"{self._file.name}.append.lock"), self._patience)):
            self._held.close()
            raise OSError(errno.EBUSY, f"locked for {self._patience:.0f} s by another process", str(self._file))
        _without_half_a_line(self._file)
        return True

    def release(self) -> None:
        self._held.close()


def _without_half_a_line(file: Path) -> None:
    with file.open("r+b") as lines:
        lines.seek(max(0, file.stat().st_size - 1))
        if lines.read() in (b"", b"\n"):
            return
        lines.seek(0)
        lines.truncate(lines.read().rfind(b"\n") + 1)

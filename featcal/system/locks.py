"""Take locks that the system releases when a process ends, so that no holder has to be checked for life."""

from __future__ import annotations

import errno
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def try_lock(file: Path, patience: float) -> Iterator[bool]:
    """Yield whether this process got the lock, which it keeps as long as the `with` lasts.

    Args:
        file: the lock file; it is created if it is missing, and stays.
        patience: seconds to wait for another holder.

    Raises:
        OSError: the file cannot be created or opened.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        # A transaction of SQLite is a lock that works alike on every system, waits with a limit and ends with its
        # process.
        held = sqlite3.connect(file, timeout=patience, isolation_level=None)
    except sqlite3.OperationalError as error:  # also a path longer than the library takes, whatever the system does
        raise OSError(errno.EACCES, str(error), str(file)) from error
    found = _identify(file)
    try:
        try:
            held.execute("BEGIN EXCLUSIVE")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY:
                raise OSError(errno.EACCES, str(error), str(file)) from error
            yield False
        else:
            # A lock on a file that was replaced meanwhile keeps nobody off.
            yield found is not None and found == _identify(file)
    finally:
        held.close()


def _identify(file: Path) -> tuple[int, int] | None:
    """Return the device and the inode of a file; None if it does not exist."""
    try:
        found = file.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino

"""The state of files: what was read from others is not taken for them."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

FileStamp = tuple[str, int, int, int]
"""Path, size, time of change of the content and time of change of the file (ns; `st_mtime`, `st_ctime`).

Whoever writes a file, or puts another in its place, moves the last one, also where the size is the same and the first
time was put back (as `cp -p`, `rsync -t` and archives do). It stays where a file is written twice within one tick of
the system's clock (some milliseconds), and on Windows, where it is the time of creation.
"""


def stamps(place: Path, above: frozenset[tuple[int, int]] = frozenset()) -> Iterator[FileStamp]:
    """A file, or every file of a folder to the bottom, through links too.

    What is not there, is no possible path or cannot be listed has none: whoever reads it says what is wrong.

    Args:
        above: device and inode of the folders that were come through, so that links back to them end.
    """
    try:
        state = place.stat()
        folder = stat.S_ISDIR(state.st_mode)
        names = sorted(os.listdir(place)) if folder else []
    except (OSError, ValueError):  # too long, a null character
        return
    here = state.st_dev, state.st_ino
    if not folder:
        yield str(place), state.st_size, state.st_mtime_ns, state.st_ctime_ns
    elif here not in above:
        for name in names:
            yield from stamps(place / name, above | {here})


def sha256(file: Path) -> str:
    """Of a file's content, in hexadecimal digits."""
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()

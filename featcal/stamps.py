"""The state of files: what was read from others is not taken for them."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

FileStamp = tuple[str, int, int]
"""Path, size and time of change (ns) of a file."""


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
        yield str(place), state.st_size, state.st_mtime_ns
    elif here not in above:
        for name in names:
            yield from stamps(place / name, above | {here})

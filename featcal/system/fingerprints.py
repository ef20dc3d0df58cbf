"""Tell whether files have changed, so that results of old files are not taken for results of new ones; digests of
contents, and seeds made of texts."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

FileStamp = tuple[str, int, int, int]
"""Path, size, time of change of the content and time of change of the file (ns; `st_mtime`, `st_ctime`).

Writing or replacing a file changes the last time, even if the size is the same and the first time was put back (as
`cp -p`, `rsync -t` and archives do). It does not change if a file is written twice within one tick of the system's
clock (some milliseconds), nor on Windows, where it is the time of creation.
"""


def stamps(place: Path, above: frozenset[tuple[int, int]] = frozenset()) -> Iterator[FileStamp]:
    """Yield the stamp of a file, or of every file below a folder, through links too.

    A path that is missing, impossible or cannot be listed yields nothing; the function that reads it reports the error.

    Args:
        above: device and inode of the folders on the way here, so that links back to them end.
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
    """Return the SHA-256 of a file's content in hexadecimal digits."""
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def digest_code(files: Iterable[Path]) -> str:
    """Return the SHA-256 of the names and contents of files of code, in the order of their paths."""
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(file.name.encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()


def json_digest(content: object) -> str:
    """Return the SHA-256 of a JSON value in hexadecimal digits, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def seed_from_text(text: str) -> int:
    """Return a seed for torch's generators that a text alone decides.

    >>> seed_from_text("42:digits")
    6833204733039277232
    """
    # Python's own hash of a text differs from process to process.
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1

"""Files that appear at once and whole: nobody reads half of one, and what is interrupted leaves none."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

Content = str | Callable[[Path], object]
"""The text of a file, UTF-8, or what writes the file at a place."""


def put(file: Path, content: Content) -> None:
    """Write a file, in place of one that is there.

    Raises:
        OSError: the system refuses; ValueError: the text has characters that are none.
    """
    _put(file, content, os.replace)


def put_new(file: Path, content: Content) -> None:
    """Write a file that must not be there yet; of several that try at once the first, where the file system has hard
    links, else the last.

    Raises:
        FileExistsError: it is there, and stays as it is; OSError and ValueError as `put`.
    """
    if file.exists():
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(file))
    _put(file, content, _link)


def temporary_path(place: Path) -> Path:
    """Where what is to become a file or a folder is made: beside it, under a name that is nobody else's."""
    return place.with_name(f".{place.name[:200]}-{uuid4().hex}")


def _put(file: Path, content: Content, finish: Callable[[Path, Path], object]) -> None:
    writing = temporary_path(file)
    try:
        if isinstance(content, str):
            _write(writing, content.encode())
        else:
            content(writing)
        finish(writing, file)
    finally:
        with suppress(OSError):
            writing.unlink(missing_ok=True)


def _write(file: Path, content: bytes) -> None:
    with file.open("xb") as opened:
        opened.write(content)
        opened.flush()
        os.fsync(opened.fileno())


def _link(writing: Path, file: Path) -> None:
    """Give a finished file its name, unless somebody was faster."""
    try:
        os.link(writing, file)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links
        os.replace(writing, file)

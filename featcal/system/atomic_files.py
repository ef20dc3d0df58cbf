"""Write files that appear at once and whole: no reader sees half a file, and an interrupted write leaves none."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

Content = str | Callable[[Path], object]
"""The text of a file, written as UTF-8, or a function that writes the file at the path it is given."""


def put(file: Path, content: Content) -> None:
    """Write a file and replace one that is already there.

    Raises:
        OSError: the system refuses.
        ValueError: the text holds characters that UTF-8 cannot encode.
    """
    _put(file, content, os.replace)


def put_new(file: Path, content: Content) -> None:
    """Write a file that must not exist yet. If several processes try at once, the first wins on a file system with hard
    links and the last wins on one without.

    Raises:
        FileExistsError: the file exists; it stays as it is.
        OSError: the system refuses.
        ValueError: the text holds characters that UTF-8 cannot encode.
    """
    if file.exists():
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(file))
    _put(file, content, _link)


def temporary_path(place: Path) -> Path:
    """Return a unique path beside `place` at which a file or a folder is prepared before it gets its name."""
    # The final rename is atomic only within one file system; names of files are limited to 255 bytes.
    name = place.name.encode()[:200].decode(errors="ignore")
    return place.with_name(f".{name}-{uuid4().hex}")


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
        # Without it a rename may reach the disk before the content does, and a crash leaves an empty file.
        os.fsync(opened.fileno())


def _link(writing: Path, file: Path) -> None:
    """Give a finished file its final name, or raise FileExistsError if another process was faster."""
    try:
        os.link(writing, file)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links
        os.replace(writing, file)

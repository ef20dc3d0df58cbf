"""Resolve and check paths as suites and commands name them."""

from __future__ import annotations

import stat
from pathlib import Path

from featcal.system.errors import InputError
from featcal.system.formatting import printable, readable
from featcal.system.sandbox import require_inside, server_rules


def local_path(named: str, root: Path, label: str) -> Path:
    """Return a path relative to `root` or to a home folder (`~`), whether or not it exists.

    Raises:
        InputError: no such path is possible, or it may not be accessed; on a shared server also a path outside its
            folders.
    """
    try:
        path = root / expand_home(named)
        require_inside(path, label)
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, RuntimeError, ValueError) as error:  # too long, an unknown user's home, a null character
        why = error.strerror if isinstance(error, OSError) else error
        raise InputError(f"{label}: no path '{printable(named, 80)}' ({why})") from error
    return path


def expand_home(named: str | Path) -> Path:
    """Return a path with `~` replaced by the home folder; unchanged on a shared server, which must not tell homes.

    Raises:
        RuntimeError: the home of an unknown user.
    """
    return Path(named) if server_rules() is not None else Path(named).expanduser()


def require_plain(file: Path, named: str = "", most: int | None = None) -> None:
    """Check that a path is a regular file that can be read to its end; a missing file passes, for its reader to report.

    Args:
        named: name of the file in messages; its path by default.
        most: largest size in bytes.

    Raises:
        InputError: a pipe, a device or a folder, or a file of more than `most` bytes.
    """
    try:
        found = file.stat()
    except (OSError, ValueError):
        return
    # Reading a pipe or a device may never end.
    if not stat.S_ISREG(found.st_mode):
        raise InputError(f"{named or file} is a folder, a pipe or a device; give a file")
    if most is not None and found.st_size > most:
        raise InputError(
            f"{named or file} has {readable(found.st_size)}, more than the {readable(most)} that such a file may have; "
            "is it the right one?"
        )


def from_folder(path: Path, folder: Path) -> str:
    """Return a path as a file in `folder` names it: relative if it lies below, so that both can move, else absolute.

    >>> from_folder(Path("/a/b/c"), Path("/a")), from_folder(Path("/x"), Path("/a"))
    ('b/c', '/x')
    """
    whole, below = path.absolute(), folder.absolute()
    return str(whole.relative_to(below)) if whole.is_relative_to(below) else str(whole)


def neighbours(named: str) -> list[str]:
    """Return the paths beside a path that was not found, written as the user wrote it, for suggestions."""
    given = Path(named)
    try:
        return [str(given.parent / one.name) for one in given.expanduser().parent.iterdir()]
    except (OSError, RuntimeError, ValueError):
        return []

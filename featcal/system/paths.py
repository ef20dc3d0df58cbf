"""Paths as suites and commands name them."""

from __future__ import annotations

import stat
from pathlib import Path

from featcal.system.errors import InputError
from featcal.system.formatting import printable, readable
from featcal.system.sandbox import require_inside, server_rules


def local_path(named: str, root: Path, label: str) -> Path:
    """A path relative to `root` or to a home (`~`), whether or not something is there.

    Raises:
        InputError: nothing can be there, or it may not be looked at; on a shared server, what lies elsewhere.
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
    """A path with the home that `~` stands for; on a shared server, which tells nobody who has one, as it is.

    Raises:
        RuntimeError: an unknown user's home.
    """
    return Path(named) if server_rules() is not None else Path(named).expanduser()


def require_plain(file: Path, named: str = "", most: int | None = None) -> None:
    """Let a file pass that can be read to its end; what is not there at all is for its reader to say.

    Args:
        named: what messages call it, if not by its path.
        most: bytes that it may have.

    Raises:
        InputError: a pipe, a device or a folder, whose reading may never end, or a file of more than `most` bytes.
    """
    try:
        found = file.stat()
    except (OSError, ValueError):
        return
    if not stat.S_ISREG(found.st_mode):
        raise InputError(f"{named or file} is a folder, a pipe or a device; give a file")
    if most is not None and found.st_size > most:
        raise InputError(
            f"{named or file} has {readable(found.st_size)}, more than the {readable(most)} that such a file may have; "
            "is it the right one?"
        )


def from_folder(path: Path, folder: Path) -> str:
    """A path as a file in `folder` names it: relative where it lies below, so that both can move; else absolute.

    >>> from_folder(Path("/a/b/c"), Path("/a")), from_folder(Path("/x"), Path("/a"))
    ('b/c', '/x')
    """
    whole, below = path.absolute(), folder.absolute()
    return str(whole.relative_to(below)) if whole.is_relative_to(below) else str(whole)


def neighbours(named: str) -> list[str]:
    """What lies where a path that was given from here was looked for, as it would have to be given: for suggestions."""
    given = Path(named)
    try:
        return [str(given.parent / one.name) for one in given.expanduser().parent.iterdir()]
    except (OSError, RuntimeError, ValueError):
        return []

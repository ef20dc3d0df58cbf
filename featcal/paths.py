"""Paths as suites and commands name them."""

from __future__ import annotations

from pathlib import Path

from featcal.errors import InputError
from featcal.words import printable


def local_path(named: str, root: Path, label: str) -> Path:
    """A path relative to `root` or to a home (`~`), whether or not something is there.

    Raises:
        InputError: nothing can be there, or it may not be looked at.
    """
    try:
        path = root / Path(named).expanduser()
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, RuntimeError, ValueError) as error:  # too long, an unknown user's home, a null character
        why = error.strerror if isinstance(error, OSError) else error
        raise InputError(f"{label}: no path '{printable(named, 80)}' ({why})") from error
    return path

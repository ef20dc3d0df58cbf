"""Keep finished work when a check after it fails: the folder is written, and the record names the check that failed."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from featcal.system.errors import FeatcalError, NumericalError, UncheckedError
from featcal.system.formatting import shorten

UNCHECKED = "unchecked"
"""Entry of a record: a sentence for everything that could not be checked or drawn; missing if there is none."""
_LONGEST = 400
"""Most characters of a cause."""


@contextmanager
def keep_work(unchecked: list[str], sentence: str, *, finds: bool = False) -> Iterator[None]:
    """Add a sentence with the cause to `unchecked` if the code inside the `with` fails.

    Args:
        sentence: names the missing step.
        finds: whether a NumericalError is a result of the check rather than its failure.

    Raises:
        NumericalError: one that the check found.
    """
    try:
        yield
    except Exception as error:  # of whatever kind: the work in front of it took hours, and says the same without it
        if finds and isinstance(error, NumericalError):
            raise
        unchecked.append(f"{sentence}: {_explain(error)}")


def require_checked(document: dict[str, Any]) -> dict[str, Any]:
    """Return the document of a written folder; raise UncheckedError if it lists failed checks.

    Raises:
        UncheckedError: something in it could not be checked.
    """
    if document.get(UNCHECKED):
        raise UncheckedError(document, document["out"], document[UNCHECKED])
    return document


def _explain(error: Exception) -> str:
    """Return the cause in one line: a message of featcal's own, or an error of Python with its place in the code."""
    words = " ".join(str(error).split())
    if isinstance(error, FeatcalError):
        return shorten(words, _LONGEST)
    place = traceback.extract_tb(error.__traceback__)[-1]
    return shorten(f"{type(error).__name__} in {Path(place.filename).name}, line {place.lineno}: {words}", _LONGEST)

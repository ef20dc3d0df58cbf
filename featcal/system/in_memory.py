"""References to what Python code gives in place of files: they stand where a suite file has paths."""

from __future__ import annotations

from typing import Any, Protocol
from weakref import WeakSet

from featcal.system.errors import InputError

MEMORY = "memory:"
"""Beginning of such a reference, before what the thing is and the first digits of its content's SHA-256."""


class Holdable(Protocol):
    """A thing that can stand in place of files."""

    @property
    def kind(self) -> str:
        """Return what it is, in one word."""

    @property
    def sha256(self) -> str:
        """Return the SHA-256 of its content when it was given, in hexadecimal digits."""

    def is_unchanged(self) -> bool:
        """Say whether its content is still what `sha256` says; reads all of it."""


def register_object(thing: Holdable) -> str:
    """Return a reference to a thing, which means it for as long as somebody holds the thing itself."""
    _held.add(thing)
    return _refer(thing)


def _refer(thing: Holdable) -> str:
    return f"{MEMORY}{thing.kind}-{thing.sha256[:16]}"


def is_held(reference: object) -> bool:
    """Say whether a reference means something in memory."""
    return isinstance(reference, str) and reference.startswith(MEMORY)


def find_held(reference: str, label: str) -> Any:
    """Return the thing that a reference means; of several one that still has that content.

    Raises:
        InputError: nobody holds it any more, it was changed, or it belongs to another process; `label` names who asks.
    """
    things = [thing for thing in _held if _refer(thing) == reference]
    if not things:
        raise InputError(
            f"{label}: '{reference}' names something in the memory of a Python process, and it is not there (any "
            "more); make the suite anew with featcal.Suite.of, or give a file or folder"
        )
    unchanged = next((thing for thing in things if thing.is_unchanged()), None)
    if unchanged is None:
        raise change_error(things[0], label)
    return unchanged


def change_error(thing: Holdable, label: str) -> InputError:
    """Return the error that says that a thing has changed since it was given."""
    return InputError(
        f"{label}: the {thing.kind} in memory has other values than when its suite was made; make the suite again with "
        "featcal.Suite.of"
    )


_held: WeakSet[Any] = WeakSet()

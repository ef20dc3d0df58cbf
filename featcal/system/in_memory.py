"""Refer to models and data that Python code passes in place of files: such references take the place of paths in a
suite."""

from __future__ import annotations

from typing import Any, Protocol
from weakref import WeakSet

from featcal.system.errors import InputError

MEMORY = "memory:"
"""Prefix of such a reference; the kind of the object and the first digits of its content's SHA-256 follow."""


class Holdable(Protocol):
    """A thing that can stand in place of files."""

    @property
    def kind(self) -> str:
        """Return the kind of object, in one word."""

    @property
    def sha256(self) -> str:
        """Return the SHA-256 of its content when it was given, in hexadecimal digits."""

    def is_unchanged(self) -> bool:
        """Say whether the content still has this `sha256`; reads all of it."""


def register_object(thing: Holdable) -> str:
    """Return a reference to an object, valid as long as the caller keeps the object itself."""
    _held.add(thing)
    return _refer(thing)


def _refer(thing: Holdable) -> str:
    return f"{MEMORY}{thing.kind}-{thing.sha256[:16]}"


def is_held(reference: object) -> bool:
    """Say whether a reference means something in memory."""
    return isinstance(reference, str) and reference.startswith(MEMORY)


def find_held(reference: str, label: str) -> Any:
    """Return the object that a reference names; of several, one that still has that content.

    Raises:
        InputError: the object is gone, was changed, or belongs to another process; `label` begins the message.
    """
    things = [thing for thing in _held if _refer(thing) == reference]
    if not things:
        raise InputError(
            f"{label}: '{reference}' names an object of a Python process that does not exist (any more); "
            "make the suite again with featcal.Suite.of, or give a file or folder"
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

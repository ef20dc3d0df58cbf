"""References to what Python code gives in place of files: they stand where a suite file has paths."""

from __future__ import annotations

from typing import Any, Protocol
from weakref import WeakSet

from featcal.system.errors import InputError

MEMORY = "memory:"
"""How such a reference begins; behind it stand what the thing is and the first digits of its content's SHA-256."""


class Holdable(Protocol):
    """A thing that can stand in place of files."""

    @property
    def kind(self) -> str:
        """Return what it is, in one word."""

    @property
    def sha256(self) -> str:
        """Of its content, in hexadecimal digits."""


def hold(thing: Holdable) -> str:
    """Return a reference to a thing, which means it for as long as somebody holds the thing itself."""
    reference = f"{MEMORY}{thing.kind}-{thing.sha256[:16]}"
    _held.setdefault(reference, WeakSet()).add(thing)
    return reference


def is_held(reference: object) -> bool:
    """Say whether a reference means something in memory."""
    return isinstance(reference, str) and reference.startswith(MEMORY)


def find_held(reference: str, label: str) -> Any:
    """Return the thing that a reference means; of several of the same content one of them.

    Raises:
        InputError: nobody holds it any more, or it belongs to another process; `label` names who asks.
    """
    things = list(_held.get(reference) or ())
    if not things:
        raise InputError(
            f"{label}: '{reference}' names something in the memory of a Python process, and it is not there (any "
            "more); make the suite anew with featcal.Suite.of, or give a file or folder"
        )
    return things[0]


_held: dict[str, WeakSet[Any]] = {}

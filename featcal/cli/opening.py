"""From the name of a suite to what a command asks of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from featcal.family.opening import Family
    from featcal.session.session import Session
    from featcal.suite.schema import Suite


def load(suite: str) -> Suite:
    """An embedded suite, or the one of a file.

    Raises:
        InputError: as `load_suite`.
    """
    from featcal.suite.schema import load_suite

    return load_suite(suite)


def open_suite(suite: str, device: str) -> Family:
    """A suite with its models.

    Raises:
        InputError: as `load_suite` and `open_family`.
    """
    from featcal.family.opening import open_family

    return open_family(load(suite), device)


def session(suite: str, device: str, *, one_shot: bool = True, max_memory: int | None = None) -> Session:
    """A suite's session, for a single question unless told otherwise.

    Raises:
        InputError: as `open_suite`.
    """
    from featcal.session.session import Session

    return Session(open_suite(suite, device), one_shot=one_shot, max_memory=max_memory)

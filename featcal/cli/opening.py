"""Open the suite that a command names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from featcal.cli.terminal import print_message
from featcal.system.formatting import some
from featcal.system.libraries import load_libraries
from featcal.system.progress import keep_memory

if TYPE_CHECKING:
    from featcal.session.session import Session
    from featcal.suite.schema import Suite


def load(suite: str) -> Suite:
    """Return a suite that comes with featcal, or the one in a file.

    Raises:
        InputError: there is no such suite or file, or its content is invalid.
    """
    # In functions, here and in every command: `featcal --help` is not to wait for torch.
    from featcal.suite.schema import load_suite

    return load_suite(suite)


def open_suite_session(suite: str, device: str, *, one_shot: bool = True, max_memory: int | None = None) -> Session:
    """Return a suite's session.

    Args:
        one_shot: True if only one model is measured, so that nothing needs to be cached for a second one.
        max_memory: bytes that the session stays within; None for no limit.

    Raises:
        InputError: there is no such suite, or one of its models cannot be opened.
    """
    load_libraries()
    # Memory that is kept for the next block would count against the limit.
    if max_memory is None:
        keep_memory()
    from featcal.family.opening import open_family
    from featcal.session.session import Session

    return Session(open_family(load(suite), device), one_shot=one_shot, max_memory=max_memory)


def scored_split(session: Session, split: str | None) -> str:
    """Return the split to score on, the command's or the suite's, and warn on stderr if it flatters the scores."""
    tasks = session.family.suite.tasks
    chosen = split or session.family.suite.scored_split
    if split is None and chosen == "calibration":
        lacking = [name for name, task in tasks.items() if task.source("test") is None]
        where = "the suite has no test split" if len(lacking) == len(tasks) else f"no test split of {some(lacking)}"
        print_message(f"note: {where}; calibration samples flatter what was fitted on them", err=True)
    return chosen

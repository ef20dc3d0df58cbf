"""Errors that featcal raises on purpose; each ends a command with one clear message and exit status 1."""

from collections.abc import Sequence
from typing import Any


class FeatcalError(Exception):
    """Base of every error that featcal raises on purpose; the message says what is wrong, where, and what to do."""


class InputError(FeatcalError):
    """Something handed in is wrong: a suite file, a checkpoint, samples, an option or an output folder.

    `problems` lists the problems one by one; the message has all of them.
    """

    def __init__(self, *problems: str) -> None:
        self.problems = problems
        several = "\n".join([f"{len(problems)} problems:", *(f"  {problem}" for problem in problems)])
        super().__init__(problems[0] if len(problems) == 1 else several)


class NoScores(InputError):
    """A suite whose models cannot be scored, for want of labels, answers, class names or a head. Everything that needs
    no scores still works."""


class NumericalError(FeatcalError):
    """A computation that did not give finite, trustworthy numbers; nothing is substituted for them."""


class UncheckedError(FeatcalError):
    """A model was written whole, but part of it could not be checked; `document` is the report its writer would have
    returned."""

    def __init__(self, document: dict[str, Any], out: str, sentences: Sequence[str]) -> None:
        self.document = document
        super().__init__(f"written to {out}, but {'; '.join(sentences)}")

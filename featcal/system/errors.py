"""Errors that featcal raises on purpose; each ends a command with one clear message and exit status 1."""

from collections.abc import Sequence
from typing import Any


class FeatcalError(Exception):
    """Base of every error that featcal raises on purpose; the message says what is wrong, where, and what to do.

    >>> import featcal
    >>> try:
    ...     featcal.load_suite("clip-mimi")
    ... except featcal.FeatcalError as error:
    ...     print(str(error).partition(". ")[2])
    Did you mean 'clip-mini'?
    """


class InputError(FeatcalError):
    """Something handed in is wrong: a suite file, a checkpoint, samples, an option or an output folder.

    `problems` lists the problems one by one; the message has all of them.

    >>> import featcal
    >>> try:
    ...     featcal.Grid(lam=(), rho=(0.5,), alpha=(0.5,), options=featcal.CalibrationConfig())
    ... except featcal.InputError as error:
    ...     print(error)
    lam: a sweep needs at least one value of each
    """

    def __init__(self, *problems: str) -> None:
        self.problems = problems
        several = "\n".join([f"{len(problems)} problems:", *(f"  {problem}" for problem in problems)])
        super().__init__(problems[0] if len(problems) == 1 else several)


class NoScores(InputError):
    """A suite whose models cannot be scored, for want of labels, answers, class names or a head. Everything that needs
    no scores still works."""


class NumericalError(FeatcalError):
    """A computation that did not give finite, trustworthy numbers; nothing is substituted for them.

    >>> import featcal
    >>> config = featcal.CalibrationConfig(samples=1, lam=0.0, eps=0.0)  # fewer tokens than features, and no ridge
    >>> try:
    ...     result = featcal.calibrate(featcal.load_suite("lm-mini"), config)
    ... except featcal.NumericalError as error:
    ...     print(str(error).rpartition("; ")[2])
    raise lam or use more samples
    """


class UncheckedError(FeatcalError):
    """A model was written whole, but part of it could not be checked; `document` is the report its writer would have
    returned.

    >>> import featcal
    >>> report = {"out": "models/mine", "written": ["model.safetensors"]}
    >>> error = featcal.UncheckedError(report, "models/mine", ["transformers could not load it"])
    >>> print(error)
    written to models/mine, but transformers could not load it
    >>> error.document["written"]
    ['model.safetensors']
    """

    def __init__(self, document: dict[str, Any], out: str, sentences: Sequence[str]) -> None:
        self.document = document
        super().__init__(f"written to {out}, but {'; '.join(sentences)}")

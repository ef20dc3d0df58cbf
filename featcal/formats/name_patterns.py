"""Match names of modules with regular expressions from untrusted files, with a time limit.

A regular expression can take practically for ever (`(a|a)*b`), and its text does not show that. So featcal runs them by
the package `regex`, which has a time limit.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass

import regex

from featcal.system.errors import InputError

LONGEST = 4000
"""Largest number of characters of a pattern, or a name: far more than any tool writes."""
SECONDS = 5.0
"""Processor time for all names of a file; the largest models take a fifth of it."""
_PLAIN = re.compile(r"[\w.-]+")
_READ_OTHERWISE = re.compile(r"\{(?![\d,])|\[:")
"""Parts of patterns that `regex` interprets differently."""


@dataclass
class Matcher:
    """Matches names with patterns, within one time limit for all of them."""

    left: float = SECONDS

    def match(self, pattern: str, name: str) -> regex.Match[str] | None:
        """Match the beginning of a name, as `re.match` does.

        Raises:
            InputError: the time limit is reached.
        """
        return self._match_in_time(regex.match, pattern, name)

    def fullmatch(self, pattern: str, name: str) -> regex.Match[str] | None:
        """Match a whole name, as `re.fullmatch` does.

        Raises:
            InputError: the time limit is reached.
        """
        return self._match_in_time(regex.fullmatch, pattern, name)

    def ends_with(self, pattern: str, name: str) -> bool:
        """Say whether a pattern matches a whole name, or its end after one of its dots.

        Raises:
            InputError: the time limit is reached.
        """
        # Tools write names themselves, often one per module: a comparison is a thousandth of compiling each.
        if _PLAIN.fullmatch(pattern):
            start = len(name) - len(pattern)
            inside = start == 0 or (start > 0 and name[start - 1] == ".")
            return inside and all(own in (".", other) for own, other in zip(pattern, name[start:], strict=True))
        return self.fullmatch(match_end(pattern), name) is not None

    def _match_in_time(
        self, function: Callable[..., regex.Match[str] | None], pattern: str, name: str
    ) -> regex.Match[str] | None:
        begun = time.process_time()
        try:
            return function(pattern, name, timeout=self.left)
        except TimeoutError as error:
            raise InputError(
                f"the pattern '{pattern[:60]}' takes too long to match '{name[:60]}'; give the names themselves instead"
            ) from error
        finally:
            # Never none at all: a pattern that takes no time still gets its answer.
            self.left = max(self.left - (time.process_time() - begun), 0.01)


def match_end(pattern: str) -> str:
    """Return the pattern of a whole name, or of its end after one of its dots."""
    return rf"(.*\.)?({pattern})"


def check_pattern(pattern: str, use: Callable[[str], str]) -> None:
    """Raise ValueError if a pattern cannot be used: too long, not a regular expression, or interpreted differently.

    Args:
        use: turns the pattern into the expression to match.
    """
    if len(pattern) > LONGEST:
        raise ValueError(f"a pattern of {len(pattern)} characters, {LONGEST} are the most")
    if _READ_OTHERWISE.search(pattern):
        raise ValueError(f"'{pattern}' has '{{' or '[:' in it, which no name of a module has; leave it out")
    try:
        re.compile(use(pattern))
        regex.compile(use(pattern))
    except (re.error, regex.error, RecursionError, OverflowError) as error:
        raise ValueError(f"'{pattern[:60]}' is not a regular expression ({error})") from error

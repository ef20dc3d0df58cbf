"""How messages and tables put names and sizes."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from decimal import ROUND_HALF_UP, Decimal

_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""What a terminal obeys instead of showing it: control characters but tab and newline, changes of the direction of
writing, halves of surrogate pairs."""


def some(names: Sequence[str], most: int = 4) -> str:
    """The first names in quotes, and how many more there are."""
    shown = ", ".join(f"'{name}'" for name in names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def readable(count: float) -> str:
    """Bytes as people read them, such as "1.5 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def duration(seconds: float) -> str:
    """A time for reading.

    >>> duration(3.2), duration(150), duration(8000)
    ('3 s', '2 min', '2.2 h')
    """
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def percent(share: float) -> str:
    """A share of 1 in per cent with one decimal; halves are rounded up, whatever their binary form is.

    >>> percent(0.6015), percent(0.7005), percent(1 / 16)
    ('60.2', '70.1', '6.3')
    """
    decimal = Decimal(repr(round(100 * float(share), 9)))  # k / n again: errors of binary fractions are far smaller
    return str(decimal.quantize(Decimal("0.1"), ROUND_HALF_UP))


def points(share: float) -> str:
    """A difference of shares in percentage points, with its sign.

    >>> points(0.0314), points(-1 / 8), points(-0.0001)
    ('+3.1', '-12.5', '+0.0')
    """
    size = percent(abs(share))
    return f"{'-' if share < 0 and size != '0.0' else '+'}{size}"


def exactly(value: float) -> str:
    """A number as it was chosen, not rounded for reading: it is the same when it is read again.

    >>> exactly(2.0), exactly(1e-5), exactly(0.1 + 0.2)
    ('2', '1e-05', '0.30000000000000004')
    """
    short = f"{value:.12g}"
    return short if float(short) == value else repr(float(value)).removesuffix(".0")


def printable(text: str, most: int | None = None) -> str:
    """Text for a terminal: characters that it would obey are written as escapes, what is beyond `most` is counted.

    >>> printable("red\\x1b[31m")
    'red\\\\x1b[31m'
    """
    shown = _UNPRINTABLE.sub(lambda found: ascii(found[0])[1:-1], text)
    return shown if most is None else shorten(shown, most)


def message(text: str) -> str:
    """One message as the terminal and the app show it: at most 4,000 characters of it, none that steers anything."""
    return printable(text, 4000)


def shorten(text: str, most: int = 80) -> str:
    """The beginning of a text that is longer than `most` characters, and how many more there are."""
    return text if len(text) <= most else f"{text[:most]} … ({len(text) - most} more characters)"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """' Did you mean …?' for the closest known word, or nothing; nothing for a word of more than 200 characters.

    >>> did_you_mean("smaples", ["samples", "seed"])
    " Did you mean 'samples'?"
    """
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6) if len(word) <= 200 else []
    return f" Did you mean '{close[0]}'?" if close else ""

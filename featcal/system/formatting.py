"""Format names, sizes, times and texts for messages and tables."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from decimal import ROUND_HALF_UP, Decimal

_ACTIVE = re.compile(r"[\\`*\[\]<>|~$&]|(?<!\w)_|_(?!\w)")
"""Signs that Markdown obeys wherever they stand, and underscores that do not stand inside a word."""
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that a terminal obeys instead of showing: control characters except tab and newline, changes of writing
direction, halves of surrogate pairs."""


def some(names: Sequence[str], most: int = 4) -> str:
    """Return the first names in quotes, and how many more there are."""
    shown = ", ".join(f"'{name}'" for name in names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def how_many(counts: Iterable[int]) -> str:
    """Return "64", or "40 to 64" where tasks have different numbers of samples."""
    least, most = min(found := list(counts)), max(found)
    return str(most) if least == most else f"{least} to {most}"


def join_words(words: Sequence[str]) -> str:
    """Return words as a sentence lists them.

    >>> join_words(["a", "b", "c"]), join_words(["a"])
    ('a, b and c', 'a')
    """
    *first, last = words or [""]
    return f"{', '.join(first)} and {last}" if first else last


def readable(count: float) -> str:
    """Return a number of bytes as people read it, such as "1.5 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def duration(seconds: float) -> str:
    """Return a time in seconds as people read it.

    >>> duration(3.2), duration(150), duration(8000)
    ('3 s', '2 min', '2.2 h')
    """
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def percent(share: float) -> str:
    """Return a share of 1 in per cent with one decimal; halves are rounded up.

    >>> percent(0.6015), percent(0.7005), percent(1 / 16)
    ('60.2', '70.1', '6.3')
    """
    return decimals(100 * float(share), 1)


def decimals(value: float, digits: int) -> str:
    """Return a number with so many decimals; halves are rounded away from 0.

    >>> decimals(60.15, 1), decimals(-2.65, 1), decimals(0.0625, 3), decimals(float("inf"), 1)
    ('60.2', '-2.7', '0.063', 'inf')
    """
    if not abs(value) < 1e15:  # more digits than a decimal number of Python's holds, infinite, or no number
        return f"{value:.{digits}f}"
    # 60.15 is stored as slightly less and would round down; nine digits are exact again for any 100 k / n in use.
    decimal = Decimal(repr(round(float(value), 9)))
    return str(decimal.quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP))


def lift_half(value: float, digits: int) -> float:
    """Return a number that a browser, which rounds what is stored, writes as `decimals` does: itself, but for a half
    that is stored as less.

    >>> lift_half(60.15, 1), lift_half(6.25, 1), lift_half(60.1499, 1)
    (60.2, 6.25, 60.1499)
    """
    if not abs(value) < 1e15:
        return value
    stored = Decimal(float(value)).quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP)
    return value if str(stored) == (text := decimals(value, digits)) else float(text)


def points(share: float) -> str:
    """Return a difference of shares in percentage points, with its sign.

    >>> points(0.0314), points(-1 / 8), points(-0.0001)
    ('+3.1', '-12.5', '+0.0')
    """
    return with_sign(100 * float(share), 1)


def with_sign(value: float, digits: int) -> str:
    """Return a number with its sign and so many decimals; halves are rounded away from 0, and nothing is "-0".

    >>> with_sign(8.15, 1), with_sign(-0.0004, 3), with_sign(-2.65, 1)
    ('+8.2', '+0.000', '-2.7')
    """
    size = decimals(abs(value), digits)
    return f"{'-' if value < 0 and float(size) else '+'}{size}"


def p_value(p: float) -> str:
    """Return the p of a test with two significant digits.

    >>> p_value(0.0223), p_value(4.68e-8), p_value(1.0)
    ('0.022', '4.7e-08', '1')
    """
    return f"{p:.2g}"


def exactly(value: float) -> str:
    """Return a number in the fewest characters that read back as the same float.

    >>> exactly(2.0), exactly(1e-5), exactly(0.1 + 0.2)
    ('2', '1e-05', '0.30000000000000004')
    """
    short = f"{value:.12g}"
    return short if float(short) == value else repr(float(value)).removesuffix(".0")


def printable(text: str, most: int | None = None) -> str:
    """Escape the characters of a text that a terminal would obey, and cut it after `most` characters.

    >>> printable("red\\x1b[31m")
    'red\\\\x1b[31m'
    """
    shown = _UNPRINTABLE.sub(lambda found: ascii(found[0])[1:-1], text)
    return shown if most is None else shorten(shown, most)


def escape_markdown(text: str) -> str:
    r"""Return Markdown that shows this text in a line or in the cell of a table; blanks and line ends become one blank.

    It is for files that others read; for Streamlit, which has signs of its own, there is `figures.names.plain`.

    >>> print(escape_markdown("a|b <img> *c* d_e\n# f"))
    a\|b \<img\> \*c\* d_e # f
    """
    return _ACTIVE.sub(r"\\\g<0>", printable(" ".join(text.split())))


def code_block(text: str, language: str) -> str:
    """Return Markdown of a block of code, whose fence is longer than any in the text; a terminal may show it."""
    text = printable(text)
    fence = "`" * max([3, *(len(one) + 1 for one in re.findall("`+", text))])
    return f"{fence}{language}\n{text}\n{fence}"


def message(text: str) -> str:
    """Return a message as terminal and app show it: at most 4,000 characters, none of which a terminal obeys."""
    return printable(text, 4000)


def shorten(text: str, most: int = 80) -> str:
    """Return the first `most` characters of a text, and how many more there are if it is longer."""
    return text if len(text) <= most else f"{text[:most]} … ({len(text) - most} more characters)"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return " Did you mean …?" with the closest known word; "" if none is close, or for over 200 characters.

    >>> did_you_mean("smaples", ["samples", "seed"])
    " Did you mean 'samples'?"
    """
    # difflib takes time that grows with the square of the length, and the word may come from a hostile file.
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6) if len(word) <= 200 else []
    return f" Did you mean '{close[0]}'?" if close else ""

"""Show names and messages that others wrote as the text they are: suites, tasks, classes, answers, paths.

Streamlit draws headings, captions and messages as Markdown, plotly draws labels as a little HTML. A name must neither
be drawn nor make the browser fetch anything; nor does a shared server say where its files are.
"""

from __future__ import annotations

import re

from featcal.system.sandbox import without_places

_ACTIVE = re.compile(r"([\\`*_\[\]<>$&~|]|^[#+=-]|^\d+(?=[.)])(?=.))")
_JOINER = "\u2060"
"""Word joiner: no width, and none of the patterns below match across it."""
_AFTER_PARSING = re.compile(
    r":(?=\S)"  # :smile:, :material/home:, :red[…], http://…
    r"|(?i:www)(?=\.)"
    r"|@"
    r"|(?<!\S)[-<>~](?=[-=>]+(?!\S))"  # " -> " becomes an arrow
)
"""Patterns that streamlit's Markdown replaces in text that is already parsed, where no backslash protects them."""
_HTML = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;"})


def plain(text: str) -> str:
    r"""Return Markdown that shows exactly this text; blanks and line ends become one blank.

    >>> plain("**bold** ![x](http://a.b/c.png) $x$")
    '\\*\\*bold\\*\\* !\\[x\\](http:\u2060//a.b/c.png) \\$x\\$'
    >>> plain("1. letters, block 3")
    '1\\. letters, block 3'
    >>> plain("digits")
    'digits'
    """
    # No backslash protects these (see `_AFTER_PARSING`), so a joiner breaks the pattern; after a digit the backslash
    # belongs behind it, before the full stop of a numbered list.
    joined = _AFTER_PARSING.sub(lambda found: found[0] + _JOINER, " ".join(without_places(text).split()))
    return _ACTIVE.sub(lambda found: f"{found[0]}\\" if found[0].isdigit() else f"\\{found[0]}", joined)


def plain_lines(text: str) -> str:
    """Return Markdown that shows exactly this text, line by line; empty lines are left out."""
    return "  \n".join(plain(line) for line in text.splitlines() if line.strip())


def label(text: str) -> str:
    """Return a plotly label that shows exactly this text; line ends become blanks.

    >>> label("<b>a</b> & b")
    '&lt;b&gt;a&lt;/b&gt; &amp; b'
    """
    return " ".join(text.split()).translate(_HTML)


def shorten(text: str, most: int) -> str:
    """Cut a text to at most `most` characters, the last of them an ellipsis.

    >>> shorten("a very long name", 8)
    'a very …'
    """
    return text if len(text) <= most else f"{text[: most - 1]}…"

"""Show names and messages that others wrote as the text they are: suites, tasks, classes, answers, paths.

Streamlit draws headings, captions and messages as Markdown, plotly draws labels as a little HTML. A name must neither
be drawn nor make the browser fetch anything; nor does a shared server say where its files are.
"""

from __future__ import annotations

import re

from featcal.system.sandbox import without_places

_ACTIVE = re.compile(r"[\\`*_\[\]<>$&~|]|:(?=[a-zA-Z])")
_BEGINNING = re.compile(r"^(?:(?=[#+=-])|\d+(?=[.)]))")
"""What stands before a sign that makes a text a heading or a list, where a backslash goes."""
_AFTER_PARSING = re.compile(
    r":[\w+-]+:|:material/"  # :smile:, :streamlit:, :material/home:
    r"|(?i:https?://|www\.)"
    r"|[\w.+-]@[\w-]+\."
    r"|^(?:<->|->|<-|--|>=|<=|~=)$"  # " -> " becomes an arrow
)
"""Words that streamlit's Markdown replaces in text that is already parsed, where no backslash protects them."""
_HTML = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;"})


def plain(text: str) -> str:
    r"""Return Markdown that shows exactly this text, and no more when it is copied; blanks and line ends become one
    blank.

    >>> print(plain("**bold** ties:scale=1 $x$ http://a.b/c_d"))
    \*\*bold\*\* ties\:scale=1 \$x\$ `http://a.b/c_d`
    >>> plain("1. letters, block 3")
    '1\\. letters, block 3'
    >>> plain("digits")
    'digits'
    """
    words = without_places(text).split()
    shown = (_code(word) if _AFTER_PARSING.search(word) else _ACTIVE.sub(r"\\\g<0>", word) for word in words)
    return _BEGINNING.sub(r"\g<0>\\", " ".join(shown))


def _code(word: str) -> str:
    """Return Markdown of a word as code, in more backticks than it has side by side."""
    ticks = "`" * (1 + max(map(len, re.findall("`+", word)), default=0))
    return f"{ticks} {word} {ticks}" if "`" in word else f"{ticks}{word}{ticks}"


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

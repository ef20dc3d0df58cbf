"""Show names and messages from outside as plain text: suites, tasks, classes, answers, paths.

Streamlit draws headings, captions and messages as Markdown, plotly draws labels as a little HTML. A name must neither
be interpreted nor make the browser fetch anything, and a shared server must not reveal where its files are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from featcal.system.sandbox import without_places

_ACTIVE = re.compile(r"[\\`*_\[\]<>$&~|]|:(?=[a-zA-Z])")
_BEGINNING = re.compile(r"^(?:(?=[#+=-])|\d+(?=[.)]))")
"""Text before a sign that starts a heading or a list, where a backslash is needed."""
_AFTER_PARSING = re.compile(
    r":[\w+-]+:|:material/"  # :smile:, :streamlit:, :material/home:
    r"|(?i:https?://|www\.)"
    r"|[\w.+-]@[\w-]+\."
    r"|^(?:<->|->|<-|--|>=|<=|~=)$"  # " -> " becomes an arrow
)
"""Words that streamlit's Markdown replaces in text that is already parsed, so that a backslash does not protect
them."""
_HTML = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;"})


def plain(text: str) -> str:
    r"""Return Markdown that shows exactly this text, and copies as such; blanks and line ends become one blank.

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
    """Return Markdown for a word as code, with more backticks than it has side by side."""
    ticks = "`" * (1 + max(map(len, re.findall("`+", word)), default=0))
    return f"{ticks} {word} {ticks}" if "`" in word else f"{ticks}{word}{ticks}"


def plain_lines(text: str) -> str:
    """Return Markdown that shows exactly this text, line by line; empty lines are left out."""
    return "  \n".join(plain(line) for line in text.splitlines() if line.strip())


def join_percent(text: str) -> str:
    """Return a text whose per cent signs stay in the line of their numbers, by no-break spaces.

    >>> join_percent("71 % of 2 parts")
    '71\xa0% of 2 parts'
    """
    return text.replace(" %", "\u00a0%")


def label(text: str) -> str:
    """Return a plotly label that shows exactly this text; line ends become blanks.

    >>> label("<b>a</b> & b")
    '&lt;b&gt;a&lt;/b&gt; &amp; b'
    """
    return " ".join(text.split()).translate(_HTML)


def cut_text(text: str, most: int) -> str:
    """Cut a text to at most `most` characters, the last of them an ellipsis.

    >>> cut_text("a very long name", 8)
    'a very …'
    """
    return text if len(text) <= most else f"{text[: most - 1]}…"


def short_model(name: str) -> str:
    """Return a model's display name, without the options that a tooltip or a command has.

    >>> short_model("calibrated:lam=0.05,rho=2,recipe=informed@ties:scale=0.6")
    'calibrated, informed, of ties, scale 0.6'
    >>> short_model("polished:steps=30@calibrated:recipe=informed"), short_model("anchor:rho=2")
    ('polished, steps 30, of calibrated, informed', 'anchor, rho 2')
    >>> short_model("/data/me/my-ties"), short_model("expert:digits")
    ('my-ties', 'expert, digits')
    """
    own, _, below = name.partition("@")
    kind, _, options = own.partition(":")
    if "/" in kind or "/" in own or ("@" in name and not re.fullmatch(r"[a-z-]+", kind)):
        return name.rstrip("/").rpartition("/")[2]
    words = [one.replace("=", " ") for one in options.split(",") if one]
    if kind == "calibrated":
        recipes = [one.removeprefix("recipe ") for one in words if one.startswith("recipe ")]
        words = recipes or (["paper"] if options else [])
    return ", ".join([kind, *words, *([f"of {short_model(below)}"] if below else [])])


def shorten_models(names: Iterable[str]) -> list[str]:
    """Return short names (`short_model`), or the full ones if two would be equal.

    >>> shorten_models(["ties", "calibrated:rho=1", "calibrated:rho=2"])
    ['ties', 'calibrated:rho=1', 'calibrated:rho=2']
    """
    whole = [*names]
    short = [*map(short_model, whole)]
    return [
        name if short.count(one) > 1 and whole.count(name) == 1 else one for name, one in zip(whole, short, strict=True)
    ]

"""Let docstrings, which are written as plain text, pass as reStructuredText."""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

_QUOTED = re.compile(r"(`[^`]+`)")
_MARKUP = re.compile(r"(?<!\\)([|*]|(?<=\w)_(?!\w))")
"""Characters that mean something outside of backticks: substitutions, emphasis, and names that end in an underscore."""


def escape(app: Sphinx, what: str, name: str, thing: object, options: object, lines: list[str]) -> None:
    """Escape what reStructuredText would read as markup, in place; literal code and examples stay as they are."""
    for i, line in enumerate(lines):
        if not line.lstrip().startswith((">>>", "..", ":")):
            parts = _QUOTED.split(line)
            parts[::2] = [_MARKUP.sub(r"\\\1", part) for part in parts[::2]]
            lines[i] = "".join(parts)


def draw_dashes(app: Sphinx, page: nodes.document) -> None:
    """Put a dash between a parameter and what it is; elsewhere two hyphens begin an option and stay."""
    for text in [one for one in page.findall(nodes.Text) if one == " -- "]:
        text.parent.replace(text, nodes.Text(" – "))


def setup(app: Sphinx) -> dict[str, Any]:
    """Escape after napoleon, which writes the sections of arguments and errors."""
    app.connect("doctree-read", draw_dashes)
    app.connect("autodoc-process-docstring", escape, priority=800)
    return {"parallel_read_safe": True}

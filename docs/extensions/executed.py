"""Show on the pages of the site what marked blocks print, by running them while the site is built."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from marked import Runner, find_blocks, take_turns
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError

MOST_COLUMNS = 110
"""Characters of a line above which it is broken."""


def show_outputs(app: Sphinx, page: str, source: list[str]) -> None:
    """Put after every block that is to be shown what it printed; run the blocks that it needs."""
    text = source[0]
    blocks = find_blocks(text) if page in _pages_to_run(Path(app.srcdir)) else []
    # What comes after the last output is left to the tests, which run all blocks of all pages.
    while blocks and not blocks[-1].shown:
        blocks.pop()
    if not blocks:
        return
    parts, start = [], 0
    with tempfile.TemporaryDirectory() as folder:
        runner = Runner(Path(folder))
        for block in blocks:
            parts.append(text[start : block.end])
            start = block.end
            try:
                printed = runner.run(block)
            except RuntimeError as error:
                raise ExtensionError(f"{page}: {error}") from error
            if block.shown:
                parts.append(_show(printed))
    source[0] = "".join([*parts, text[start:]])


@cache
def _pages_to_run(docs: Path) -> set[str]:
    """Return the names of the pages that show what blocks print, those alone whose turn it is."""
    texts = {file.relative_to(docs).with_suffix("").as_posix(): file.read_text("utf-8") for file in docs.rglob("*.md")}
    return {*take_turns([page for page, text in texts.items() if any(one.shown for one in find_blocks(text))])}


def _show(printed: str) -> str:
    """Return a block of output; where lines are longer than any table's they are sentences."""
    kind = "output words" if max(map(len, printed.splitlines()), default=0) > MOST_COLUMNS else "output"
    return f"\n```{{code-block}} text\n:class: {kind}\n\n{printed.rstrip()}\n```\n"


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("source-read", show_outputs)
    return {"parallel_read_safe": False}

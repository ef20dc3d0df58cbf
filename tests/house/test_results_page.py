"""The tables of the pages of results are those of the files that they name."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import featcal

DOCS = Path(featcal.__file__).parents[1] / "docs"


def test_tables_are_those_of_their_files() -> None:
    script = runpy.run_path(str(DOCS / "results.py"))
    pages = {file: file.read_text(encoding="utf-8") for file in script["PAGES"]}
    text = "".join(pages.values())
    assert len(re.findall(r"<!-- (?!end)\w+ of [a-z]", text)) == text.count("<!-- end of table -->") >= 12
    assert "| `calibrated:recipe=refined` |" in text
    assert "Average over two untuned" in text
    assert {file: script["filled"](page) for file, page in pages.items()} == pages

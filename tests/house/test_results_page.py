"""The tables of docs/results.md are those of the files that they name."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import featcal

DOCS = Path(featcal.__file__).parents[1] / "docs"


def test_tables_are_those_of_their_files() -> None:
    page = (DOCS / "results.md").read_text(encoding="utf-8")
    assert len(re.findall(r"<!-- (?!end)\w+ of [a-z]", page)) == page.count("<!-- end of table -->") >= 12
    assert "| `calibrated:recipe=refined` |" in page
    assert "Average over two untuned" in page
    assert runpy.run_path(str(DOCS / "results.py"))["filled"](page) == page

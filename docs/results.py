"""Write the tables of the pages of results anew from the files that they name: `python docs/results.py`."""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

from featcal.figures.study_tables import markdown
from featcal.studies.study import read_study

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "docs" / "results.md", *sorted((ROOT / "docs" / "results").glob("*.md"))]
PAGES += [ROOT / "benchmarks" / "NOTES.md"]
sys.path += [str(ROOT / "benchmarks"), str(ROOT / "benchmarks" / "real")]
from adapters import table  # noqa: E402
from tables import tables  # noqa: E402

_TABLE = re.compile(r"(<!-- (\w+) of (\S+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
"""Where a table stands, which one, and the file under the repository's root that it is made of."""


def filled(text: str) -> str:
    """The page with every table as its file has it: `table` is the study's own, `ranks_…` are of adapters, others
    of the real suites."""
    return _TABLE.sub(lambda found: f"{found[1]}{_table(found[2], ROOT / found[3])}{found[4]}", text)


def _table(part: str, file: Path) -> str:
    if part == "table":
        return markdown(read_study(file).summaries())
    if part.startswith("ranks_"):
        rows = json.loads(file.read_text(encoding="utf-8"))
        return f"\n{table(rows, part.removeprefix('ranks_').replace('_', '-'))}\n\n"
    return f"\n{tables(part, file)}\n\n"


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()  # with a word too many nothing is written
    for page in PAGES:
        page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")

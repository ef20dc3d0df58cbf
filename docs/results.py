"""Write the tables of docs/results.md anew from files that `featcal compare --out` made: `python docs/results.py`."""

from __future__ import annotations

import re
from pathlib import Path

from featcal.figures.study_tables import markdown
from featcal.studies.study import read_study

PAGE = Path(__file__).with_name("results.md")
ROOT = PAGE.parents[1]
_TABLE = re.compile(r"(<!-- table of (\S+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
"""Where a table stands, and the file under the repository's root that it is made of."""


def filled(text: str) -> str:
    """The page with every table as its file has it."""
    return _TABLE.sub(lambda found: f"{found[1]}{markdown(read_study(ROOT / found[2]).summaries())}{found[3]}", text)


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")

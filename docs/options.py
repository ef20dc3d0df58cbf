"""Writes the table of docs/options.md from `featcal.suite.calibration_options`.

python docs/options.py          # prints it
python docs/options.py --write  # puts it into the page
"""

from __future__ import annotations

import sys
from pathlib import Path

from featcal.suite.calibration_options import ASKED, RECIPES, SHORTHANDS

PAGE = Path(__file__).parent / "options.md"
START, END = "<!-- table: python docs/options.py --write -->", "<!-- end of the table -->"


def table() -> str:
    """Return the options of a calibration as Markdown."""
    lines = ["| option | | range | left out | recipes |", "|---|---|---|---|---|"]
    for name, one in ASKED.items():
        flag = f"--{name.replace('_', '-')}" + (f"/--no-{name.replace('_', '-')}" if one.kind is bool else "")
        flag = f"--{name}" if name in SHORTHANDS else flag
        limits = ", ".join(one.choices) or one.interval()
        recipes = "all" if one.recipes == RECIPES else ", ".join(one.recipes)
        symbol = f", {one.symbol}" if one.symbol and one.symbol != "n" else ""
        lines.append(f"| `{name}`{symbol}<br>`{flag}` | {one.help} | {limits} | {one.left_out} | {recipes} |")
    return "\n".join(lines)


def filled(page: str) -> str:
    """Return the page with the table as it is now."""
    before, _, rest = page.partition(START)
    return f"{before}{START}\n\n{table()}\n\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    if "--write" in sys.argv:
        PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(table())

"""Writes the tables of docs/methods.md: every method that is registered.

python docs/methods.py          # prints them
python docs/methods.py --write  # puts them into the page
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from dataclasses import Field
from pathlib import Path
from typing import Any

from featcal.suite.methods import MERGER, Method, baseline_names, merger_names, method
from featcal.suite.options import facts_of, options_of_class
from featcal.system.formatting import exactly

_SAMPLES = ("samples", "seed")
"""Options of all methods beside calibration that see samples; the page says so once."""
PAGE = Path(__file__).parent / "methods.md"


def tables() -> dict[str, str]:
    """Return the tables as Markdown, by the name that their marks have in the page."""
    beside = [method(name) for name in baseline_names()]
    return {
        "mergers": table(map(method, merger_names())),
        "beside": table(kind for kind in beside if not kind.on_another),
        "behind": table(kind for kind in beside if kind.on_another),
    }


def table(kinds: Iterable[type[Method]]) -> str:
    """Return a line per method: name, what it does, paper, options with defaults and ranges, needs."""
    lines = ["| name | what it does | paper | options | needs |", "|---|---|---|---|---|"]
    for kind in kinds:
        about = kind.about
        options = "; ".join(
            describe(one) for one in options_of_class(kind) if one.name not in _SAMPLES or kind.role == MERGER
        )
        lines.append(f"| `{kind.kind}` | {about.summary} | {about.link} | {options} | {', '.join(about.needs)} |")
    return "\n".join(lines)


def describe(one: Field[Any]) -> str:
    """Return an option's name, default and range, and what it is."""
    facts = facts_of(one)
    default = "" if one.default is None else f" {exactly(one.default) if type(one.default) is float else one.default}"
    notes = [*([f"in {facts.interval()}"] if facts.interval() else []), *(["by task"] if facts.by_task else [])]
    return f"`{one.name}`{default}{', ' if notes else ''}{', '.join(notes)}: {facts.help}"


def filled(page: str) -> str:
    """Return the page with the tables of this version between their marks."""
    for name, text in tables().items():
        start, end = f"<!-- {name}: python docs/methods.py --write -->", f"<!-- end of {name} -->"
        if start not in page or end not in page:
            raise ValueError(f"the page has no marks of the table '{name}'")
        page = re.sub(f"{start}.*?{end}", lambda _, s=start, t=text, e=end: f"{s}\n\n{t}\n\n{e}", page, flags=re.DOTALL)
    return page


if __name__ == "__main__":
    if "--write" in sys.argv:
        PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print("\n\n".join(tables().values()))

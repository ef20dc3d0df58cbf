"""Markdown tables of the rows of measure_images.py: `python benchmarks/real/tables.py grid.jsonl --part grid`."""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pictures import TASKS, TUNED, UNTUNED

Row = dict[str, Any]
GROUPS = {"all eight": TASKS, "six tuned": TUNED, "two untuned": UNTUNED}
ORDER = ("nothing", "svc", "paper", "refined", "polish", "surgery", "probsurgery")


def mean(row: Row, tasks: Sequence[str]) -> float:
    return sum(row["tasks"][task] for task in tasks) / len(tasks)


def interval(values: Sequence[float]) -> str:
    """Mean, and lowest to highest where there are several."""
    middle = f"{statistics.fmean(values):.1f}"
    return middle if len(values) == 1 else f"{middle} ({min(values):.1f}–{max(values):.1f})"


def line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def head(cells: Sequence[str]) -> list[str]:
    return [line(cells), line("---" for _ in cells)]


def grid(rows: Sequence[Row]) -> list[str]:
    """One table of averages, one of shares of the gap and one by task, of every merger with every treatment."""
    found: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        found[row["merger"], row["treatment"]].append(row)
    (expert,) = next(several for (_, treatment), several in found.items() if treatment == "expert")
    mergers = list(dict.fromkeys(row["merger"] for row in rows))
    lines: list[str] = []
    for name, tasks in GROUPS.items():
        lines += ["", f"Average over {name}, %", "", *head(["merger", *ORDER])]
        for merger in mergers:
            several = [[mean(row, tasks) for row in found[merger, one]] for one in ORDER]
            lines.append(line([f"`{merger}`", *(interval(values) if values else "–" for values in several)]))
    lines += ["", "Share of the gap from merger to experts that is closed, %", "", *head(["merger", *ORDER[1:]])]
    for merger in mergers:
        if not found[merger, "paper"]:
            continue
        floor = found[merger, "nothing"][0]["average"]
        shares = [
            [100 * (row["average"] - floor) / (expert["average"] - floor) for row in found[merger, one]]
            for one in ORDER[1:]
        ]
        lines.append(line([f"`{merger}`", *(interval(values) if values else "–" for values in shares)]))
    lines += ["", "By task, mean over seeds, %", "", *head(["merger", "treatment", *TASKS, "average"])]
    for (merger, treatment), several in found.items():
        cells = [statistics.fmean(row["tasks"][task] for row in several) for task in TASKS]
        cells.append(statistics.fmean(row["average"] for row in several))
        lines.append(line([f"`{merger}`", treatment, *(f"{value:.1f}" for value in cells)]))
    return lines


def sweep(rows: Sequence[Row]) -> list[str]:
    """Settings from the best to the worst."""
    ranked = sorted(rows, key=lambda row: -row["average"])
    return [
        *head(["model", "average of six tuned, validation"]),
        *(line([f"`{row['model']}`", f"{row['average']:.1f}"]) for row in ranked),
    ]


def budget(rows: Sequence[Row]) -> list[str]:
    """Average by number of samples, for every treatment, on all sets and on the untuned ones."""
    found: dict[tuple[int, str], list[Row]] = defaultdict(list)
    for row in rows:
        found[row["samples"], row["treatment"]].append(row)
    treatments = list(dict.fromkeys(treatment for _, treatment in found))
    lines = head(["samples per task", *(f"{one}, {name}" for name in ("all", "untuned") for one in treatments)])
    for samples in sorted({samples for samples, _ in found}):
        cells = [
            interval([mean(row, tasks) for row in found[samples, one]])
            for tasks in (TASKS, UNTUNED)
            for one in treatments
        ]
        lines.append(line([str(samples), *cells]))
    return lines


PARTS = {"grid": grid, "sweep": sweep, "budget": budget}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--part", choices=PARTS, required=True)
    options = parser.parse_args()
    rows = [json.loads(one) for one in options.rows.read_text().splitlines()]
    for row in rows:
        if "refused" in row:
            print(f"refused: {row['merger']} {row['model']}: {row['refused']}")
    print("\n".join(PARTS[options.part]([row for row in rows if "tasks" in row])))


if __name__ == "__main__":
    main()

"""Methods of the real suites' studies, and tables by task group out of their documents.

`python benchmarks/real/tables.py names grid` prints the list that `featcal compare --methods` takes;
`python benchmarks/real/tables.py grid DOCUMENT` the Markdown tables of what it wrote.
"""

from __future__ import annotations

import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import pictures
import sentences

from featcal.studies.runner import EXPERT, Row
from featcal.studies.study import read_study

MERGERS = (
    "task-arithmetic", "simple-averaging", "ties", "breadcrumbs", "tsv-m", "iso-c", "iso-cts", "wudi-optimum",
)  # fmt: skip
TREATMENTS = {
    "svc": "svc",
    "paper": "calibrated",
    "refined": "calibrated:recipe=refined",
    "polish": "polished:steps=30",
    "Surgery": "surgery",
    "ProbSurgery": "probsurgery",
}
FEW = ("task-arithmetic", "simple-averaging", "tsv-m", "wudi-optimum")
LAMS, ALPHAS, RHOS = (0.0001, 0.001, 0.01, 0.05, 0.2), (0.0, 0.3, 0.6), (0.5, 8)
NUMBERS = {2: "two", 4: "four", 6: "six", 8: "eight"}


def grid() -> list[str]:
    """Every merger by itself and with everything that can be done to it."""
    own = [name for merger in MERGERS for name in (merger, *(f"{one}@{merger}" for one in TREATMENTS.values()))]
    return ["expert", "base", *own, "regmean", "regmean++"]


def few() -> list[str]:
    """Four mergers with what takes texts too: a vocabulary has no module per task."""
    ways = [way for name, way in TREATMENTS.items() if "surgery" not in name.lower()]
    own = [name for merger in FEW for name in (merger, *(f"{way}@{merger}" for way in ways))]
    return ["expert", "base", *own]


def sweep() -> list[str]:
    """The paper's recipe: λ with α at ρ = 2, λ with the other ρ at α = 0.3; and the refined one beside it."""
    settings = [(lam, 2, alpha) for lam in LAMS for alpha in ALPHAS] + [(lam, rho, 0.3) for lam in LAMS for rho in RHOS]
    paper = [f"calibrated:lam={lam:g},rho={rho:g},alpha={alpha:g}" for lam, rho, alpha in settings]
    return [*paper, TREATMENTS["refined"]]


def groups(rows: Sequence[Row]) -> dict[str, Sequence[str]]:
    """All tasks of the suite that was measured, and those on which something was tuned and nothing was."""
    (suite,) = [one for one in (pictures, sentences) if any(set(one.TASKS) == row.found.scores.keys() for row in rows)]
    parts = {"all": suite.TASKS, "tuned": suite.TUNED, "untuned": suite.UNTUNED}
    return {
        f"all {NUMBERS[len(tasks)]}" if name == "all" else f"{NUMBERS[len(tasks)]} {name}": tasks
        for name, tasks in parts.items()
    }


def mean(row: Row, tasks: Sequence[str]) -> float:
    """Unweighted mean over tasks, in %."""
    return 100 * sum(row.found.scores[task].value for task in tasks) / len(tasks)


def spread(values: Sequence[float]) -> str:
    """Mean, and lowest to highest where there are several."""
    if not values:
        return "–"
    middle = f"{statistics.fmean(values):.1f}"
    return middle if len(values) == 1 else f"{middle} ({min(values):.1f}–{max(values):.1f})"


def line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def head(cells: Sequence[str]) -> list[str]:
    return [line(cells), line("---" for _ in cells)]


def by_method(rows: Sequence[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        if row.found.scores:
            found.setdefault(row.method, []).append(row)
    return found


def treated(merger: str) -> list[str]:
    return [f"{one}@{merger}" for one in TREATMENTS.values()]


def grid_tables(rows: Sequence[Row]) -> list[str]:
    """Averages by group of tasks, shares of the gap between merger and experts, and means by task."""
    found, parts = by_method(rows), groups(rows)
    lines = [text for name, tasks in parts.items() for text in average_table(found, name, tasks)]
    lines += [text for name, tasks in parts.items() for text in gap_table(found, name, tasks)]
    return [*lines, "By task, mean over seeds, %:", "", *task_table(found, next(iter(parts.values())))]


def average_table(found: Mapping[str, list[Row]], name: str, tasks: Sequence[str]) -> list[str]:
    expert, base = mean(found[EXPERT][0], tasks), mean(found["base"][0], tasks)
    lines = [f"Average over {name}, % (experts {expert:.1f}, base {base:.1f}):", ""]
    lines += head(["merger", "nothing", *TREATMENTS])
    named = {merger: [merger, *treated(merger)] for merger in MERGERS} | {
        one: [one] for one in ("regmean", "regmean++")
    }
    for merger, models in named.items():
        if merger not in found:
            continue
        cells = [spread([mean(row, tasks) for row in found.get(one, [])]) for one in models]
        lines.append(line([f"`{merger}`", *cells, *["–"] * (1 + len(TREATMENTS) - len(cells))]))
    return [*lines, ""]


def gap_table(found: Mapping[str, list[Row]], name: str, tasks: Sequence[str]) -> list[str]:
    expert = mean(found[EXPERT][0], tasks)
    lines = [f"Share of the gap from merger to experts that is closed, {name}, %:", "", *head(["merger", *TREATMENTS])]
    for merger in (one for one in MERGERS if one in found):
        floor = mean(found[merger][0], tasks)
        shares = [
            [100 * (mean(row, tasks) - floor) / (expert - floor) for row in found.get(one, [])]
            for one in treated(merger)
        ]
        lines.append(line([f"`{merger}`", *map(spread, shares)]))
    return [*lines, ""]


def task_table(found: Mapping[str, list[Row]], tasks: Sequence[str]) -> list[str]:
    lines = head(["model", *tasks])
    for method, rows in found.items():
        means = [statistics.fmean(mean(row, [task]) for row in rows) for task in tasks]
        lines.append(line([f"`{method}`", *(f"{one:.1f}" for one in means)]))
    return lines


def sweep_table(rows: Sequence[Row]) -> list[str]:
    """Settings from the best to the worst on the tuned tasks."""
    name, tasks = list(groups(rows).items())[1]
    ranked = sorted(by_method(rows).items(), key=lambda one: -mean(one[1][0], tasks))
    body = [line([f"`{method}`", spread([mean(row, tasks) for row in several])]) for method, several in ranked]
    return [*head(["model", f"average of {name}, validation, %"]), *body]


def budget_table(rows: Sequence[Row]) -> list[str]:
    """Averages by number of samples."""
    found: dict[str, dict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        found[str(row.point.at.get("samples", "–"))][row.method].append(row)
    methods = [one for one in by_method(rows) if one != EXPERT]
    every, _, untuned = groups(rows).values()
    lines = head(["samples", *(f"`{one}`, {name}" for name in ("all", "untuned") for one in methods)])
    for samples, several in found.items():
        cells = [spread([mean(r, tasks) for r in several[one]]) for tasks in (every, untuned) for one in methods]
        lines.append(line([samples, *cells]))
    return lines


NAMES = {"grid": grid, "few": few, "sweep": sweep}
TABLES = {"grid": grid_tables, "sweep": sweep_table, "budget": budget_table}


def main() -> None:
    if sys.argv[1] == "names":
        print(",".join(NAMES[sys.argv[2]]()))
    else:
        print("\n".join(TABLES[sys.argv[1]](read_study(Path(sys.argv[2])).rows)))


if __name__ == "__main__":
    main()

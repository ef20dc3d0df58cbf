"""Methods of the real suites' studies, and tables by task group out of their documents.

`python benchmarks/real/tables.py names grid` prints the options `--model NAME` for `featcal compare`;
`python benchmarks/real/tables.py grid DOCUMENT` the Markdown tables of what it wrote, which `python docs/results.py`
puts into the pages of docs/results.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

import minilm
import pictures
import sentences

from featcal.studies.runner import Row
from featcal.studies.study import read_study
from featcal.studies.summary import Summary
from featcal.suite.methods import EXPERT
from featcal.system.formatting import percent

MERGERS = (
    "task-arithmetic", "simple-averaging", "ties", "breadcrumbs", "tsv-m", "iso-c", "iso-cts", "wudi-optimum",
)  # fmt: skip
RECIPES = {
    "paper": "calibrated",
    "refined": "calibrated:recipe=refined",
    "informed": "calibrated:recipe=informed",
}
TREATMENTS = {
    "svc": "svc",
    **RECIPES,
    "polish": "polished:steps=30",
    "Surgery": "surgery",
    "ProbSurgery": "probsurgery",
}
STARTS = ("task-arithmetic", "simple-averaging", "tsv-m", "ace", "wudi-optimum")
"""Mergers that the pretrained models are repaired from."""
ALONE = (
    "ties", "breadcrumbs", "dare:seed=42", "model-stock", "iso-c", "iso-cts", "regmean", "regmean++", "lot", "esm",
    "svc@task-arithmetic", "surgery@task-arithmetic",
)  # fmt: skip
"""Methods that are measured beside them with nothing after."""
FEW = ("task-arithmetic", "simple-averaging", "tsv-m", "wudi-optimum")
SUITES = ("clip-mini", "t5-mini", "lm-mini", "real images", "real texts", "MiniLM", "MiniLM, LoRA")
"""Columns of the overview; `column_file` has their documents."""
DECISIONS = "calibrated:recipe=informed,decisions=0.7"
TRAINED = "trained on the same samples"
"""The row that shows how much of the gap these samples allow to close."""
REPAIRS = {
    **RECIPES,
    "informed, decisions 0.7": DECISIONS,
    "informed, margin step": f"margin-step@{RECIPES['informed']}",
    TRAINED: f"distillation@{DECISIONS}",
}
OVERVIEW = {
    "experts": "expert",
    "base": "base",
    "merged": "task-arithmetic",
    **{name: f"{way}@task-arithmetic" for name, way in REPAIRS.items()},
}
"""Models of the overview by row: the merged model of every suite is Task Arithmetic's at 0.3."""
LAMS, ALPHAS, RHOS = (0.0001, 0.001, 0.01, 0.05, 0.2), (0.0, 0.3, 0.6), (0.5, 8)
NUMBERS = {2: "two", 3: "three", 4: "four", 5: "five", 6: "six", 8: "eight"}


def grid() -> list[str]:
    """Every merger by itself and with everything that can be done to it."""
    own = [name for merger in MERGERS for name in (merger, *(f"{one}@{merger}" for one in TREATMENTS.values()))]
    return ["expert", "base", *own, "regmean", "regmean++"]


def few() -> list[str]:
    """Four mergers with what takes texts too: a vocabulary has no module per task."""
    ways = [way for name, way in TREATMENTS.items() if "surgery" not in name.lower()]
    own = [name for merger in FEW for name in (merger, *(f"{way}@{merger}" for way in ways))]
    return ["expert", "base", *own]


def recipes() -> list[str]:
    """Task Arithmetic with every recipe: what is measured first, and of adapters all that is."""
    return ["expert", "base", "task-arithmetic", *(f"{way}@task-arithmetic" for way in RECIPES.values())]


def repairs() -> list[str]:
    """Every row of the overview."""
    return [*OVERVIEW.values()]


def starts() -> list[str]:
    """Five mergers, and every recipe from each."""
    return ["expert", "base", *STARTS, *(f"{way}@{one}" for way in RECIPES.values() for one in STARTS)]


def pretrained() -> list[str]:
    """Five mergers with every recipe and thirty steps of polish, and what else merges."""
    ways = [*RECIPES.values(), TREATMENTS["polish"]]
    return list(dict.fromkeys([*recipes(), *STARTS, *(f"{way}@{one}" for way in ways for one in STARTS), *ALONE]))


def sweep() -> list[str]:
    """The paper's recipe: λ with α at ρ = 2, λ with the other ρ at α = 0.3; and the refined one beside it."""
    settings = [(lam, 2, alpha) for lam in LAMS for alpha in ALPHAS] + [(lam, rho, 0.3) for lam in LAMS for rho in RHOS]
    paper = [f"calibrated:lam={lam:g},rho={rho:g},alpha={alpha:g}" for lam, rho, alpha in settings]
    return [*paper, TREATMENTS["refined"]]


def groups(rows: Sequence[Row]) -> dict[str, Sequence[str]]:
    """All tasks of the suite that was measured, and those on which something was tuned and nothing was."""
    measured = rows[0].found.scores.keys()
    (suite,) = [one for one in (pictures, sentences, minilm) if set(one.TASKS) == measured]
    parts = {"all": suite.TASKS} | suite.GROUPS
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


def treatments(found: Mapping[str, list[Row]]) -> dict[str, str]:
    """Those that were measured."""
    return {name: way for name, way in TREATMENTS.items() if any(f"{way}@{one}" in found for one in mergers(found))}


def mergers(found: Mapping[str, list[Row]]) -> list[str]:
    """Models that were measured with nothing after them."""
    return [one for one in found if "@" not in one and one not in (EXPERT, "base")]


def averages(rows: Sequence[Row]) -> list[str]:
    """Averages by group of tasks."""
    found = by_method(rows)
    return [text for name, tasks in groups(rows).items() for text in average_table(found, name, tasks)][:-1]


def grid_tables(rows: Sequence[Row]) -> list[str]:
    """The same, and shares of the gap between merger and experts."""
    found = by_method(rows)
    gaps = [text for name, tasks in groups(rows).items() for text in gap_table(found, name, tasks)]
    return [*averages(rows), "", *gaps[:-1]]


def average_table(found: Mapping[str, list[Row]], name: str, tasks: Sequence[str]) -> list[str]:
    expert, base = mean(found[EXPERT][0], tasks), mean(found["base"][0], tasks)
    lines = [f"Average over {name}, % (experts {expert:.1f}, base {base:.1f}):", ""]
    ways = treatments(found)
    lines += head(["merger", "nothing", *ways])
    for merger in mergers(found):
        models = [merger, *(f"{way}@{merger}" for way in ways.values())]
        cells = [spread([mean(row, tasks) for row in found.get(one, [])]) for one in models]
        lines.append(line([f"`{merger}`", *cells]))
    return [*lines, ""]


def gap_table(found: Mapping[str, list[Row]], name: str, tasks: Sequence[str]) -> list[str]:
    expert, ways = mean(found[EXPERT][0], tasks), treatments(found)
    lines = [f"Share of the gap from merger to experts that is closed, {name}, %:", "", *head(["merger", *ways])]
    for merger in (one for one in mergers(found) if any(f"{way}@{one}" in found for way in ways.values())):
        floor = mean(found[merger][0], tasks)
        shares = [
            [100 * (mean(row, tasks) - floor) / (expert - floor) for row in found.get(f"{way}@{merger}", [])]
            for way in ways.values()
        ]
        lines.append(line([f"`{merger}`", *map(spread, shares)]))
    return [*lines, ""]


def task_table(rows: Sequence[Row]) -> list[str]:
    """Every model on every task, mean over seeds."""
    tasks = next(iter(groups(rows).values()))
    lines = head(["model", *tasks])
    for method, several in by_method(rows).items():
        means = [statistics.fmean(mean(row, [task]) for row in several) for task in tasks]
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
        found[str(row.point.at["n"])][row.method].append(row)
    methods = [one for one in by_method(rows) if one != EXPERT]
    every, _, untuned = groups(rows).values()
    lines = head(["samples", *(f"`{one}`, {name}" for name in ("all", "untuned") for one in methods)])
    for samples, several in found.items():
        cells = [spread([mean(r, tasks) for r in several[one]]) for tasks in (every, untuned) for one in methods]
        lines.append(line([samples, *cells]))
    return lines


def corrupt_table(rows: Sequence[Row]) -> list[str]:
    """Averages over all tasks by what was done to the calibration pictures."""
    tasks = next(iter(groups(rows).values()))
    found: dict[str, dict[str, list[Row]]] = defaultdict(dict)
    for row in rows:
        how = "{corruption} {severity}".format(**row.point.at) if row.point.at["severity"] else "clean"
        found[how].setdefault(row.method, []).append(row)
    methods = [one for one in by_method(rows) if one not in (EXPERT, "merged")]
    lines = head(["calibration pictures", *(f"`{one}`" for one in methods)])
    for how, own in found.items():
        lines.append(line([how, *(spread([mean(row, tasks) for row in own.get(one, [])]) for one in methods)]))
    return lines


def column_file(benchmarks: Path, suite: str, samples: int) -> Path:
    """The document of one column of the overview."""
    return benchmarks / "real" / "repairs" / f"{suite.replace(', ', '-').replace(' ', '-').lower()}_{samples}.json"


def overview(benchmarks: Path, samples: int = 64) -> list[str]:
    """Experts, merged models and repairs on every suite that was measured, mean over seeds.

    Args:
        benchmarks: the folder of that name.
        samples: per task.
    """
    averages = [
        {name: one.average.mean for name, one in own.items() if one.average}
        for own in columns(benchmarks, samples).values()
    ]
    return [
        *head(["model", *columns(benchmarks, samples)]),
        *(line([name, *(overview_cell(name, own) for own in averages)]) for name in OVERVIEW),
    ]


def costs(benchmarks: Path, samples: int = 64) -> list[str]:
    """Processor seconds of one thread and MB that each repair of the overview takes."""
    found = columns(benchmarks, samples)
    lines = head(["model", *found])
    for name in REPAIRS:
        lines.append(line([name, *(cost_cell(own.get(name)) for own in found.values())]))
    return lines


def cost_cell(one: Summary | None) -> str:
    return "–" if one is None or not one.peak_bytes else f"{one.cpu:.1f} s, {one.peak_bytes / 1e6:.0f} MB"


def columns(benchmarks: Path, samples: int) -> dict[str, dict[str, Summary]]:
    """Return the measurements of every suite, by row of the overview."""
    found = {}
    for suite in SUITES:
        if (file := column_file(benchmarks, suite, samples)).exists():
            own = {one.method: one for one in read_study(file).summaries()}
            found[suite] = {name: own[model] for name, model in OVERVIEW.items() if model in own}
    return found


def overview_cell(name: str, averages: Mapping[str, float]) -> str:
    """The average of a model in %; after it, of what was repaired or trained, the share of the way from the merged
    model to the experts, and of what was repaired that to what was trained, where that was measured."""
    if name not in averages:
        return "–"
    ends = () if name not in REPAIRS else ("experts",) if name == TRAINED else ("experts", TRAINED)
    floor = averages["merged"]
    ways = ", ".join(
        f"{100 * (averages[name] - floor) / (averages[end] - floor):.0f} %" for end in ends if end in averages
    )
    return percent(averages[name]) + f" ({ways})" * bool(ways)


def answer(document: Path) -> list[str]:
    """Make the table that a page of results opens with: experts, merged models and recipes, means over seeds.

    Beside the models of `OVERVIEW` it has the best merger that needs no samples.
    """
    found = {one.method: one for one in read_study(document).summaries() if one.average}
    ways = {name: (model, model.removesuffix("@task-arithmetic")) for name, model in OVERVIEW.items()}
    names = {name: next(one for one in own if one in found) for name, own in ways.items() if found.keys() & own}
    averages = {one.method: one.average.mean for one in found.values() if one.average}
    floor, top = (averages[names[name]] for name in ("merged", "experts"))
    alone = [one.method for one in found.values() if not one.needs and "@" not in one.method]
    best = max((one for one in alone if one not in (*names.values(), "merged")), key=averages.__getitem__, default="")
    if best and averages[best] > floor:
        names[f"best merger without samples, `{best}`"] = best
    lines = head(["model", "average, %", "way from merged to experts", "worst task, %", "drift", "processor, s"])
    for name, method in names.items():
        one, share = found[method], (averages[method] - floor) / (top - floor)
        way = "–" if name in ("base", "merged", "experts") else f"{100 * share:.0f} %"
        worst = f"{percent(one.worst or 0)} ({one.worst_task})"
        lines.append(line([name, percent(averages[method]), way, worst, f"{one.drift:.2f}", f"{one.cpu:.1f}"]))
    return lines


def drift_table(file: Path) -> list[str]:
    """Relative drift of every layer and the share of the final drift that is booked to it, mean over tasks.

    Args:
        file: JSON Lines, a document of `featcal drift --attribution --json` in each.
    """
    documents = [json.loads(one) for one in file.read_text(encoding="utf-8").splitlines()]
    lines = head(["layer", *(f"`{one['model']}`, {what}" for one in documents for what in ("drift", "share, %"))])
    several = [[task["layers"] for task in one["tasks"].values()] for one in documents]
    for number, layer in enumerate(several[0][0]):
        cells = [layer["layer"]]
        for tasks in several:
            drift, share = (
                statistics.fmean(one[number][what] for one in tasks) for what in ("relative_drift", "share")
            )
            cells += [f"{drift:.2f}", f"{100 * share:.0f}"]
        lines.append(line(cells))
    return lines


NAMES = {
    "grid": grid, "few": few, "sweep": sweep, "recipes": recipes, "repairs": repairs, "starts": starts,
    "pretrained": pretrained,
}  # fmt: skip
TABLES = {
    "grid": grid_tables, "averages": averages, "tasks": task_table, "sweep": sweep_table, "budget": budget_table,
    "corrupt": corrupt_table,
}  # fmt: skip
OTHER_TABLES = {
    "overview": overview, "costs": costs, "overview_256": partial(overview, samples=256),
    "costs_256": partial(costs, samples=256), "answer": answer, "drift": drift_table,
}  # fmt: skip


def tables(part: str, document: Path) -> str:
    """One of `TABLES` of a study's document, or one of `OTHER_TABLES`, in Markdown."""
    lines = OTHER_TABLES[part](document) if part in OTHER_TABLES else TABLES[part](read_study(document).rows)
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("names", *TABLES, *OTHER_TABLES))
    parser.add_argument("of", help=f"of names: {', '.join(NAMES)}; of every table: the document")
    options = parser.parse_args()
    if options.part != "names":
        print(tables(options.part, Path(options.of)))
    elif options.of in NAMES:
        print(" ".join(f"--model {name}" for name in NAMES[options.of]()))
    else:
        parser.error(f"there are names of {', '.join(NAMES)}, not of {options.of!r}")


if __name__ == "__main__":
    main()

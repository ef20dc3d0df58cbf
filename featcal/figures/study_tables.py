"""Turn studies into data frames for the command line, pages, downloads and documents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from featcal.studies.paper import PaperTable
from featcal.studies.study import Study
from featcal.studies.summary import Spread, Summary
from featcal.studies.sweep import kind_of
from featcal.suite.methods import NEEDS
from featcal.system.formatting import percent

NOTHING = "–"
_DIGITS: Mapping[str, int] = {"drift": 2, "cosine": 2, "CPU s": 1, "MB": 0}
COLUMNS = ("method", "average", "interval", "normalised", "worst", "worst task", "drift", "cosine", "CPU s", "MB")
"""Columns of the method table, before those of the methods' needs."""


def method_table(found: Sequence[Summary]) -> pd.DataFrame:
    """Return one row per method and place in the study: scores in percent with half the width of the 95 % interval over
    seeds in points, drift and cosine, processor seconds and megabytes for making it, and a column of booleans for every
    need. NaN for missing values."""
    return pd.DataFrame(
        [{**one.at, **_cells(one), **one.beside, **_needs_by_name(one), "failure": one.failure} for one in found]
    )


def _cells(one: Summary) -> dict[str, Any]:
    return {
        "method": one.method,
        "average": _percent(None if one.average is None else one.average.mean),
        "interval": _percent(_half(one.average)),
        "seeds": len(one.seeds),
        "normalised": _percent(one.normalised),
        "worst": _percent(one.worst),
        "worst task": one.worst_task,
        "drift": _number(one.drift),
        "cosine": _number(one.cosine),
        "CPU s": _number(one.cpu),
        "wall s": _number(one.wall),
        "MB": _number(None if one.peak_bytes is None else one.peak_bytes / 1e6),
    }


def _needs_by_name(one: Summary) -> dict[str, bool]:
    return {name: name in one.needs for name in NEEDS}


def method_points(found: Sequence[Summary]) -> pd.DataFrame:
    """Return the methods with scores in the form of `run_tables.sweep_table`, with the full name of the model instead
    of a run's id; without options, and without cost for models that need no work."""
    models = [one.model for one in found]
    table = method_table(found).rename(columns={"method": "name", "average": "mean", "CPU s": "cost"})
    table = table.assign(
        run=models, model=models, kind=[*map(kind_of, models)], cost=table["cost"].where(table["cost"] > 0)
    )
    return table[table["mean"].notna()]


def across_suites(studies: Sequence[Study]) -> pd.DataFrame:
    """Return one row per method, one column per suite: mean over the suite's tasks of the score as a share of the
    expert's, in percent; NaN if a method was not measured or could not be used. The first study of a suite counts; rows
    are sorted by their mean over suites, best first."""
    columns: dict[str, dict[str, float]] = {}
    for study in studies:
        found = {one.method: _percent(one.normalised) for one in study.summaries()}
        columns.setdefault(study.suite, found)
    frame = pd.DataFrame(columns).rename_axis("method")
    order = frame.mean(axis=1).sort_values(ascending=False, kind="stable").index
    return frame.loc[order].reset_index()


def paper_table(table: PaperTable) -> pd.DataFrame:
    """Return a table of the paper as printed, with the mean of the cells, and remarks on errors."""
    rows = []
    for row in table.rows:
        cells: dict[str, Any] = {"method": row.method, **({"of": row.of} if row.of else {})}
        cells |= dict(zip(table.columns, row.values, strict=True))
        if row.average is not None:
            cells |= {"average, printed": row.average, "mean of the cells": round(row.mean or 0, 2)}
        if row.deviations:
            cells |= {f"±, {name}": one for name, one in zip(table.columns, row.deviations, strict=True)}
        rows.append({**cells, "misprint or oddity": "; ".join(row.notes)})
    return pd.DataFrame(rows)


def row_table(study: Study) -> pd.DataFrame:
    """Return one row per measured row with all its values, for CSV."""
    rows = []
    for row in study.rows:
        found, point = row.found, row.point
        cells: dict[str, Any] = {"suite": study.suite, "method": row.method, "model": point.model, "seed": point.seed}
        cells |= {**point.at, "average": row.mean}
        cells |= {f"score {task}": one.value for task, one in found.scores.items()}
        cells |= {f"n {task}": one.n for task, one in found.scores.items()}
        cells |= {f"drift {task}": value for task, value in found.drift.items()}
        cells |= {f"cosine {task}": value for task, value in found.cosine.items()}
        for stage, spent in found.seconds.items():
            cells |= {f"{stage}, CPU s": spent.cpu, f"{stage}, wall s": spent.wall}
        cells |= {
            **found.beside,
            "peak bytes": found.peak_bytes,
            "needs": ", ".join(row.needs),
            "failure": found.failure,
        }
        rows.append(cells)
    return pd.DataFrame(rows, dtype=object)  # else 64 becomes 64.0 in a column with gaps


def text_cells(found: Sequence[Summary]) -> tuple[list[list[str]], list[str]]:
    """Return cells and header of the method table as text; places of the study come first."""
    places = list(dict.fromkeys(name for one in found for name in one.at))
    beside = list(dict.fromkeys(name for one in found for name in one.beside))
    return [_text_row(one, places, beside) for one in found], [*places, *COLUMNS, *beside, "needs"]


def markdown(found: Sequence[Summary]) -> str:
    """Return the method table in Markdown, with names as code."""
    cells, header = text_cells(found)
    at = header.index("method")
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    for row in cells:
        named = [f"`{cell}`" if place == at else cell for place, cell in enumerate(row)]
        # Also within code, where tables end a cell all the same.
        lines.append("| " + " | ".join(one.replace("|", "\\|") for one in named) + " |")
    return "\n".join(lines) + "\n"


def _text_row(one: Summary, places: Sequence[str], beside: Sequence[str]) -> list[str]:
    cells, first = _cells(one), [str(one.at.get(name, "")) for name in places]
    if one.failure and one.average is None:
        return [
            *first,
            one.method,
            *[NOTHING] * (len(COLUMNS) + len(beside) - 1),
            f"cannot be used: {_one_line(one.failure)}",
        ]
    shown = [_text(name, cells[name]) for name in COLUMNS[1:]]
    shown += [f"{one.beside[name]:.3g}" if name in one.beside else NOTHING for name in beside]
    needed = ", ".join(one.needs) or "nothing"
    return [*first, one.method, *shown, needed + (f"; a seed failed: {_one_line(one.failure)}" if one.failure else "")]


def _text(column: str, value: Any) -> str:
    """Format a cell of the printed table; scores are rounded as everywhere (`formatting.percent`)."""
    if isinstance(value, str):
        return value or NOTHING
    if value != value:
        return NOTHING
    if column in _DIGITS:
        return f"{value:.{_DIGITS[column]}f}"
    return f"{'± ' if column == 'interval' else ''}{percent(value / 100)}"


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _half(found: Spread | None) -> float | None:
    return None if found is None or found.high is None else found.high - found.mean


def _percent(share: float | None) -> float:
    return float("nan") if share is None else 100 * share


def _number(value: float | None) -> float:
    return float("nan") if value is None else float(value)

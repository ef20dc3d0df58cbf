"""Measure a suite by the paper's protocol, and compare every score with the printed one.

The printed score is of one run on the whole test split. It agrees with the measured score if it lies within a 95 %
interval: the interval for the score of an equally good model on an independent test set of the same size, made from
other calibration samples. Its two parts are added in squares: Wilson's interval of the share of right answers (for a
rank correlation, Fisher's z with Fieller's factor 1.06), and Student's t for one more run besides those over seeds.
Both runs score the same samples, so agreement on one task is easy; the interval of the average over tasks is narrow.
The first part is needed because some rows have no spread over seeds: the paper prints the scores of the base and of the
experts up to three times, and these differ by up to one standard error of Wilson's kind. Two seeds give no interval:
Student's t multiplies their spread by 12.7, so nearly every score would agree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import NormalDist, stdev
from typing import Any

from featcal.evaluation.comparison import LEVEL
from featcal.session.session import Session
from featcal.studies.history import TaskValue
from featcal.studies.paper import PrintedRow, PrintedScores
from featcal.studies.plan import StudyPlan
from featcal.studies.runner import Row
from featcal.studies.study import Study, study_of
from featcal.studies.summary import student_bound
from featcal.suite.schema import load_suite
from featcal.system.errors import InputError
from featcal.system.formatting import percent

FEWEST_SEEDS = 3
"""Number of seeds from which on their spread gives an interval; a single seed counts without a spread."""
SAMPLES = 256
"""Calibration samples per task of the paper (Sec. 5.1)."""
AVERAGE = "average"
_HALF_DIGIT = 0.0005
"""Largest rounding error of a printed score, which has tenths of a percent."""
_Z = NormalDist().inv_cdf((1 + LEVEL) / 2)
RANKS = "spearman"
"""The metric that is a correlation; others are shares of right answers."""
_FIELLER = 1.06
"""Variance of Fisher's z of a rank correlation, times n - 3."""


@dataclass(frozen=True)
class TableCell:
    """One score of a table, measured and printed, 0-1."""

    method: str
    """The row, in the paper's words."""
    model: str
    task: str
    """Name of the task; "average" for the mean over tasks."""
    printed: float | None
    """None if the paper has no number."""
    measured: float | None = None
    """Mean over seeds; None if it was not measured."""
    low: float | None = None
    """Ends of the 95 % interval in which the printed score should lie; None with two seeds."""
    high: float | None = None

    @property
    def agrees(self) -> bool | None:
        """Say whether the printed score lies within the interval, up to its rounding; None if one of them is
        missing."""
        if self.printed is None or self.low is None or self.high is None:
            return None
        return self.low - _HALF_DIGIT <= self.printed <= self.high + _HALF_DIGIT

    @property
    def verdict(self) -> str:
        """Return "agrees", the difference, or "" if there is nothing to compare."""
        if self.agrees is None or self.printed is None or self.measured is None:
            return ""
        return "agrees" if self.agrees else f"differs by {percent(abs(self.measured - self.printed))} points"

    def to_json(self) -> dict[str, Any]:
        """Return one entry of `cells` in the document."""
        return {**asdict(self), "agrees": self.agrees}


@dataclass(frozen=True)
class Reproduction:
    """A measured suite beside its table of the paper."""

    study: Study
    printed: PrintedScores
    departures: tuple[str, ...]
    """Sentences on departures from the paper's protocol."""
    cells: tuple[TableCell, ...]
    """Row by row as in the paper, the average first."""
    missing: tuple[str, ...]
    """Sentences on rows that were not measured, with reasons."""

    def to_json(self) -> dict[str, Any]:
        """Return the public document of the command."""
        return {
            **self.study.to_json(),
            "table": self.printed.table.name,
            "departures": list(self.departures),
            "missing": list(self.missing),
            "cells": [one.to_json() for one in self.cells],
        }

    def summary(self) -> str:
        """Return a sentence with the number of scores that agree."""
        judged = [one for one in self.cells if one.agrees is not None]
        averages = [one for one in judged if one.task == AVERAGE]
        return (
            f"{sum(bool(one.agrees) for one in judged)} of {len(judged)} scores agree with the printed ones, "
            f"{sum(bool(one.agrees) for one in averages)} of {len(averages)} averages among them."
        )


def table_models(printed: PrintedScores) -> list[str]:
    """Return the names of the models of a table's rows that can be made."""
    return [one.model for one in printed.rows if one.model]


def reproduce(session: Session, plan: StudyPlan, printed: PrintedScores) -> Reproduction:
    """Measure the models of a table's rows, and compare each score with the printed one.

    Args:
        plan: its methods are some of `table_models(printed)`.

    Raises:
        InputError: the suite's tasks are not the table's, or a method is not one of its rows.
    """
    if tuple(session.tasks) != printed.table.tasks:
        raise InputError(
            f"{printed.table.name} has the tasks {', '.join(printed.table.tasks)}; the suite has "
            f"{', '.join(session.tasks)}"
        )
    if unknown := [name for name in plan.methods if name not in table_models(printed)]:
        raise InputError(
            f"{printed.table.name} has no row of model '{unknown[0]}'; it has {', '.join(table_models(printed))}"
        )
    study = study_of("paper", session, plan.on, plan.run(session, plan.points()))
    of_model = {name: [row for row in study.rows if row.method == name] for name in plan.methods}
    wanted = [one for one in printed.rows if one.model in of_model]
    cells = [cell for one in wanted for cell in _cells(one, of_model[one.model], printed.table.tasks)]
    measured = [one for one in wanted if any(row.found.scores for row in of_model[one.model])]
    return Reproduction(
        study, printed, tuple(_departures(session, plan, measured)), tuple(cells), tuple(_missing(printed, of_model))
    )


def _missing(printed: PrintedScores, of_model: dict[str, list[Row]]) -> list[str]:
    sentences = []
    for one in printed.rows:
        failures = [row.found.failure for row in of_model.get(one.model, ()) if row.found.failure]
        if not one.model:
            sentences.append(f"{one.row.method}: there is no published model of it")
        elif failures:
            sentences.append(f"{one.row.method} ({one.model}): {failures[0]}")
    return sentences


def _departures(session: Session, plan: StudyPlan, rows: Sequence[PrintedRow]) -> list[str]:
    suite, view = session.family.suite, plan.on.scores
    found = []
    if suite.model_dump() != load_suite(suite.name).model_dump():
        found.append("the suite file is not the one of this name that comes with featcal")
    if plan.samples != SAMPLES:
        found.append(f"{plan.samples} calibration samples per task, in the paper {SAMPLES}")
    if view.samples is not None:
        found.append(f"scored on {view.samples} samples per task, in the paper on all")
    if view.split not in (None, "test"):
        found.append(f"scored on the {view.split} split, in the paper on the test split")
    if 1 < len(plan.seeds) < FEWEST_SEEDS:
        found.append(
            f"{len(plan.seeds)} calibration seeds are too few for an interval and a verdict where samples are drawn; "
            f"give one, or {FEWEST_SEEDS} and more"
        )
    return [*found, *dict.fromkeys(text for one in rows for text in one.differences)]


def _cells(printed: PrintedRow, rows: Sequence[Row], tasks: Sequence[str]) -> list[TableCell]:
    """Return the average and the score of every task."""
    row, done = printed.row, [one for one in rows if one.found.scores]
    values = {AVERAGE: row.average, **{task: printed.score(column) for column, task in enumerate(tasks)}}
    empty = {
        task: TableCell(row.method, printed.model, task, None if value is None else value / 100)
        for task, value in values.items()
    }
    if not done:
        return [*empty.values()]
    scores = {task: [one.found.scores[task] for one in done] for task in tasks}
    sides = {task: _sides_by_samples(own) for task, own in scores.items()}
    runs = {AVERAGE: [one.mean for one in done], **{task: [one.value for one in own] for task, own in scores.items()}}
    # Tasks have samples of their own, so the squares of what their averages are off add up.
    below, above = (math.hypot(*side) / len(tasks) for side in zip(*sides.values(), strict=True))
    sides[AVERAGE] = below, above
    least = {task: -1.0 if own[0].metric == RANKS else 0.0 for task, own in scores.items()}
    least[AVERAGE] = sum(least.values()) / len(tasks)
    return [_measure(cell, runs[task], sides[task], least[task]) for task, cell in empty.items()]


def _measure(cell: TableCell, runs: Sequence[float], sides: tuple[float, float], least: float) -> TableCell:
    """Return the cell with the mean over runs and the interval for one more run, if that can be computed."""
    mean = sum(runs) / len(runs)
    if 1 < len(runs) < FEWEST_SEEDS:
        return replace(cell, measured=mean)
    drawn = 0.0
    if len(runs) > 1:
        drawn = student_bound(LEVEL, len(runs) - 1) * stdev(runs) * math.sqrt(1 + 1 / len(runs))
    low, high = mean - math.hypot(sides[0], drawn), mean + math.hypot(sides[1], drawn)
    return replace(cell, measured=mean, low=max(least, low), high=min(1.0, high))


def _sides_by_samples(scores: Sequence[TaskValue]) -> tuple[float, float]:
    """Return the distances from the mean of some runs on the same samples to the ends of the interval by test
    samples."""
    metric, count = scores[0].metric, scores[0].n
    mean = sum(one.value for one in scores) / len(scores)
    low, high = (correlation_interval if metric == RANKS else share_interval)(mean, count)
    return mean - low, high - mean


def share_interval(share: float, count: int) -> tuple[float, float]:
    """Return the 95 % interval of a share of right answers (Wilson's).

    >>> [round(end, 4) for end in share_interval(0.8, 100)]
    [0.7112, 0.8666]
    """
    scale = 1 + _Z**2 / count
    middle = (share + _Z**2 / (2 * count)) / scale
    half = _Z * math.sqrt(share * (1 - share) / count + _Z**2 / (4 * count**2)) / scale
    return middle - half, middle + half


def correlation_interval(value: float, count: int) -> tuple[float, float]:
    """Return the 95 % interval of a rank correlation (Fisher's z); for three samples and fewer it is everything.

    >>> [round(end, 4) for end in correlation_interval(0.8, 100)]
    [0.7132, 0.8626]
    """
    if count <= 3:
        return -1.0, 1.0
    if abs(value) >= 1:
        return value, value
    half = _Z * math.sqrt(_FIELLER / (count - 3))
    return math.tanh(math.atanh(value) - half), math.tanh(math.atanh(value) + half)

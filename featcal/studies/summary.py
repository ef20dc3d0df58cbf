"""Summarise the rows of all seeds of a method."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

from featcal.evaluation.comparison import LEVEL
from featcal.studies.runner import Row
from featcal.suite.methods import EXPERT


@dataclass(frozen=True)
class Spread:
    """A mean over seeds with its interval."""

    mean: float
    low: float | None
    """Ends of the 95 % interval of the mean, by Student's t over seeds; None for a single seed."""
    high: float | None


@dataclass(frozen=True)
class Summary:
    """One method at one place of a study; numbers are means over seeds."""

    method: str
    model: str
    """The full name of the model, of the first seed."""
    at: Mapping[str, str | int | float]
    seeds: tuple[int, ...]
    """Seeds of the rows that did not fail; empty if the method uses no seed."""
    average: Spread | None
    """Unweighted mean score over tasks, 0-1; None without scores."""
    normalised: float | None
    """Mean over tasks of the score as a share of the expert's; None if an expert has no score above 0."""
    worst: float | None
    """Lowest score of a task, of the means over seeds."""
    worst_task: str
    tasks: Mapping[str, float]
    """Mean score over seeds, by task."""
    drift: float | None
    cosine: float | None
    cpu: float | None
    """Seconds of the processor for making the model."""
    wall: float | None
    peak_bytes: int | None
    """Largest peak of all seeds."""
    needs: tuple[str, ...]
    beside: Mapping[str, float]
    """Further measurements of this study."""
    failure: str
    """Reason why there is no result, or less than requested."""

    def to_json(self) -> dict[str, Any]:
        """Return one entry of `methods` in the document of a study."""
        return {**asdict(self), "seeds": list(self.seeds), "needs": list(self.needs)}


def summaries(rows: Sequence[Row]) -> list[Summary]:
    """Return one summary per method and place, in their first order; scores are compared with the experts of the same
    place."""
    groups: dict[tuple[str, tuple[tuple[str, Any], ...]], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.method, tuple(row.point.at.items())), []).append(row)
    experts = {place: _tasks(of) for (method, place), of in groups.items() if method == EXPERT}
    # Experts do not depend on corruption or samples, so a study may measure them in one place alone.
    anywhere = next(iter(experts.values()), {})
    return [_summary(of, experts.get(place, anywhere)) for (_, place), of in groups.items()]


def mean_and_interval(values: Sequence[float]) -> Spread:
    """Return the mean of some values and its 95 % interval, by Student's t.

    >>> found = mean_and_interval([0.81, 0.82, 0.83])
    >>> round(found.mean, 3), round(found.low, 3), round(found.high, 3)
    (0.82, 0.795, 0.845)
    """
    count = len(values)
    mean = sum(values) / count
    if count < 2:
        return Spread(mean, None, None)
    deviation = math.sqrt(sum((one - mean) ** 2 for one in values) / (count - 1))
    half = student_bound(LEVEL, count - 1) * deviation / math.sqrt(count)
    return Spread(mean, mean - half, mean + half)


@cache
def student_bound(level: float, freedom: int) -> float:
    """Return the bound that Student's t stays within with this probability, 0-1, on both sides of 0.

    Args:
        freedom: degrees of freedom, at least 1: then the probability of a bound is a sum of finitely many terms in its
            angle, arctan(bound / sqrt(freedom)) (Abramowitz and Stegun, 26.7.3 and 26.7.4).

    >>> round(student_bound(0.95, 2), 4)
    4.3027
    """
    low, high = 0.0, math.pi / 2
    while low < (angle := (low + high) / 2) < high:
        low, high = (angle, high) if _student_share(angle, freedom) < level else (low, angle)
    return math.sqrt(freedom) * math.tan(angle)


def _student_share(angle: float, freedom: int) -> float:
    """Return the probability that Student's t lies within the bound of an angle."""
    odd = freedom % 2
    term = math.cos(angle) if odd else 1.0
    total = term if freedom > 1 else 0.0
    for power in range(2 + odd, freedom - 1, 2):
        term *= (power - 1) / power * math.cos(angle) ** 2
        total += term
    return 2 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total


def _summary(rows: Sequence[Row], expert: Mapping[str, float]) -> Summary:
    first, done = rows[0], [row for row in rows if not row.found.failure]
    tasks = _tasks(done)
    worst = min(tasks, key=lambda task: tasks[task], default="")
    making = [row.found.seconds["make"] for row in done]
    peaks = [row.found.peak_bytes for row in done if row.found.peak_bytes is not None]
    names = done[0].found.beside if done else ()
    # A share of a score of 0, or of none, is not a number.
    whole = bool(tasks) and all(expert.get(task, 0) > 0 for task in tasks)
    return Summary(
        method=first.method,
        model=first.point.model,
        at=first.point.at,
        seeds=tuple(row.point.seed for row in done if row.point.seed is not None),
        average=mean_and_interval([row.mean for row in done]) if tasks else None,
        normalised=sum(tasks[task] / expert[task] for task in tasks) / len(tasks) if whole else None,
        worst=tasks[worst] if tasks else None,
        worst_task=worst,
        tasks=tasks,
        drift=_mean_or_none([_task_mean(row.found.drift) for row in done]),
        cosine=_mean_or_none([_task_mean(row.found.cosine) for row in done]),
        cpu=_mean_or_none([one.cpu for one in making]),
        wall=_mean_or_none([one.wall for one in making]),
        peak_bytes=max(peaks, default=None),
        needs=first.needs,
        beside={name: _mean([row.found.beside[name] for row in done]) for name in names},
        failure=next((row.found.failure for row in rows if row.found.failure), ""),
    )


def _tasks(rows: Sequence[Row]) -> dict[str, float]:
    """Return the mean score over seeds by task."""
    scored = [row.found.scores for row in rows if row.found.scores]
    return {task: sum(one[task].value for one in scored) / len(scored) for task in (scored[0] if scored else ())}


def _task_mean(values: Mapping[str, float]) -> float:
    return _mean([*values.values()])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _mean_or_none(values: Sequence[float]) -> float | None:
    return _mean(values) if values else None

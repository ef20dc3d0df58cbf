"""The method table of a suite: every method on the same samples, with what it costs and what it needs."""

from __future__ import annotations

from collections.abc import Sequence

from featcal.calibration.calibrate import config_for
from featcal.errors import InputError
from featcal.progress import Progress, silent
from featcal.runs import History
from featcal.session import Session
from featcal.studies.names import ALL, drawn, everything
from featcal.studies.rows import Rows
from featcal.studies.runner import EXPERT, Point, Views, run
from featcal.studies.study import Study, study_of
from featcal.views import View

SEEDS = (42, 43, 44)
SAMPLES = 64


def compare_methods(
    session: Session,
    methods: Sequence[str] = (ALL,),
    *,
    seeds: Sequence[int] = SEEDS,
    samples: int = SAMPLES,
    on: Views = Views(),  # noqa: B008 - a tuple
    rows: Rows | None = None,
    progress: Progress = silent,
) -> Study:
    """Measure methods by their names, experts beside them.

    Args:
        methods: names of models; "all" stands for every method at its defaults. What a name does not say of samples
            and seed is `samples` and each of `seeds`; a method that draws nothing is measured once.
        rows: where finished rows are kept and found again; left out, in the user's cache folder.

    Raises:
        InputError: a name that cannot be read.
    """
    asked = [name for one in methods for name in (every_method(session) if one == ALL else [one])]
    named = list(dict.fromkeys([EXPERT, *asked]))
    points = [point for name in named for point in points_of(name, samples, seeds)]
    found = run(session, points, on, rows=rows, history=History(), progress=progress)
    return study_of("compare", session, on, found)


def every_method(session: Session) -> list[str]:
    """Names of all methods at their defaults for a suite."""
    return everything(config_for(session.family).rho)


def points_of(method: str, samples: int, seeds: Sequence[int]) -> list[Point]:
    """A method with every seed; one point where no seed has a part in it.

    Raises:
        InputError: no seed, or a name that cannot be read.
    """
    if not seeds:
        raise InputError("seeds: give at least one")
    if drawn(method, samples, 0) == drawn(method, samples, 1):
        return [Point(method, drawn(method, samples, 0))]
    return [Point(method, drawn(method, samples, seed), seed) for seed in seeds]


def views(samples: int | None, split: str = "test") -> Views:
    """Scores on so many samples of a split (None: all), features where a suite measures them.

    >>> views(None).scores.split
    'test'
    """
    return Views(View(samples, split), View())

"""Define the inputs of every study: methods, seeds and samples, and where rows are stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from featcal.session.session import Session
from featcal.studies.method_lists import with_samples
from featcal.studies.runner import Point, Row, Views, run
from featcal.studies.store import Rows
from featcal.suite.views import EvaluationSamples
from featcal.system.errors import InputError
from featcal.system.progress import Progress, silent

SEEDS = (42, 43, 44)
SAMPLES = 64


@dataclass(frozen=True)
class StudyPlan:
    """A plan of a study.

    Args:
        methods: names of models; names without samples or seed get `samples` and each of `seeds`; repeated seeds count
            once.
        on: the samples to measure on.
        rows: store of finished rows; by default in the user's cache folder.
        progress: called with the number of finished rows.

    Raises:
        InputError: no method, no seed, or samples below 1.
    """

    methods: Sequence[str]
    seeds: Sequence[int] = SEEDS
    samples: int = SAMPLES
    on: Views = Views()  # noqa: RUF009 - a tuple
    rows: Rows | None = None
    progress: Progress = silent

    def __post_init__(self) -> None:
        if not self.methods:
            raise InputError("methods: name at least one model")
        if not self.seeds:
            raise InputError("seeds: give at least one")
        if self.samples < 1:
            raise InputError(f"samples is {self.samples}; at least one is needed")
        # A seed that is said twice is no second measurement, and would make an interval of none.
        object.__setattr__(self, "seeds", tuple(dict.fromkeys(self.seeds)))

    def points(self, methods: Sequence[str] | None = None, samples: int | None = None) -> list[Point]:
        """Return methods with every seed; a single point for a method without a seed.

        Args:
            methods, samples: replace the plan's own.

        Raises:
            InputError: an invalid name.
        """
        count = self.samples if samples is None else samples
        named = list(dict.fromkeys(self.methods if methods is None else methods))
        return [point for name in named for point in points_of(name, count, self.seeds)]

    def run(self, session: Session, points: Sequence[Point]) -> list[Row]:
        """Measure points on a suite."""
        return run(session, points, self.on, rows=self.rows, progress=self.progress)


def points_of(method: str, samples: int, seeds: Sequence[int]) -> list[Point]:
    """Return a method with every seed; a single point if it uses no seed.

    Raises:
        InputError: an invalid name.
    """
    # A name that a seed does not change stands for one model, which is not measured three times.
    if with_samples(method, samples, 0) == with_samples(method, samples, 1):
        return [Point(method, with_samples(method, samples, 0))]
    return [Point(method, with_samples(method, samples, seed), seed) for seed in seeds]


def views(samples: int | None, split: str = "test") -> Views:
    """Return views: scores on so many samples of a split (None: all), features on the suite's split for measurements.

    >>> views(None).scores.split
    'test'
    """
    return Views(EvaluationSamples(samples, split), EvaluationSamples())

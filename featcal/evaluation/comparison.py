"""Compare two models on the same samples: the difference, its uncertainty, and the answers that changed.

The samples of a split are one draw of many possible ones. The bootstrap redraws them, with replacement and within each
task, and measures the spread of the difference of the two scores; both models are scored on the same draw, so their
common variation cancels (Efron and Tibshirani, An Introduction to the Bootstrap, ch. 13). McNemar's test asks whether
the answers that changed, changed in one direction (McNemar 1947; here its exact form).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from featcal.evaluation.ranks import centred_ranks, correlate
from featcal.system.drawing import Drawable
from featcal.system.errors import InputError

if TYPE_CHECKING:  # tables know the words below before torch is there
    import pandas as pd
    from torch import Tensor

    from featcal.evaluation.evaluate import Scores, TaskScore

Array = NDArray[np.float64]
DRAWS, SEED, LEVEL = 5_000, 42, 0.95
CHUNK = 2**17
"""Samples that are drawn at a time if a score is not a sum over samples."""
FIXED, BROKEN, BOTH_RIGHT, BOTH_WRONG = "fixed", "broken", "both right", "both wrong"
FLIPS = (FIXED, BROKEN, BOTH_RIGHT, BOTH_WRONG)
"""Kinds of change from the answer of model A to that of model B."""


@dataclass(frozen=True)
class Counts:
    """Samples, counted by how the answer changed from A to B."""

    fixed: int
    """Wrong with A, right with B."""
    broken: int
    """Right with A, wrong with B."""
    both_right: int
    both_wrong: int

    @property
    def mcnemar(self) -> float:
        """Return the two-sided p of the exact McNemar test, 0-1: how often a fair coin, thrown once for every answer
        that changed, falls at least as unevenly. 1 where none changed."""
        turned, ways, uneven = self.fixed + self.broken, 1, 0
        for heads in range(min(self.fixed, self.broken) + 1):
            uneven += ways
            ways = ways * (turned - heads) // (heads + 1)
        return min(1.0, 2 * uneven / (1 << turned))


@dataclass(frozen=True)
class Difference:
    """Score of B minus score of A, on one task or averaged over tasks; scores are those of the metric, 0-1 or, for a
    correlation, -1 to 1."""

    metric: str
    """ "" for the average over tasks."""
    n: int
    a: float
    b: float
    low: float
    """2.5th percentile of the difference over bootstrap draws."""
    high: float
    """97.5th percentile."""
    counts: Counts | None
    """None if a metric judges no single answers (a rank correlation, or an average that includes one): then there is no
    McNemar test either, and only the interval tells what is noise."""

    @property
    def difference(self) -> float:
        return self.b - self.a

    @property
    def p(self) -> float | None:
        """Return the p of the exact McNemar test; for an average, over the samples of all tasks together."""
        return None if self.counts is None else self.counts.mcnemar

    @property
    def is_within_noise(self) -> bool:
        """Say whether chance explains the difference: the interval holds 0, or McNemar's p is above 0.05.

        If few answers changed, the interval alone is too narrow: with 4 fixed and none broken it excludes 0, while a
        coin falls as unevenly once in 8 times.
        """
        return self.low <= 0 <= self.high or (self.p is not None and self.p > 1 - LEVEL)

    def to_json(self) -> dict[str, Any]:
        """Return scores, their difference with its interval, the test and the counts; missing values are null."""
        counts = self.counts
        document: dict[str, Any] = {"metric": self.metric} if self.metric else {}
        document |= {"n": self.n, "a": self.a, "b": self.b, "difference": self.difference, "low": self.low}
        document |= {"high": self.high, "p": self.p, "within_noise": self.is_within_noise}
        return document | {
            name: None if counts is None else getattr(counts, name)
            for name in ("fixed", "broken", "both_right", "both_wrong")
        }


@dataclass(frozen=True, repr=False)
class Comparison(Drawable):
    """Differences of two models of a suite on the same samples of every task.

    >>> import featcal
    >>> on = featcal.EvaluationSamples(64, "test")
    >>> found = featcal.compare(featcal.load_suite("lm-mini"), "base", "merged", on=on)
    >>> round(found.average.a, 2), round(found.average.b, 2), found.average.is_within_noise
    (0.47, 0.58, False)
    >>> found.tasks["sentiment"].counts
    Counts(fixed=13, broken=5, both_right=40, both_wrong=6)
    """

    suite: str
    split: str
    a: str
    b: str
    """Name of the second model, as `a` is of the first."""
    draws: int
    seed: int
    tasks: Mapping[str, Difference]
    average: Difference
    """Difference of the unweighted means over tasks; draws are made within each task."""
    notes: tuple[str, ...] = field(default=(), repr=False)
    """Remarks on the samples, from the scores."""

    def to_json(self) -> dict[str, Any]:
        """Return the public document of `featcal compare --json`."""
        head = {name: getattr(self, name) for name in ("suite", "split", "a", "b", "draws", "seed")}
        tasks = {task: one.to_json() for task, one in self.tasks.items()}
        return head | {"level": LEVEL, "tasks": tasks, "average": self.average.to_json()}

    def to_frame(self) -> pd.DataFrame:
        """Return one row per task and, last, one for the average, with every number of the document."""
        import pandas as pd

        rows = {**self.tasks, "average": self.average}
        return pd.DataFrame([{"task": task, "metric": "", **one.to_json()} for task, one in rows.items()])


@dataclass(frozen=True)
class _Pair:
    """Scores of both models on the same samples of one task."""

    task: str
    a: TaskScore
    b: TaskScore

    @cached_property
    def turns(self) -> NDArray[np.int64] | None:
        """Return `[n]`: 1 fixed, -1 broken, 0 neither; None if the metric judges no single answers."""
        before, after = self.a.right, self.b.right
        return None if before is None or after is None else after.long().numpy() - before.long().numpy()

    def counts(self) -> Counts | None:
        before, after = self.a.right, self.b.right
        if before is None or after is None:
            return None
        found = flips(before.tolist(), after.tolist())
        return Counts(*(found.count(one) for one in FLIPS))

    def draw_differences(self, draws: int, seed: int) -> Array:
        """Return `[draws]` differences of the score, on redrawn samples; seed and task determine the draws."""
        rng = generator(seed, self.task)
        if self.turns is not None:
            return drawn_means(self.turns, draws, rng)
        from featcal.evaluation.language import to_number

        numbers = [np.array([to_number(str(text)) for text in one.predictions]) for one in (self.a, self.b)]
        return drawn_correlations(numbers[0], numbers[1], np.array([float(text) for text in self.a.labels]), draws, rng)


def flips(before: Sequence[bool], after: Sequence[bool]) -> list[str]:
    """Return one of `FLIPS` for every sample: `before` says whether model A was right, `after` whether model B is.

    >>> flips([False, True, True, False], [True, False, True, False])
    ['fixed', 'broken', 'both right', 'both wrong']
    """
    named = {(False, True): FIXED, (True, False): BROKEN, (True, True): BOTH_RIGHT, (False, False): BOTH_WRONG}
    return [named[bool(was), bool(now)] for was, now in zip(before, after, strict=True)]


def compare_scores(a: Scores, b: Scores, draws: int = DRAWS, seed: int = SEED) -> Comparison:
    """Compare B with A, for every task and the average over tasks.

    Args:
        draws: bootstrap draws, at least 1; with 5,000 draws the ends of an interval are exact to about 1 % of its
            width.

    Raises:
        InputError: the scores are not of the same samples, or are of different metrics.
    """
    if draws < 1:
        raise InputError(f"draws is at least 1, not {draws}")
    if (a.suite, a.split, set(a.tasks)) != (b.suite, b.split, set(b.tasks)):
        raise InputError(f"{a.model} and {b.model} were not scored on the same tasks of one split; score both again")
    for task in a.tasks:
        check_same(f"task '{task}'", a.tasks[task], b.tasks[task])
    pairs = [_Pair(task, a.tasks[task], b.tasks[task]) for task in a.tasks]
    spreads = {pair.task: pair.draw_differences(draws, seed) for pair in pairs}
    tasks = {}
    for pair in pairs:
        low, high = interval(spreads[pair.task])
        tasks[pair.task] = Difference(pair.a.metric, pair.a.n, pair.a.value, pair.b.value, low, high, pair.counts())
    # Draw i of every task makes draw i of the average; tasks are drawn independently of each other.
    low, high = interval(np.mean(list(spreads.values()), axis=0))
    total = sum(one.n for one in tasks.values())
    average = Difference(
        "", total, a.average, b.average, low, high, _sum_counts([one.counts for one in tasks.values()])
    )
    notes = tuple(dict.fromkeys([*a.notes, *b.notes]))
    return Comparison(a.suite, a.split, a.model, b.model, draws, seed, tasks, average, notes)


def check_same(where: str, a: TaskScore, b: TaskScore) -> None:
    """Raise InputError unless two scores have the same samples and the same metric."""
    if a.metric != b.metric:
        raise InputError(f"{where}: scored by {a.metric} and by {b.metric}, which cannot be compared sample by sample")
    if _to_list(a.labels) != _to_list(b.labels):
        raise InputError(
            f"{where}: the scores are of different samples; score both on the same split, samples and seed"
        )


def drawn_means(turned: NDArray[np.int64], draws: int, rng: np.random.Generator) -> Array:
    """Draw `[draws]` means of n values, drawn with replacement from `turned` `[n]`, each -1, 0 or 1."""
    n, changed = len(turned), turned[turned != 0]
    if not len(changed):
        return np.zeros(draws)
    # Kinds are counted from that of the first change, so models that change places give the same draws, negated.
    first = changed[0]
    alike = int((changed == first).sum())
    kinds = np.array([alike, len(changed) - alike, n - len(changed)])
    # How often values of one kind are drawn is multinomial, so no sample need be drawn one by one.
    drawn = rng.multinomial(n, kinds / n, size=draws)
    means: Array = first * (drawn[:, 0] - drawn[:, 1]) / n
    return means


def drawn_correlations(a: Array, b: Array, right: Array, draws: int, rng: np.random.Generator) -> Array:
    """Draw `[draws]` differences of two Spearman correlations with `right`, of n samples drawn with replacement.

    If all values of a draw are equal its correlation is 0, as everywhere here: a constant carries no order.
    """
    n, parts = len(right), []
    step = max(1, CHUNK // n)
    for start in range(0, draws, step):
        count = min(step, draws - start)
        picked = rng.integers(n, size=(count, n)) + n * np.arange(count)[:, None]
        times = np.bincount(picked.ravel(), minlength=count * n).reshape(count, n)
        centred = [centred_ranks(values, times) for values in (a, b, right)]
        parts.append(correlate(centred[1], centred[2], times) - correlate(centred[0], centred[2], times))
    return np.concatenate(parts)


def generator(seed: int, task: str) -> np.random.Generator:
    """Make the random generator that redraws the samples of a task."""
    # A hash, not `hash()`: Python's differs from process to process.
    digest = hashlib.sha256(f"{seed}:{task}".encode()).digest()
    return np.random.default_rng(int.from_bytes(digest[:8], "little"))


def drawn_changes(change: Array, draws: int, rng: np.random.Generator) -> Array:
    """Draw `[draws]` means of `change` `[n]` over n samples drawn with replacement."""
    n, parts = len(change), []
    step = max(1, CHUNK // n)
    for start in range(0, draws, step):
        picked = rng.integers(n, size=(min(step, draws - start), n))
        parts.append(change[picked].mean(1))
    return np.concatenate(parts)


def interval(spread: Array) -> tuple[float, float]:
    """Return the 2.5th and the 97.5th percentile of the draws."""
    low, high = np.quantile(spread, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return round(float(low), 12), round(float(high), 12)  # sums of fractions that make 0 are to be exactly 0


def _sum_counts(counts: list[Counts | None]) -> Counts | None:
    known = [one for one in counts if one is not None]
    if len(known) < len(counts):
        return None
    return Counts(*(sum(getattr(one, name) for one in known) for name in Counts.__dataclass_fields__))


def _to_list(labels: Tensor | tuple[str, ...]) -> list[int | str]:
    return list(labels) if isinstance(labels, tuple) else labels.tolist()

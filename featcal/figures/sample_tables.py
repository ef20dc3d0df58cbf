"""Combine the samples of a task and the models' measurements in one data frame: flips, answers, margins, drift."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from featcal.evaluation.comparison import BOTH_RIGHT, BOTH_WRONG, BROKEN, FIXED, FLIPS, flips
from featcal.figures.names import plain
from featcal.system.formatting import points

if TYPE_CHECKING:  # the first chart is drawn before torch is there
    from torch import Tensor

    from featcal.drift.ledger import TaskDrift, TaskFeatures
    from featcal.evaluation.comparison import Comparison, Difference
    from featcal.evaluation.evaluate import TaskScore
    from featcal.samples.sources import Samples

SHOWN = {"flipped": FLIPS[:2], "fixed": FLIPS[:1], "broken": FLIPS[1:2], "unchanged": FLIPS[2:], "all": FLIPS}
"""Choices of samples in a table → the kinds of flips that they show."""
UNITS = (
    "margin: score of a model's first answer above its second; drift: norm of the difference to the expert's final "
    "feature; cosine: to that feature; score change: largest of the differences to the expert's scores"
)
"""Units of the columns of `sample_table`."""


@dataclass(frozen=True)
class PerSample:
    """Answers and features of one model on every sample of one task, in the order of its view; None if not measured or
    not defined."""

    answers: tuple[str, ...] | None = None
    """Name of the class, or the whole generated answer."""
    right: tuple[bool, ...] | None = None
    margin: NDArray[np.floating] | None = None
    """`[n]`, at least 0: lead of its first over its second class or first token (mu of Eq. 44)."""
    drift: NDArray[np.floating] | None = None
    """`[n]`: norm of final feature minus the expert's (Eq. 2)."""
    cosine: NDArray[np.floating] | None = None
    """`[n]`, -1 to 1: to the expert's final feature."""
    score_change: NDArray[np.floating] | None = None
    """`[n]`: largest change of a score from the expert's."""
    certified: NDArray[np.bool_] | None = None
    """`[n]`: the expert's margin proves that this model has the same decision (Eq. 44)."""
    agrees: NDArray[np.bool_] | None = None
    """`[n]`: it has the expert's decision."""

    def with_scores(self, data: Samples, score: TaskScore) -> PerSample:
        """Return a copy of the samples' data with answers and their correctness; of first
        tokens only the correctness is shown.
        """
        right = None if score.right is None else tuple(score.right.tolist())
        answers = None if score.metric == "first_token" else _words(data, score.predictions)
        return replace(self, answers=answers, right=right)

    def with_features(self, found: TaskFeatures) -> PerSample:
        """Return a copy of the samples' data with drift and cosine of final features."""
        return replace(self, drift=found.layers[-1].drift.numpy(), cosine=found.cosine.numpy())


def expert_samples(data: Samples, found: TaskDrift) -> PerSample:
    """Return a ledger's values of the expert: margins, and answers that are classes, if scores were measured."""
    output = found.output
    if output is None:
        return PerSample()
    return PerSample(answers=_decide(data, output.expert_scores), margin=output.margin.numpy())


def model_samples(data: Samples, found: TaskDrift) -> PerSample:
    """Return a ledger's values of its model: drift, and with scores also answers, margins, certificates."""
    one, output = PerSample().with_features(found), found.output
    if output is None:
        return one
    change = (output.model_scores - output.expert_scores).abs().amax(1)
    return replace(
        one,
        answers=_decide(data, output.model_scores),
        right=tuple(output.correct.tolist()),
        margin=output.model_margin.numpy(),
        score_change=change.numpy(),
        certified=output.is_certified.numpy(),
        agrees=output.agrees.numpy(),
    )


def sample_table(data: Samples, models: Mapping[str, PerSample], a: str = "", b: str = "") -> pd.DataFrame:
    """Return one row per sample: its number in the view, position in the source, flip from `a` to `b` where both are
    scored, right answer and every model's answer (or, where answers were not measured, whether it is right) side by
    side, then model by model margin, drift, cosine, score change, certificate and agreement, and last the text.

    Args:
        models: by the names that columns get; `a` and `b` are two of them.
    """
    columns: dict[str, Sequence[object]] = {"sample": range(len(data)), "index": data.indices}
    before, after = (models[name].right if name in models else None for name in (a, b))
    if before is not None and after is not None:
        columns["flip"] = flips(before, after)
    answers = answer_column(data)
    if answers is not None:
        columns["right"] = answers
    answered: dict[str, Any] = {}
    measured: dict[str, Any] = {}
    for name, one in models.items():
        answered |= {name: one.answers, f"{name} right": one.right if one.answers is None else None}
        numbers: dict[str, Any] = {
            "margin": one.margin,
            "drift": one.drift,
            "cosine": one.cosine,
            "score change": one.score_change,
        }
        numbers |= {"certified": one.certified, "agrees": one.agrees}
        measured |= {f"{name} {what}": values for what, values in numbers.items()}
    columns |= {name: values for name, values in (answered | measured).items() if values is not None}
    if data.texts is not None:
        columns["text"] = data.texts
    return pd.DataFrame(columns)


def colour_columns(frame: pd.DataFrame) -> list[str]:
    """Return the columns of a sample table for the colour of points: those in which samples differ, except numbers and
    texts."""
    names = [name for name in frame if name not in ("sample", "index", "text")]
    return [name for name in names if frame[name].nunique() > 1]


def find_samples(frame: pd.DataFrame, words: str) -> list[int]:
    """Return the samples of a table with these words in an answer, a text, a flip or the name of a class, in upper or
    lower case; a number also matches the sample with that number.

    >>> frame = pd.DataFrame({"sample": [0, 1, 12], "right": ["cat", "Dog", "dog 1"], "merged margin": [0.1, 1.0, 2.0]})
    >>> find_samples(frame, "dog"), find_samples(frame, " 12 "), find_samples(frame, "")
    ([1, 12], [12], [])
    """
    words = words.strip().lower()
    if not words:
        return []
    found = frame["sample"].astype(str) == words
    for name in frame.select_dtypes(exclude=["number", "bool"]):
        found |= frame[name].astype(str).str.lower().str.contains(words, regex=False)
    return [int(one) for one in frame.loc[found, "sample"]]


def answer_column(data: Samples) -> list[str] | None:
    """Return the right answer or class of every sample; None if the source has none."""
    if data.targets is not None:
        return list(data.targets)
    return None if data.labels is None else list(_words(data, data.labels))


def with_intervals(table: pd.DataFrame, found: Comparison) -> pd.DataFrame:
    """Return a score table of both models (`tables.score_table`: a row per task and one for the average) with the
    interval of their difference in points, McNemar's p, whether all that is within noise, and counts of fixed, broken
    and unchanged samples."""
    rows = [*found.tasks.values(), found.average]
    counts = {kind: [getattr(one.counts, kind.replace(" ", "_"), None) for one in rows] for kind in FLIPS}
    return table.assign(
        **{
            "from": [100 * one.low for one in rows],
            "to": [100 * one.high for one in rows],
            "McNemar p": [one.p for one in rows],
            "within noise": [one.is_within_noise for one in rows],
            **counts,
        }
    )


def select_rows(table: pd.DataFrame, show: str, sort: str) -> pd.DataFrame:
    """Return the rows of a sample table of a kind `show`, sorted by a column: numbers in descending order, others
    ascending.

    Args:
        show: one of `SHOWN`; all rows where the table has no flips.
    """
    wanted = SHOWN[show]
    found = table[table["flip"].isin(wanted)] if "flip" in table else table
    numbers = sort != "sample" and pd.api.types.is_numeric_dtype(found[sort])
    return found.sort_values(sort, ascending=not numbers, kind="stable")


def difference_words(one: Difference) -> str:
    """Write a difference with its interval, such as "+3.1 points, -0.6 to +6.9, within noise"."""
    noise = ", within noise" if one.is_within_noise else ""
    return f"{points(one.difference)} points, {points(one.low)} to {points(one.high)}{noise}"


def share_of_flips(flip: Sequence[str], picked: Sequence[int]) -> dict[str, tuple[int, int]]:
    """Return, by kind of flip, how many of a selection of samples and how many of all samples have it; positions beyond
    the last are ignored.

    >>> share_of_flips(["fixed", "broken", "fixed", "both right"], [0, 3, 99])["fixed"]
    (1, 2)
    """
    chosen = {i for i in picked if 0 <= i < len(flip)}
    return {kind: (sum(flip[i] == kind for i in chosen), list(flip).count(kind)) for kind in FLIPS}


def describe_picked(found: Mapping[str, PerSample], models: Sequence[str], picked: Sequence[int]) -> str:
    """Describe as Markdown, each part after a dot, how many of some samples the second of two models fixed and broke,
    or how many the only one has right; "" if that was not measured.

    >>> right, wrong = (PerSample(answers=("a", "b"), right=(one, False)) for one in (True, False))
    >>> describe_picked({"merged": wrong, "calibrated": right}, ["merged", "calibrated"], [0])
    ' · merged → calibrated: **1** of all 1 fixed samples, **0** of all 0 broken ones · 0 both right, 0 both wrong'
    """
    rights = [right for one in models if (right := found[one].right) is not None]
    if len(rights) < len(models):
        return ""
    token = " by first tokens" if any(found[one].answers is None for one in models) else ""
    if len(rights) == 1:
        good = sum(rights[0][i] for i in picked)
        return f" · **{good}** right, **{len(picked) - good}** wrong with {plain(models[0])}{token}"
    parts = share_of_flips(flips(*rights), picked)
    (fixed, all_fixed), (broken, all_broken) = parts[FIXED], parts[BROKEN]
    turned = f"**{fixed}** of all {all_fixed} fixed samples, **{broken}** of all {all_broken} broken ones"
    rest = f"{parts[BOTH_RIGHT][0]} both right, {parts[BOTH_WRONG][0]} both wrong"
    return f" · {plain(models[0])} → {plain(models[1])}{token}: {turned} · {rest}"


def _words(data: Samples, answers: Tensor | tuple[str, ...]) -> tuple[str, ...]:
    """Return answers as words: the names of classes, or numbers if they have none."""
    if isinstance(answers, tuple):
        return tuple(str(one).strip() for one in answers)
    names = data.class_names
    return tuple(f"class {one}" if names is None else names[one] for one in answers.tolist())


def _decide(data: Samples, scores: Tensor) -> tuple[str, ...] | None:
    """Return the class with the highest score; None for samples without classes, because a first token is not an
    answer."""
    return None if data.labels is None else _words(data, scores.argmax(1))

"""Every sample of a task and what models make of it → one data frame: flips, answers, margins, drift."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from featcal.evaluation.paired import FLIPS, flips
from featcal.words import points

if TYPE_CHECKING:  # the first chart is drawn before torch is there
    from torch import Tensor

    from featcal.drift.ledger import TaskDrift, TaskFeatures
    from featcal.evaluation.evaluate import TaskScore
    from featcal.evaluation.paired import Comparison, Difference
    from featcal.tasks.sources import Samples

UNITS = (
    "margin: score of a model's first answer above its second; drift: norm of the difference to the expert's final "
    "feature; cosine: to that feature; score change: largest of the differences to the expert's scores"
)
"""Of the columns of `sample_table`."""


@dataclass(frozen=True)
class PerSample:
    """What one model makes of every sample of one task, in the order of its view; None: not measured, or no such
    thing."""

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
    """`[n]`: the margin of the expert proves that this model decides as it does (Eq. 44)."""

    def scored(self, data: Samples, score: TaskScore) -> PerSample:
        """With answers, and which of them are right."""
        right = None if score.right is None else tuple(score.right.tolist())
        return replace(self, answers=_words(data, score.predictions), right=right)

    def located(self, found: TaskFeatures) -> PerSample:
        """With drift and cosine of final features."""
        return replace(self, drift=found.layers[-1].drift.numpy(), cosine=found.cosine.numpy())


def of_ledger(found: TaskDrift) -> dict[str, PerSample]:
    """What a ledger knows of the expert and of its model: margins and decisions where scores were measured."""
    expert, model = PerSample(), PerSample().located(found)
    output = found.output
    if output is None:
        return {"expert": expert, "model": model}
    change = (output.model_scores - output.expert_scores).abs().amax(1)
    return {
        "expert": replace(expert, margin=output.margin.numpy()),
        "model": replace(
            model,
            right=tuple(output.correct.tolist()),
            margin=output.model_margin.numpy(),
            score_change=change.numpy(),
            certified=output.certified.numpy(),
        ),
    }


def sample_table(data: Samples, models: Mapping[str, PerSample], a: str = "", b: str = "") -> pd.DataFrame:
    """One row per sample: its number in the view, position in the source, flip from `a` to `b` where both are scored,
    right answer, then every model's answer (or, where answers were not measured, whether it is right), margin, drift,
    cosine, score change and certificate, and the text where there is one.

    Args:
        models: by the names that columns get; `a` and `b` are two of them.
    """
    columns: dict[str, Sequence[object]] = {"sample": range(len(data)), "index": data.indices}
    before, after = (models[name].right if name in models else None for name in (a, b))
    if before is not None and after is not None:
        columns["flip"] = flips(before, after)
    answers = right_answers(data)
    if answers is not None:
        columns["right"] = answers
    for name, one in models.items():
        said: dict[str, Any] = {"": one.answers, "right": one.right if one.answers is None else None}
        said |= {"margin": one.margin, "drift": one.drift, "cosine": one.cosine}
        said |= {"score change": one.score_change, "certified": one.certified}
        columns |= {f"{name} {what}".strip(): values for what, values in said.items() if values is not None}
    if data.texts is not None:
        columns["text"] = data.texts
    return pd.DataFrame(columns)


def right_answers(data: Samples) -> list[str] | None:
    """The right answer or class of every sample; None where the source has none."""
    if data.targets is not None:
        return list(data.targets)
    return None if data.labels is None else list(_words(data, data.labels))


def comparison_table(found: Comparison, a: str = "A", b: str = "B") -> pd.DataFrame:
    """One row per task and, last, the average: scores of A and B in %, their difference with its interval in points,
    McNemar's p, samples by flip, and whether all that is within noise.

    Args:
        a, b: what the columns of the two models are called; different.
    """
    rows = {**found.tasks, "average": found.average}
    names = ("fixed", "broken", "both_right", "both_wrong")
    return pd.DataFrame(
        [
            {
                "task": task,
                "n": one.n,
                a: 100 * one.a,
                b: 100 * one.b,
                "difference": 100 * one.difference,
                "low": 100 * one.low,
                "high": 100 * one.high,
                "p": one.p,
                **{name.replace("_", " "): getattr(one.counts, name, None) for name in names},
                "within noise": one.within_noise,
            }
            for task, one in rows.items()
        ]
    )


def difference_words(one: Difference) -> str:
    """A difference with its interval, such as "+3.1 points, -0.6 to +6.9, within noise"."""
    noise = ", within noise" if one.within_noise else ""
    return f"{points(one.difference)} points, {points(one.low)} to {points(one.high)}{noise}"


def share_of_flips(flip: Sequence[str], picked: Sequence[int]) -> dict[str, tuple[int, int]]:
    """Kind of flip → how many of a selection of samples, and of all of them, are of it; samples beyond the last are
    passed over.

    >>> share_of_flips(["fixed", "broken", "fixed", "both right"], [0, 3, 99])["fixed"]
    (1, 2)
    """
    chosen = {i for i in picked if 0 <= i < len(flip)}
    return {kind: (sum(flip[i] == kind for i in chosen), list(flip).count(kind)) for kind in FLIPS}


def _words(data: Samples, said: Tensor | tuple[str, ...]) -> tuple[str, ...]:
    """Answers as words: of classes their names, or numbers where they have none."""
    if isinstance(said, tuple):
        return tuple(str(one).strip() for one in said)
    names = data.class_names
    return tuple(f"class {one}" if names is None else names[one] for one in said.tolist())

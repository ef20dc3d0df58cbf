"""Turn ledgers and scores into the data frames of charts and downloads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from featcal.system.formatting import decimals, how_many, lift_half

if TYPE_CHECKING:  # the first chart is drawn before torch is there
    from featcal.drift.ledger import DriftLedger, Features
    from featcal.evaluation.evaluate import Scores

NORMS = ["drift", "mismatch", "propagation"]
ALL_TASKS = "the mean over tasks"
_METRICS = {
    "accuracy": "accuracy",
    "exact_match": "exact match",
    "spearman": "rank correlation",
    "first_token": "first-token accuracy",
}


def drift_table(ledger: DriftLedger) -> pd.DataFrame:
    """Return one row per task and layer: means over samples of ||e||, ||m||, ||p||, ||h_expert|| and cos(m, p)."""
    return ledger.to_frame()[["task", "layer", *NORMS, "relative_drift", "alignment", "expert_norm"]].assign(
        model=ledger.model
    )


def layer_rows(table: pd.DataFrame, task: str, relative: bool) -> pd.DataFrame:
    """Return one row per layer, of one task or the mean over tasks."""
    scaled = _scale_norms(table, relative)
    if task != ALL_TASKS:
        return scaled[scaled["task"] == task].reset_index(drop=True)
    return scaled.groupby("layer", sort=False)[[*NORMS, "alignment"]].mean().reset_index()


def relative_drift_table(features: Features) -> pd.Series:
    """Return drift over the norm of the expert's features, by layer: means over samples, then over tasks."""
    tasks = {name: {one.layer: one.relative_drift for one in task.layers} for name, task in features.tasks.items()}
    return pd.DataFrame(tasks).mean(axis=1)


def layer_columns(columns: Mapping[str, pd.Series]) -> pd.DataFrame:
    """Join series over layers into one table: layer, then one column per model."""
    return pd.DataFrame(columns).rename_axis("layer").reset_index()


def task_table(table: pd.DataFrame, layer: str, relative: bool) -> pd.DataFrame:
    """Return one row per task at one layer."""
    scaled = _scale_norms(table, relative)
    return scaled[scaled["layer"] == layer].reset_index(drop=True)


def score_table(scores: Mapping[str, Scores], pair: tuple[str, str] | None = None) -> pd.DataFrame:
    """Return one row per task and one for the average, one column per model, in percent.

    A pair of models adds the difference in points, second minus first, and, next to experts, the share of the gap
    between the first and the expert that the second closed (missing where the expert is not better).
    """
    columns = {model: [*(s.value for s in one.tasks.values()), one.average] for model, one in scores.items()}
    tasks = list(next(iter(scores.values())).tasks)
    frame = 100 * pd.DataFrame(columns, index=pd.Index([*tasks, "average"], name="task"))
    if pair is not None:
        first, second = pair
        frame[difference_column(pair)] = frame[second] - frame[first]
        if "expert" in frame:
            gap = frame["expert"] - frame[first]
            # A gap of 0 or below has no share to close: NaN, not an infinity or a wrong sign.
            frame["gap closed, %"] = 100 * frame[difference_column(pair)] / gap.where(gap > 0, np.nan)
    return frame.reset_index()


def difference_column(pair: tuple[str, str]) -> str:
    """Return the name of a score table's column with the gain of the second model.

    >>> difference_column(("merged", "calibrated"))
    'calibrated − merged'
    """
    return f"{pair[1]} − {pair[0]}"


def metric_name(scores: Mapping[str, Scores]) -> str:
    """Name the numbers of a score table; "score" where tasks are scored differently."""
    return metric_words(task.metric for one in scores.values() for task in one.tasks.values())


def metric_words(metrics: Iterable[str]) -> str:
    """Return the common name of scores of these metrics.

    >>> metric_words(["exact_match", "exact_match"]), metric_words(["exact_match", "spearman"])
    ('exact match', 'score')
    """
    names = {_METRICS[metric] for metric in metrics}
    return names.pop() if len(names) == 1 else "score"


def describe_samples(features: Features) -> str:
    """Describe the number of samples per task of a measurement, and their split."""
    return f"{how_many(len(task.indices) for task in features.tasks.values())} {features.split} samples per task"


def raised_tasks(before: Features, after: Features) -> list[str]:
    """Return the tasks whose final features are further from the expert's after calibration than before it."""
    return [
        task
        for task, one in after.tasks.items()
        if one.layers[-1].drift.mean() > before.tasks[task].layers[-1].drift.mean()
    ]


def mean_cosines(features: Features) -> dict[str, float]:
    """Return the mean cosine of final features to the expert's, per task."""
    return {name: float(task.cosine.mean()) for name, task in features.tasks.items()}


def lift_halves(frame: pd.DataFrame, names: Iterable[str]) -> pd.DataFrame:
    """Return a table of which a browser writes these columns, if there, with one decimal as texts do (`lift_half`).

    >>> lift_halves(pd.DataFrame({"merged": [60.15, -2.66]}), ["merged", "cost"])["merged"].tolist()
    [60.2, -2.66]
    """
    known = [name for name in names if name in frame]
    return frame.assign(**{name: frame[name].map(lambda value: lift_half(value, 1)) for name in known})


def _scale_norms(table: pd.DataFrame, relative: bool) -> pd.DataFrame:
    return table.assign(**{name: table[name] / table["expert_norm"] for name in NORMS}) if relative else table


def stack_models(frames: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """Stack the tables of several models, given by the models' names; the model is the first column."""
    together = pd.concat([frame.assign(model=name) for name, frame in frames.items()], ignore_index=True)
    return together[["model", *(name for name in together if name != "model")]]


def gain_table(cosines: pd.DataFrame, scores: pd.DataFrame, pair: tuple[str, str]) -> pd.DataFrame:
    """Return, per task, the gain of the second model over the first: cosine, and score in points."""
    joined = cosines.merge(scores, on="task", suffixes=(" cosine", " score"))
    first, second = pair
    return pd.DataFrame(
        {
            "task": joined["task"],
            "cosine gain": joined[f"{second} cosine"] - joined[f"{first} cosine"],
            "score gain": joined[difference_column(pair)],
        }
    )


def describe_ranges(values: Mapping[str, pd.Series], digits: int = 2) -> str:
    """Describe the smallest and the largest value of every model, for readers who cannot see a chart.

    >>> describe_ranges({"merged": pd.Series([0.1, 0.73, 0.4], ["block 0", "head", "block 1"])})
    'merged 0.10 (block 0) to 0.73 (head)'
    """
    known = {model: one.dropna() for model, one in values.items()}
    return "; ".join(
        f"{model} {decimals(one.min(), digits)} ({one.idxmin()}) to {decimals(one.max(), digits)} ({one.idxmax()})"
        for model, one in known.items()
        if len(one)
    )

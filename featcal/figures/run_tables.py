"""Turn runs of the history and points of a sweep into data frames for pages, the command line and downloads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from featcal.studies.history import HistoryEntry, RunMeasurement
from featcal.suite.calibration_options import NUMBERS, OF_A_RECIPE, OPTIONS
from featcal.suite.methods import REFERENCE
from featcal.suite.name_grammar import model_name
from featcal.system.formatting import exactly, readable

if TYPE_CHECKING:
    from featcal.studies.checkpoints import WrittenModel
    from featcal.studies.sweep import SweepPoint

SHOWN_OPTIONS: Mapping[str, str] = {
    "recipe": "recipe",
    **{name: OPTIONS[name].symbol for name in ("lam", "rho", "alpha", "beta", "mu", "decisions", "samples")},
    "seed": "seed",
}
"""Options of a calibration with a column of their own in lists of runs, and its heading."""
OPTION_COLUMNS = ("method", "merge", *SHOWN_OPTIONS.values())
"""Columns that describe a run (`describe_options`)."""
MOST_VALUES = 12
"""Most values of a column that are offered as filters."""
_MADE_OF = ": "
"""Text between a column and its value in a filter."""


def checkpoint_table(written: Sequence[WrittenModel]) -> pd.DataFrame:
    """Return one row per written checkpoint: its description, its mean score and that of the model before calibration
    in percent, the drift of both, bytes on disk, time (UTC) and path."""
    rows = [
        {
            "folder": Path(one.folder).name,
            "suite": one.run.suite,
            **describe_options(one.run),
            "before, %": 100 * one.before.mean if one.before else float("nan"),
            "mean, %": 100 * one.after.mean if one.after else float("nan"),
            "measured on": describe_measured_samples(one.after),
            "drift before": one.before.mean_drift if one.before else float("nan"),
            "drift": one.after.mean_drift if one.after else float("nan"),
            "size": readable(sum(one.files.values())),
            "written": one.time[:19].replace("T", " "),
            "path": one.folder,
        }
        for one in written
    ]
    return pd.DataFrame(rows)


def describe_options(run: HistoryEntry) -> dict[str, Any]:
    """Describe a run, one entry per column: the method, its start, and the options of a calibration; None for an option
    that its recipe does not have."""
    name, options = model_name(run.model), run.options
    idle = {one for one in OF_A_RECIPE if one not in NUMBERS.get(options.get("recipe", ""), OF_A_RECIPE)}
    shown = {heading: None if one in idle else options.get(one) for one, heading in SHOWN_OPTIONS.items()}
    of_itself = run.model if name.kind == REFERENCE else name.kind
    return {"method": of_itself, "merge": name.of, **shown}


def sweep_table(points: Sequence[SweepPoint], front: Sequence[SweepPoint]) -> pd.DataFrame:
    """Return one row per point: its description (`OPTION_COLUMNS`), all other options as text ("more"), mean over tasks
    and lowest score of a task in percent, that task, relative final drift, processor seconds of its calibration (NaN if
    unknown), and whether the point is on the Pareto front of the two scores."""
    best = {one.run.id for one in front}
    rows = [
        {
            "run": one.run.id,
            "kind": one.kind,
            "model": one.run.model,
            "name": one.run.name,
            **describe_options(one.run),
            "more": str(sorted((name, value) for name, value in one.run.options.items() if name not in SHOWN_OPTIONS)),
            "mean": 100 * one.found.mean,
            "worst task": one.found.worst_task,
            "worst": 100 * one.found.worst,
            "drift": one.found.mean_drift,
            "cost": float("nan") if one.found.cpu is None else one.found.cpu,
            "front": one.run.id in best,
        }
        for one in points
    ]
    scores = ["mean", "worst task", "worst", "drift", "cost", "front"]
    return pd.DataFrame(rows, columns=["run", "kind", "model", "name", *OPTION_COLUMNS, "more", *scores])


def run_table(runs: Sequence[HistoryEntry]) -> pd.DataFrame:
    """Return one row per run and measurement (also one for a run without measurements), for display: scores in percent,
    times to the second (UTC)."""
    rows = [
        {
            "run": run.id,
            "name": run.name,
            "pinned": run.pinned,
            "model": run.model,
            **describe_options(run),
            "measured on": describe_measured_samples(one),
            "mean": 100 * one.mean if one else float("nan"),
            "worst": 100 * one.worst if one else float("nan"),
            "drift": one.mean_drift if one else float("nan"),
            "notes": run.notes,
            "suite": run.suite,
            "time": run.time[:19].replace("T", " "),
        }
        for run in runs
        for one in run.measured or (None,)
    ]
    scores = ["measured on", "mean", "worst", "drift"]
    columns = ["run", "name", "pinned", "model", *OPTION_COLUMNS, *scores, "notes", "suite", "time"]
    return pd.DataFrame(rows, columns=columns)


def filters(frame: pd.DataFrame) -> list[str]:
    """Return the possible filters of rows of runs: a column and one of its values each, if it has several."""
    found = []
    for column in [name for name in (*OPTION_COLUMNS, "measured on") if name in frame]:
        values = frame[column].dropna().drop_duplicates().sort_values()
        if 1 < len(values) <= MOST_VALUES:
            found += [f"{column}{_MADE_OF}{value_words(value)}" for value in values]
    return found


def select_runs(frame: pd.DataFrame, chosen: Iterable[str]) -> pd.DataFrame:
    """Return the rows that match, for every column in `filters`, one of its values."""
    wanted: dict[str, set[str]] = {}
    for one in chosen:
        column, _, value = one.partition(_MADE_OF)
        if column in frame:
            wanted.setdefault(column, set()).add(value)
    for column, values in wanted.items():
        frame = frame[[value_words(value) in values for value in frame[column]]]
    return frame


def group_runs(frame: pd.DataFrame, by: str) -> pd.DataFrame:
    """Return one row per value of a column: the number of rows, the mean, best and lowest of their mean scores, the
    best of their worst tasks, and their lowest drift; the best first."""
    grouped = frame.groupby(by, dropna=False, sort=False).agg(
        rows=("run", "size"),
        mean=("mean", "mean"),
        best=("mean", "max"),
        lowest=("mean", "min"),
        worst=("worst", "max"),
        drift=("drift", "min"),
    )
    return grouped.sort_values("best", ascending=False).reset_index()


def value_words(value: Any) -> str:
    """Format a value of a column for filters and charts."""
    return exactly(float(value)) if isinstance(value, int | float) and not isinstance(value, bool) else str(value)


def run_export(runs: Sequence[HistoryEntry]) -> pd.DataFrame:
    """Return the rows of `run_table` with the whole content of their records: options, scores (0-1), versions, hash."""
    rows = [_everything(run, one) for run in runs for one in run.measured or (None,)]
    return pd.DataFrame(rows, dtype=object)  # else 64 becomes 64.0 in a column with gaps


def describe_measured_samples(one: RunMeasurement | None) -> str:
    """Describe the samples of a measurement in words; "" if there is none."""
    if one is None:
        return ""
    count = "all" if one.samples is None else str(one.samples)
    how = ", whole answers" if one.how == "answers" else ""
    return f"{count} {one.split} samples, seed {one.seed}{how}"


def different(a: HistoryEntry, b: HistoryEntry) -> pd.DataFrame:
    """Return one row per option and version in which two runs differ; "–" if one does not have it."""
    sides = [{**run.options, **run.made_by, "suite": f"{run.suite} {run.suite_hash}"} for run in (a, b)]
    # A model without options is told apart by its name alone, one with them by the merge that it calibrates, too.
    own = [{"merge": model_name(run.model).of} if a.options and b.options else {"model": run.model} for run in (a, b)]
    sides = [{**name, **side} for name, side in zip(own, sides, strict=True)]
    names = dict.fromkeys([*sides[0], *sides[1]])
    rows = [(name, *(str(side.get(name, "–")) for side in sides)) for name in names]
    return pd.DataFrame([row for row in rows if row[1] != row[2]], columns=["option", "A", "B"])


def compare_runs(a: RunMeasurement, b: RunMeasurement) -> pd.DataFrame:
    """Return one row per task and one for the mean: scores in percent, relative final drift, and B - A of both."""
    frame = pd.DataFrame(
        {
            "A, %": [100 * one for one in _column(a, "scores")],
            "B, %": [100 * one for one in _column(b, "scores")],
            "A, drift": _column(a, "drift"),
            "B, drift": _column(b, "drift"),
        },
        index=pd.Index([*_tasks(a), "mean"], name="task"),
    )
    frame.insert(2, "B − A, points", frame["B, %"] - frame["A, %"])
    frame["B − A, drift"] = frame["B, drift"] - frame["A, drift"]
    return frame.reset_index()


def run_title(run: HistoryEntry) -> str:
    """Return a run's title in lists and charts: its name, else its model."""
    return run.name or run.model


def _tasks(one: RunMeasurement) -> list[str]:
    return list(one.scores or one.drift)


def _column(one: RunMeasurement, what: str) -> list[float]:
    """Return scores or drift of every task, then the mean; NaN for missing values."""
    if what == "drift":
        return [*(one.drift.get(task, float("nan")) for task in _tasks(one)), one.mean_drift]
    return [*(one.scores[task].value if task in one.scores else float("nan") for task in _tasks(one)), one.mean]


def _everything(run: HistoryEntry, one: RunMeasurement | None) -> dict[str, Any]:
    row = {"run": run.id, "name": run.name, "notes": run.notes, "pinned": run.pinned, "time": run.time}
    row |= {"suite": run.suite, "suite_hash": run.suite_hash, "model": run.model, **run.options}
    row |= {f"version {name}" if name != "device" else name: value for name, value in run.made_by.items()}
    if one is not None:
        row |= {"how": one.how, "split": one.split, "samples_per_task": one.samples, "measured_seed": one.seed}
        row |= {"mean": one.mean, "worst": one.worst, "worst task": one.worst_task, "mean drift": one.mean_drift}
        row |= {"seconds": one.seconds, "metric": ", ".join(dict.fromkeys(s.metric for s in one.scores.values()))}
        row |= {f"score {task}": s.value for task, s in one.scores.items()}
        row |= {f"n {task}": s.n for task, s in one.scores.items()}
        row |= {f"drift {task}": value for task, value in one.drift.items()}
    return row

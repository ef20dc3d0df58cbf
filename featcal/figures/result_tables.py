"""Turn results into the small tables of notebooks, with one line that describes each."""

from __future__ import annotations

from collections.abc import Sequence
from functools import singledispatch
from pathlib import Path

import pandas as pd

from featcal.calibration.calibrate import CalibrationResult
from featcal.drift.ledger import DriftLedger
from featcal.evaluation.comparison import Comparison
from featcal.evaluation.evaluate import Scores
from featcal.figures import selection_table, tables
from featcal.figures.names import cut_text
from featcal.studies.selection.outcome import Selection
from featcal.system.formatting import decimals, how_many, percent, points

_LONGEST = 36
"""Most characters of a model's name."""
_MEAN = "mean"


@singledispatch
def tabulate(result: object) -> pd.DataFrame:
    """Return the small table of a result, with text in all cells; numbers are rounded as everywhere."""
    raise TypeError(f"a {type(result).__name__} has no table")


@singledispatch
def describe_result(result: object) -> str:
    """Describe a result in one line."""
    raise TypeError(f"a {type(result).__name__} has no heading")


@describe_result.register
def _(ledger: DriftLedger) -> str:
    return f"Drift of {ledger.model} from the experts of {ledger.suite}, {tables.describe_samples(ledger)}"


@tabulate.register
def _(ledger: DriftLedger) -> pd.DataFrame:
    """Tabulate drift of the final features over the expert's norm, their cosine, and the layer that adds most of its
    own."""
    cosines, rows = tables.mean_cosines(ledger), {}
    drift = tables.drift_table(ledger)
    for task in ledger.tasks:
        layers = tables.layer_rows(drift, task, relative=True)
        largest = layers.loc[layers["mismatch"].idxmax()]
        worst = f"{largest['mismatch']:.3f}, {largest['layer']}"
        rows[task] = {"drift": layers["drift"].iloc[-1], "cosine": cosines[task], "largest mismatch": worst}
    frame = pd.DataFrame.from_dict(rows, orient="index")
    mean = frame[["drift", "cosine"]].mean().to_frame(_MEAN).T.assign(**{"largest mismatch": ""})
    whole = pd.concat([frame, mean]).rename_axis("task").reset_index()
    return whole.map(lambda one: one if isinstance(one, str) else decimals(one, 3))


@describe_result.register
def _(result: CalibrationResult) -> str:
    counts = how_many(one["samples"] for one in result.record["tasks"].values())
    where = "of the final features" if result.record.get("final_drift") else "after every block, mean over tasks"
    return (
        f"{result.record['suite']} calibrated by the recipe {result.config.recipe}, {counts} samples per task: "
        f"relative drift {where}, on these samples"
    )


@tabulate.register
def _(result: CalibrationResult) -> pd.DataFrame:
    return calibrated_drift(result).reset_index().map(lambda one: one if isinstance(one, str) else decimals(one, 3))


@describe_result.register
def _(scores: Scores) -> str:
    metric = tables.metric_name({"": scores})
    count = how_many(one.n for one in scores.tasks.values())
    return f"{scores.model} on {scores.suite}: {metric} in %, {count} {scores.split} samples per task"


@tabulate.register
def _(scores: Scores) -> pd.DataFrame:
    rows = [{"task": task, "%": percent(one.value), "samples": str(one.n)} for task, one in scores.tasks.items()]
    return pd.DataFrame([*rows, {"task": "average", "%": percent(scores.average), "samples": ""}])


@describe_result.register
def _(found: Comparison) -> str:
    metric = tables.metric_words(one.metric for one in found.tasks.values())
    return f"{found.b} against {found.a} on {found.suite}: {metric} in % on the same {found.split} samples"


@tabulate.register
def _(found: Comparison) -> pd.DataFrame:
    columns = ["task", *shorten_names([found.a, found.b]), "difference", "95 % interval", ""]
    rows = [
        [
            task,
            percent(one.a),
            percent(one.b),
            points(one.difference),
            f"{points(one.low)} to {points(one.high)}",
            "within noise" if one.is_within_noise else "",
        ]
        for task, one in [*found.tasks.items(), ("average", found.average)]
    ]
    return pd.DataFrame(rows, columns=columns)


@describe_result.register
def _(chosen: Selection) -> str:
    return f"Chosen for {chosen.family.suite.name}, without labels: {chosen.model}"


@tabulate.register
def _(chosen: Selection) -> pd.DataFrame:
    rows, columns = selection_table.candidate_table(chosen.to_json())
    frame = pd.DataFrame(rows, columns=columns).map(lambda one: one if isinstance(one, str) else f"{one:.4f}")
    return frame.loc[:, [name == "score" or frame[name].nunique() > 1 for name in frame]]


def calibrated_drift(result: CalibrationResult) -> pd.DataFrame:
    """Return the final drift of every task before and after calibration, and its mean; without the merged model's drift
    that after the blocks."""
    if final := result.record.get("final_drift"):
        frame = pd.DataFrame.from_dict(final, orient="index")[["merged", "calibrated"]].rename_axis("task")
        return pd.concat([frame, frame.mean().to_frame(_MEAN).T.rename_axis("task")])
    blocks = pd.DataFrame(result.record["relative_drift"]).mean()
    return blocks.to_frame("calibrated").rename_axis("layer")


def shorten_names(names: Sequence[str]) -> list[str]:
    """Return unique short names for models: a folder's own name, else the name without options if that is unique, or as
    much of it as is."""
    bare = [Path(name).name if Path(name).is_absolute() else name.partition(":")[0] for name in names]
    cut = [cut_text(name, _LONGEST) for name in names]
    short = next((one for one in (bare, cut) if len({*one}) == len(one)), list(names))
    return [name if name not in short[:place] else f"{name} (B)" for place, name in enumerate(short)]

"""Turn the changes by a calibration and the condition of its systems into data frames."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import pandas as pd

if TYPE_CHECKING:
    from featcal.calibration.conditioning import Conditioning
    from featcal.drift.ledger import DriftLedger, Features
    from featcal.evaluation.evaluate import Scores


def drift_change(before: Features, after: Features) -> pd.DataFrame:
    """Return one row per task and layer: relative drift of two models, and its change (negative if the second has
    less)."""
    pairs = (
        (task, old, new)
        for task, one in before.tasks.items()
        for old, new in zip(one.layers, after.tasks[task].layers, strict=True)
    )
    return _change_frame([(task, old.layer, old.relative_drift, new.relative_drift) for task, old, new in pairs])


def contribution_change(before: DriftLedger, after: DriftLedger) -> pd.DataFrame:
    """Return one row per task and layer: the part of the final relative drift attributed to the layer (its share of
    Prop. 2 times that drift) in two models, and its change (negative if the second has less)."""
    return _change_frame(
        [
            (task, layer, old, new)
            for task in before.tasks
            for (layer, old), new in zip(_book(before, task).items(), _book(after, task).values(), strict=True)
        ]
    )


def conditioning_table(found: Sequence[Conditioning]) -> pd.DataFrame:
    """Return one row per system: layer, maps, width, tokens, smallest and largest eigenvalue, their ratio, effective
    rank and its share of the width."""
    frame = pd.DataFrame([{**asdict(one), "condition": one.condition} for one in found])
    return frame.assign(**{"rank / width": frame["effective_rank"] / frame["width"]})


def model_summary(features: Mapping[str, Features], scores: Mapping[str, Scores]) -> pd.DataFrame:
    """Return one row per model: final relative drift and cosine, means over tasks, and the score in % if known."""
    rows = []
    for model, one in features.items():
        drifts = [task.layers[-1].relative_drift for task in one.tasks.values()]
        row = {"model": model, "final drift": sum(drifts) / len(drifts), "cosine": one.macro_cosine}
        rows.append({**row, "score, %": 100 * scores[model].average} if scores else row)
    return pd.DataFrame(rows)


def spread_table(scores: Mapping[int, Scores]) -> pd.DataFrame:
    """Return one row per task and one for the average: mean, lowest and highest score in % over calibration seeds,
    their range in points, and the score with every seed."""
    columns = {f"seed {seed}": [*(s.value for s in one.tasks.values()), one.average] for seed, one in scores.items()}
    tasks = list(next(iter(scores.values())).tasks)
    own = 100 * pd.DataFrame(columns, index=pd.Index([*tasks, "average"], name="task"))
    summed = pd.DataFrame({"mean": own.mean(axis=1), "lowest": own.min(axis=1), "highest": own.max(axis=1)})
    summed["range"] = summed["highest"] - summed["lowest"]
    return summed.join(own).reset_index()


def _book(ledger: DriftLedger, task: str) -> dict[str, float]:
    """Return, by layer, the share of the final drift times the final relative drift; 0 if nothing drifted."""
    from featcal.figures import ledger_tables  # not above: it imports torch, which most tables here do without

    frame = ledger_tables.attribution_table(ledger, task)
    return dict(zip(frame["layer"], frame["contribution"], strict=True))


def _change_frame(rows: list[tuple[str, str, float, float]]) -> pd.DataFrame:
    frame = pd.DataFrame(rows, columns=["task", "layer", "before", "after"])
    return frame.assign(change=frame["after"] - frame["before"])

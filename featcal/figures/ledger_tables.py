"""Turn the ledger of Propositions 2 to 8 into the data frames of its charts."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from featcal.drift.ledger import DriftLedger, TaskDrift
from featcal.drift.source import SourceExcess, excess_frame
from featcal.figures.tables import ALL_TASKS


def attribution_table(ledger: DriftLedger, task: str) -> pd.DataFrame:
    """Return one row per layer: its share of the final drift, and its contribution, which is that share of the final
    relative drift.

    The rows are those of one task, or means over tasks.
    """
    return _mean([_attribution(one) for one in _choose(ledger, task)])


def growth_table(ledger: DriftLedger, task: str) -> pd.DataFrame:
    """Return one row per block: gamma, eta, response and the share of samples with certified growth."""
    columns = ["layer", "gamma", "eta", "response", "certified_growth"]
    frames = [pd.DataFrame(one.to_json()["layers"])[columns].dropna() for one in _choose(ledger, task)]
    return _mean(frames)


def outputs(ledger: DriftLedger) -> pd.DataFrame:
    """Return one row per task: score drift, bound, tightness, loss change, margin, certified, agreement, accuracy."""
    return pd.DataFrame([{"task": name, **one.to_json()["output"]} for name, one in ledger.tasks.items()])


def sources_table(found: Sequence[SourceExcess]) -> pd.DataFrame:
    """Return one row per block and source: excess over the source's own deployed minimum, both summed over maps."""
    named = excess_frame(found).rename(columns={"block": "layer"})
    summed = named.groupby(["layer", "source"], sort=False)[["excess", "minimum"]].sum().reset_index()
    relative = (summed["excess"] / summed["minimum"]).where(summed["minimum"] > 0, 0.0)
    return summed.assign(relative=relative)


def _attribution(task: TaskDrift) -> pd.DataFrame:
    booked = task.attribution
    assert booked is not None
    final = task.layers[-1].relative_drift
    frame = pd.DataFrame(
        {
            "layer": [layer.layer for layer in task.layers],
            "share": booked.shares.tolist(),
        }
    )
    # Shares divide by the final drift: without any, nothing is booked.
    is_shared = bool(booked.final_square.sum() > 0)
    return frame.assign(contribution=frame["share"] * final if is_shared else 0.0, final=final)


def _choose(ledger: DriftLedger, task: str) -> list[TaskDrift]:
    return list(ledger.tasks.values()) if task == ALL_TASKS else [ledger.tasks[task]]


def _mean(frames: list[pd.DataFrame]) -> pd.DataFrame:
    return pd.concat(frames).groupby("layer", sort=False).mean(numeric_only=True).reset_index()

"""Turn measurements inside one layer into the data frames of its charts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import pandas as pd

from featcal.figures.tables import ALL_TASKS

if TYPE_CHECKING:  # the first chart is drawn before torch is there
    from featcal.drift.depth import DepthDecisions
    from featcal.drift.inside import MapMismatch
    from featcal.drift.task_vectors import WeightChange
    from featcal.drift.tokens import TokenDrift


def maps_table(found: Mapping[str, Sequence[MapMismatch]], task: str, layer: str, relative: bool) -> pd.DataFrame:
    """Return one row per linear map of a block: mismatch, and the map's share of the change of the block.

    The rows are those of one task, or means over tasks.
    """
    rows = [
        {"layer": layer, "map": row["map"], "mismatch": row[key], "changed": row["changed"]}
        for name in (found if task == ALL_TASKS else [task])
        for row in (one.to_json() for one in found[name] if one.layer == layer)
        for key in ["relative_mismatch" if relative else "mismatch"]
    ]
    frame = pd.DataFrame(rows, columns=["layer", "map", "mismatch", "changed"])
    numbers = frame.astype({"mismatch": float, "changed": float})
    return numbers.groupby(["layer", "map"], sort=False).mean().reset_index()


def weights_table(found: Mapping[str, Sequence[WeightChange]], task: str) -> pd.DataFrame:
    """Return one row per layer: the norm of the model's task vector over that of the base's weights, the same of the
    expert's, and the cosine of both.

    The rows are those of one task, or means over tasks.
    """
    rows = [one.to_json() for name in (found if task == ALL_TASKS else [task]) for one in found[name]]
    frame = pd.DataFrame(rows)
    shares = frame[["model_change", "expert_change"]].div(frame["base_norm"], axis=0)
    named = shares.set_axis(["changed", "expert"], axis=1).assign(layer=frame["layer"], cosine=frame["cosine"])
    return named.groupby("layer", sort=False)[["changed", "expert", "cosine"]].mean().reset_index()


def agreement_table(found: Mapping[str, DepthDecisions]) -> pd.DataFrame:
    """Return one row per block: agreement with the expert's final decision, the expert's own agreement, and the share
    of samples with their final decision by then; means over tasks.

    Args:
        found: by task.
    """
    frame = pd.concat([pd.DataFrame(one.to_json()) for one in found.values()])
    return frame.groupby("layer", sort=False).mean().reset_index()


def course_table(found: Mapping[str, DepthDecisions], sample: int) -> pd.DataFrame:
    """Return one row per model, block and top answer of a sample, the expert first: model, layer, rank, answer and
    probability, and whether the decision stays from this block on.

    Args:
        found: by the name of the model in charts; each includes the expert's, unless it is the expert's own.
    """
    first = next(iter(found.values()))
    everyone = {"expert": first.beside or first, **found}
    frames = []
    for model, one in everyone.items():
        rows = pd.DataFrame(one.course(sample))
        own = rows[rows["of"] == rows["of"].iloc[-1]].drop(columns="of")
        stays = own["layer"].map(one.layers.index) >= int(one.turning_points[sample])
        frames.append(own.assign(model=model, stays=stays))
    frame = pd.concat(frames, ignore_index=True)
    return frame[["model", *(name for name in frame if name != "model")]]


def token_table(found: Mapping[str, TokenDrift], sample: int, layer: str) -> pd.DataFrame:
    """Return one row per model and token of a sample after a layer: part, position and word of the token, its drift,
    the same over its expert's norm, that norm, and its share of the layer's squared drift.

    Args:
        found: by the name of the model in charts.
    """
    rows = [{"model": model, **row} for model, one in found.items() for row in one.rows(sample, layer)]
    frame = pd.DataFrame(rows).astype({"relative_drift": float, "share": float})
    shown = ["model", "layer", "part", "position", "token", "drift", "relative_drift", "expert_norm", "share"]
    return frame[shown].rename(columns={"relative_drift": "relative drift", "expert_norm": "expert norm"})

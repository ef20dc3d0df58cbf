"""Turn what was measured inside one layer into the data frames that its charts draw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import pandas as pd

from featcal.figures.tables import ALL_TASKS

if TYPE_CHECKING:  # the first chart is drawn before torch is there
    from featcal.drift.inside import MapMismatch


def maps(found: Mapping[str, Sequence[MapMismatch]], task: str, layer: str, relative: bool) -> pd.DataFrame:
    """Return one row per linear map of a block: mismatch, and the map's share of what changed in the block.

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

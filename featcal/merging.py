"""Merge a suite's experts into a checkpoint folder."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from featcal.card import model_card
from featcal.errors import InputError
from featcal.family import Family, as_family
from featcal.mergers import task_arithmetic
from featcal.mergers.recipe import MERGERS, RecipeWeights
from featcal.mergers.schema import MergeRecipe
from featcal.models.export import write_model
from featcal.models.output import OutputFolder
from featcal.suite import Suite, did_you_mean


def merge_to_folder(suite: Suite | Family, method: str, scale: float | None, out: str | Path) -> dict[str, Any]:
    """Write the experts of a suite merged by `method`; everything outside the tower is the base's.

    Returns:
        The document of `featcal merge --json`.

    Raises:
        InputError: unknown method, a scale that the method does not have, or an output that cannot be written.
    """
    if method not in MERGERS:
        raise InputError(f"no merge method '{method}'; there are {', '.join(MERGERS)}.{did_you_mean(method, MERGERS)}")
    if scale is not None and method != "task-arithmetic":
        raise InputError(f"--scale means nothing to {method}")
    family = as_family(suite, "cpu")
    if scale is not None and not math.isfinite(scale):
        raise InputError(f"--scale must be a finite number, not {scale}")
    recipe = MergeRecipe.model_validate({"method": method, "scale": scale})
    merged = RecipeWeights(recipe, family.base, family.experts)
    settings: dict[str, Any] = {"method": method}
    if method == "task-arithmetic":
        settings["scale"] = task_arithmetic.DEFAULT_SCALE if scale is None else scale
    record = {"suite": family.suite.name, **settings}
    library = "open_clip" if family.adapter.family == "open_clip" else "transformers"
    with OutputFolder(out) as folder:
        card = model_card(family.suite, f"{family.suite.name}, merged", "A merge of task experts.", settings, library)
        content = write_model(folder, family.adapter, family.origin, merged, lambda: record, card)
    return {"out": str(folder.out), **content}

"""Mergers that take a task matrix as a whole: one of every expert is in memory, in float64, with what its decomposition
takes: more than a block of each model where an expert's matrices are a third of a block. Of eight B/32 experts Iso-C
takes 0.24 GB, TSV-M 0.5, Iso-CTS 0.6, ACE and WUDI's optimum 0.7; a block of each model and the base is 0.25 GB in
float32. None of it grows with the number of blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from featcal.mergers import ace, iso_c, iso_cts, tsv_m, wudi
from featcal.suite.recipe import MergeRecipe
from featcal.system.errors import NumericalError

DEFAULT_SCALE = 1.0
"""Of those methods that have a scale."""
_LINALG: Any = torch.linalg
MERGERS: Mapping[str, Callable[[MergeRecipe, Sequence[Tensor]], Tensor]] = {
    "tsv-m": lambda recipe, changes: tsv_m.merge(changes),
    "iso-c": lambda recipe, changes: iso_c.merge(changes),
    "iso-cts": lambda recipe, changes: iso_cts.merge(changes, recipe.common),
    "ace": lambda recipe, changes: ace.merge(changes, recipe.eps),
    "wudi": lambda recipe, changes: wudi.descend(changes, recipe.steps),
    "swudi": lambda recipe, changes: wudi.follow_flow(changes, recipe.time, recipe.share),
    "wudi-optimum": lambda recipe, changes: wudi.minimise(changes),
}
"""Method → the merged task matrix of task matrices `[m, d]`."""


def scale(recipe: MergeRecipe) -> float:
    """Factor of the merged task matrix, and of the mean change of what is no matrix."""
    return DEFAULT_SCALE if recipe.scale is None else recipe.scale


def merge(recipe: MergeRecipe, changes: Sequence[Tensor], name: str) -> Tensor:
    """What the merge adds to the base's matrix: `scale` times the merged task matrix.

    Args:
        changes: theta_i - theta_0 of one matrix, of every expert.
        name: of the matrix, for messages.

    Raises:
        NumericalError: a decomposition does not converge.
    """
    try:
        return scale(recipe) * MERGERS[recipe.method](recipe, changes)
    except _LINALG.LinAlgError as error:
        raise NumericalError(f"{recipe.method}: no decomposition of tensor '{name}' ({error})") from error

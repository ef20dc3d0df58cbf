"""Mergers that take a task matrix as a whole, and what becomes of tensors that are none."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from featcal.errors import NumericalError
from featcal.mergers import iso_c, iso_cts, tsv_m, wudi
from featcal.schema.recipe import MergeRecipe

DEFAULT_SCALE = 1.0
"""Of those methods that have a scale."""
_LINALG: Any = torch.linalg
MERGERS: Mapping[str, Callable[[MergeRecipe, Sequence[Tensor]], Tensor]] = {
    "tsv-m": lambda recipe, changes: tsv_m.merge(changes),
    "iso-c": lambda recipe, changes: iso_c.merge(changes),
    "iso-cts": lambda recipe, changes: iso_cts.merge(changes, recipe.common),
    "wudi": lambda recipe, changes: wudi.descend(changes, recipe.steps),
    "wudi-optimum": lambda recipe, changes: wudi.minimise(changes),
}
"""Method → the merged task matrix of task matrices `[m, d]`."""


def merge(recipe: MergeRecipe, changes: Sequence[Tensor], is_map: bool, name: str) -> Tensor:
    """What the merge adds to the base's tensor: `scale` (1 when None) times the merged task matrix, or the mean change.

    Args:
        changes: theta_i - theta_0 of one tensor, of every expert.
        is_map: whether the tensor is a matrix that the method merges.
        name: of the tensor, for messages.

    Raises:
        NumericalError: a decomposition does not converge.
    """
    scale = DEFAULT_SCALE if recipe.scale is None else recipe.scale
    if not is_map:
        return scale * sum(changes[1:], changes[0]) / len(changes)
    try:
        return scale * MERGERS[recipe.method](recipe, changes)
    except _LINALG.LinAlgError as error:
        raise NumericalError(f"{recipe.method}: no decomposition of tensor '{name}' ({error})") from error

"""Find linear maps, and orient their weights: stored `[outputs, inputs]` or, as in GPT-2, `[inputs, outputs]`."""

from __future__ import annotations

from typing import Any, TypeAlias

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

LinearMap: TypeAlias = Any
"""A module of one of the `KINDS`, with a `weight` and a `bias` that may be None; or the router of a mixture, with a
`weight` alone."""
KINDS: tuple[type[nn.Module], ...] = (nn.Linear, Conv1D)
"""Classes of modules that are linear maps of the last axis, with or without a bias."""


def is_transposed(module: LinearMap) -> bool:
    """Say whether the weight is stored `[inputs, outputs]`."""
    return isinstance(module, Conv1D)


def widths(module: LinearMap) -> tuple[int, int]:
    """Return the numbers of inputs and outputs of a map."""
    rows, columns = map(int, module.weight.shape)
    return (rows, columns) if is_transposed(module) else (columns, rows)


def orient_weight(module: LinearMap, weight: Tensor) -> Tensor:
    """Return a stored weight as a matrix `[outputs, inputs]`; given such a matrix, return it as it is stored."""
    return weight.mT if is_transposed(module) else weight

"""Linear maps, and how their weights are stored: `[outputs, inputs]`, or the other way round as GPT-2 has them."""

from __future__ import annotations

from typing import Any, TypeAlias

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

LinearMap: TypeAlias = Any
"""A module of one of the `KINDS`: it has a `weight`, and a `bias` that may be None."""
KINDS: tuple[type[nn.Module], ...] = (nn.Linear, Conv1D)
"""Classes of modules that are linear maps of the last axis, with or without a bias."""


def is_transposed(module: LinearMap) -> bool:
    """Whether the weight is stored `[inputs, outputs]`."""
    return isinstance(module, Conv1D)


def widths(module: LinearMap) -> tuple[int, int]:
    """Inputs and outputs of a map."""
    rows, columns = map(int, module.weight.shape)
    return (rows, columns) if is_transposed(module) else (columns, rows)


def orient_weight(module: LinearMap, weight: Tensor) -> Tensor:
    """A stored weight as a matrix `[outputs, inputs]`, and such a matrix as it is stored."""
    return weight.mT if is_transposed(module) else weight

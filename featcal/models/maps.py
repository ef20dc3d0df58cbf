"""Linear maps, and how their weights are stored: `[outputs, inputs]`, or the other way round as GPT-2 has them."""

from __future__ import annotations

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

LinearMap = nn.Linear | Conv1D
KINDS: tuple[type[nn.Module], ...] = (nn.Linear, Conv1D)
"""Classes of modules that are linear maps of the last axis, with or without a bias."""


def is_transposed(module: nn.Module) -> bool:
    """Whether the weight is stored `[inputs, outputs]`."""
    return isinstance(module, Conv1D)


def widths(module: LinearMap) -> tuple[int, int]:
    """Inputs and outputs of a map."""
    inputs, outputs = module.weight.shape if is_transposed(module) else module.weight.shape[::-1]
    return inputs, outputs


def turned(module: nn.Module, weight: Tensor) -> Tensor:
    """A stored weight as a matrix `[outputs, inputs]`, and such a matrix as it is stored."""
    return weight.mT if is_transposed(module) else weight

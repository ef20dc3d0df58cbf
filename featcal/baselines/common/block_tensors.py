"""Read one block of a model in the precision of the methods' solves."""

from __future__ import annotations

from torch import Tensor

from featcal.formats.weights import Weights
from featcal.models.adapter import Block
from featcal.models.context import Run


def read_double(run: Run, block: Block, weights: Weights) -> dict[str, Tensor]:
    """Return a model's tensors of a block by name inside it, in float64."""
    return {name: tensor.double() for name, tensor in block.local(run.compute.move(weights.read(block.names))).items()}

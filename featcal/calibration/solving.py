"""From the statistics of a block to the tensors that are stored."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from featcal.calibration.moments import BlockMoments
from featcal.errors import NumericalError
from featcal.models.adapter import Block
from featcal.models.run import Run

Watch = Callable[[BlockMoments], None]
"""Sees finished statistics before they are solved; what it keeps of them it takes by `BlockMoments.again`."""
STUDENT = "student"
"""The model under calibration, as its lanes are called."""


def unwatched(moments: BlockMoments) -> None:
    """Looks at nothing."""


def solve(run: Run, moments: BlockMoments, merged: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All modules of finished statistics in closed form (Eqs. 17, 55, 59), one after the other.

    Args:
        merged: the block as merged, by canonical name.

    Returns:
        What is calibrated of the block by canonical name, in the dtype and place of the tensors that it replaces.

    Raises:
        NumericalError: a system that cannot be solved, or a solution that cannot be stored; names the block.
    """
    block = moments.block
    with run.seconds("solve"), named(block):
        own, base = (block.local(run.compute.move(tensors)) for tensors in (merged, run.base.read(block.names)))
        solved = {n: t for group in moments.groups for n, t in group.solve(own, base, moments.config).items()}
        return as_stored(block.canonical(solved), merged)


@contextmanager
def named(block: Block) -> Iterator[None]:
    """Inside the `with`, numerical errors say in which block."""
    try:
        yield
    except NumericalError as error:
        raise NumericalError(f"{block.name}: {error}") from error


def as_stored(solved: Mapping[str, Tensor], old: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The solution in the dtype and place of the tensors it replaces; NumericalError if it does not fit."""
    stored = {name: tensor.to(old[name]) for name, tensor in solved.items()}
    for name, tensor in stored.items():
        if not bool(torch.isfinite(tensor).all()):
            raise NumericalError(
                f"{name}: the solution does not fit {tensor.dtype}; store it wider, or calibrate with a larger lam"
            )
    return stored

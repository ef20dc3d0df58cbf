"""From the statistics of a block to the tensors that are stored."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
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


def anchors(run: Run, block: Block, merged: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A block of the merged model and of the base by name inside it, on the compute device: what solves start from.

    Args:
        merged: by canonical name.
    """
    own, base = (block.local(run.compute.move(tensors)) for tensors in (merged, run.base.read(block.names)))
    return own, base


@contextmanager
def named(place: str) -> Iterator[None]:
    """Inside the `with`, numerical errors say where."""
    try:
        yield
    except NumericalError as error:
        raise NumericalError(f"{place}: {error}") from error


def as_stored(block: Block, old: Mapping[str, Tensor], solved: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Solutions, by name inside the block, under canonical names in the dtype and place of the tensors they replace.

    Raises:
        NumericalError: one does not fit its dtype.
    """
    whole = {name: tensor for one in solved for name, tensor in one.items()}
    stored = {name: tensor.to(old[name]) for name, tensor in block.canonical(whole).items()}
    for name, tensor in stored.items():
        if not bool(torch.isfinite(tensor).all()):
            raise NumericalError(
                f"{name}: the solution does not fit {tensor.dtype}; store it wider, or calibrate with a larger lam"
            )
    return stored

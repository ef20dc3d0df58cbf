"""From the statistics of a block to the tensors that are stored."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from featcal.calibration.block_statistics import BlockMoments
from featcal.calibration.rounding import Rounding, dtype_name, sum_parts
from featcal.calibration.token_rows import Named
from featcal.models.adapter import Block
from featcal.models.context import Run
from featcal.system.errors import NumericalError

Watch = Callable[[BlockMoments], None]
"""Sees finished statistics before they are solved; what it keeps of them it takes by `BlockMoments.with_config`."""
STUDENT = "student"
"""The model under calibration, as its lanes are called."""


@dataclass(frozen=True)
class Solved:
    """What was solved of a block."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    """By canonical name, in the dtype they are stored in."""
    rounding: Rounding = field(default_factory=dict)

    def __or__(self, other: Solved) -> Solved:
        """With other tensors of the same block."""
        return Solved(self.tensors | other.tensors, sum_parts([self.rounding, other.rounding]))


def watch_nothing(moments: BlockMoments) -> None:
    """Looks at nothing."""


def anchors(run: Run, block: Block, merged: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A block of the merged model and of the base by name inside it, on the compute device: what solves start from.

    Args:
        merged: by canonical name.
    """
    own, base = (block.local(run.compute.move(tensors)) for tensors in (merged, run.base.read(block.names)))
    return own, base


@contextmanager
def prefix_errors(place: str) -> Iterator[None]:
    """Inside the `with`, a NumericalError says where: `place` stands in front of it."""
    try:
        yield
    except NumericalError as error:
        raise NumericalError(f"{place}: {error}") from error


def to_stored(block: Block, old: Mapping[str, Tensor], solved: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Solutions, by name inside the block, under canonical names in the dtype and place of the tensors they replace.

    Raises:
        NumericalError: one does not fit its dtype.
    """
    return block.canonical(round_to_stored(block, block.local(old), merge_solutions(solved)))


def round_to_stored(block: Block, old: Named, solved: Named) -> dict[str, Tensor]:
    """Solutions in the dtype and place of the tensors they replace, both by name inside the block.

    Raises:
        NumericalError: one does not fit its dtype.
    """
    stored = {name: tensor.to(old[name]) for name, tensor in solved.items()}
    for name, tensor in stored.items():
        if not bool(torch.isfinite(tensor).all()):
            raise NumericalError(f"{block.name}.{name}: {_misfit(solved[name], tensor.dtype)}")
    return stored


def merge_solutions(solved: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Solutions of several groups of a block."""
    return {name: tensor for one in solved for name, tensor in one.items()}


def _misfit(solution: Tensor, dtype: torch.dtype) -> str:
    """Why a solution is not finite in a dtype, and what to do."""
    largest, limit, kind = float(solution.abs().max()), torch.finfo(dtype).max, dtype_name(dtype)
    if not math.isfinite(largest):
        return "the solution is not finite; calibrate with a larger lam"
    what = "calibrate with a larger lam, or a rho nearer to 1"
    if dtype is torch.float16:
        what = f"store the merged model in bfloat16 or float32 (a merge recipe has `dtype` for that), or {what}"
    return f"the solution does not fit {kind}: its largest value is {largest:.6g}, {kind} ends at {limit:.6g}; {what}"

"""Turn the statistics of a block into stored tensors: the solve of Algorithm 1, and the rounding after it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from featcal.calibration.anchor import read_merged_and_base
from featcal.calibration.block_statistics import BlockStatistics
from featcal.calibration.column_rounding import rounder_of
from featcal.calibration.distributed import collect_sums, share_solutions
from featcal.calibration.linear_group import LinearGroup
from featcal.calibration.norm_groups import NormGroup
from featcal.calibration.rounding import Rounding, dtype_name, rounding, sum_parts
from featcal.calibration.token_rows import Named
from featcal.formats.grid import SCALE
from featcal.models.adapter import Block
from featcal.models.context import Run
from featcal.system.errors import NumericalError

Watch = Callable[[BlockStatistics], None]
"""Function that is called with complete statistics before their solve; it can keep them by
`BlockStatistics.with_config`.
"""


@dataclass(frozen=True)
class SolvedTensors:
    """Solved tensors of a block in their storage form."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    """Tensors by canonical name, in their storage dtype."""
    rounding: Rounding = field(default_factory=dict)
    scales: dict[str, Tensor] = field(default_factory=dict)
    """Scales of quantised weights, by the name of the weight with `SCALE`."""

    def __or__(self, other: SolvedTensors) -> SolvedTensors:
        """Add other tensors of the same block."""
        lost = sum_parts([self.rounding, other.rounding])
        return SolvedTensors(self.tensors | other.tensors, lost, self.scales | other.scales)

    @classmethod
    def from_finished(
        cls, finished: Mapping[str, Tensor], merged: Mapping[str, Tensor], lost: Rounding
    ) -> SolvedTensors:
        """Return the solved tensors of a block that an earlier run finished: those that differ from the merged
        model."""
        # The others stay where a run without interruption has them in memory: this can show in the last bit.
        own = {name: tensor for name, tensor in finished.items() if name in merged and not tensor.equal(merged[name])}
        return cls(own, lost, {name: tensor for name, tensor in finished.items() if name not in merged})


def watch_nothing(statistics: BlockStatistics) -> None:
    """Ignore the statistics (the default of `watch`)."""


def solve_block(run: Run, statistics: BlockStatistics, merged: Mapping[str, Tensor]) -> SolvedTensors:
    """Solve all groups of a block (Algorithm 1, lines 9 to 15), in their storage dtype.

    With several ranks each solves some groups.

    Args:
        statistics: complete statistics, whose sums are released.
        merged: tensors of the merged model's block by canonical name.

    Raises:
        NumericalError: a system cannot be solved, or a solution does not fit its dtype; the message names the block.
    """
    block, solved, rounder = statistics.block, dict[str, Tensor](), rounder_of(statistics.config)
    with run.seconds("solve"), prefix_errors(run.adapter.name_of(block)):
        owned: list[LinearGroup | NormGroup] = collect_sums(run.ranks, statistics.groups)
        solving = {name for group in owned for name in group.names}
        rho = statistics.config.rho
        models = read_merged_and_base(run, block, merged, rho, solving) if owned else ({}, {})
        for group in owned:  # W* and b* of linear maps that share their input, or scale and shift of a norm
            more = (rounder,) if isinstance(group, LinearGroup) else ()
            solved |= group.solve(*models, statistics.config, *more)
        old = block.local(merged)
        stored = round_to_stored(block, old, solved)
        scales = {} if rounder is None else rounder.scales
        free = {name: tensor for name, tensor in solved.items() if f"{name}{SCALE}" not in scales}
        lost = sum_parts([rounding(old, free, stored), {} if rounder is None else rounder.lost])
        stored, lost = share_solutions(run.ranks, statistics.groups, stored | scales, lost)
        tensors = {name: tensor for name, tensor in stored.items() if name in old}
        return SolvedTensors(block.canonical(tensors), lost, _name_scales(block, stored))


def _name_scales(block: Block, stored: Named) -> dict[str, Tensor]:
    """Return the scales among tensors by name inside the block, under the canonical name of their weight."""
    names = {f"{name}.weight{SCALE}": f"{block.stored_name(name)}.weight{SCALE}" for name in block.linears}
    return {names[name]: tensor.cpu() for name, tensor in stored.items() if name in names}


@contextmanager
def prefix_errors(place: str) -> Iterator[None]:
    """Prefix the message of a NumericalError inside the `with` with a place, such as a block and a task."""
    try:
        yield
    except NumericalError as error:
        raise NumericalError(f"{place}: {error}") from error


def to_stored(block: Block, old: Mapping[str, Tensor], solved: Named) -> dict[str, Tensor]:
    """Return solutions, by name inside the block, under canonical names, in the dtype and layout of the replaced
    tensors.

    Raises:
        NumericalError: a solution does not fit its dtype.
    """
    return block.canonical(round_to_stored(block, block.local(old), solved))


def round_to_stored(block: Block, old: Named, solved: Named) -> dict[str, Tensor]:
    """Return solutions in the dtype and layout of the replaced tensors, both by name inside the block.

    Raises:
        NumericalError: a solution does not fit its dtype.
    """
    stored = {name: tensor.to(old[name]) for name, tensor in solved.items()}
    for name, tensor in stored.items():
        if not bool(torch.isfinite(tensor).all()):
            raise NumericalError(f"{block.name}.{name}: {_misfit(solved[name], tensor.dtype)}")
    return stored


def _misfit(solution: Tensor, dtype: torch.dtype) -> str:
    """Explain why a solution is not finite in a dtype, and what to do."""
    largest, limit, kind = float(solution.abs().max()), torch.finfo(dtype).max, dtype_name(dtype)
    if not math.isfinite(largest):
        return "the solution is not finite; calibrate with a larger lam"
    what = "calibrate with a larger lam, or a rho nearer to 1"
    if dtype is torch.float16:
        what = f"store the merged model in bfloat16 or float32 (a merge recipe has `dtype` for that), or {what}"
    return f"the solution does not fit {kind}: its largest value is {largest:.6g}, {kind} ends at {limit:.6g}; {what}"

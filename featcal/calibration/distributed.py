"""Distribute the statistics and solves of a block over ranks, each of which has its own tasks. Sums are additive over
tasks (Eqs. 17, 55 and 58), and moments over the samples of a task. A task's weight (Eq. 14) and targets are computed
after its moments are combined. Every group of maps has an owner rank, which gets the sums of the group, solves it, and
sends the solution to all. A single process skips all of this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from featcal.calibration.block_statistics import BlockStatistics
from featcal.calibration.linear_group import LinearGroup
from featcal.calibration.norm_groups import NormGroup
from featcal.calibration.prior import TaskVectors
from featcal.calibration.rounding import Rounding, sum_parts
from featcal.calibration.token_rows import Named, TaskRows
from featcal.system.distributed import Ranks, owners_of

T = TypeVar("T")
Group = LinearGroup | NormGroup


def shared_rows(ranks: Ranks, rows: Mapping[str, TaskRows]) -> Mapping[str, TaskRows]:
    """Return the token rows, with the counts of the whole task if this rank has a part of it."""
    if not ranks.several:
        return rows
    counts = ranks.all_gather({task: own.counts() for task, own in rows.items()})
    return {task: own.part_of(task, [one[task] for one in counts if task in one]) for task, own in rows.items()}


def end_task(
    ranks: Ranks,
    statistics: BlockStatistics,
    expert: Named,
    vectors: TaskVectors | None = None,
    directions: Named | None = None,
) -> None:
    """Add a task to the sums. If a team of ranks shares the task, each of them finishes some groups.

    Args:
        expert: tensors of the expert's block by name inside it.
        vectors: task vectors for the prior (`LinearGroup.add_prior`); None without a prior.
        directions: margin gradients of the expert, only in a single process (`BlockStatistics.end_task`).

    Raises:
        InputError: tokens of the task were left out.
        NumericalError: no token of the task has weight, or the sums are not finite; the message names the modules.
    """
    team, groups = ranks.team, statistics.groups
    if len(team) == 1:
        statistics.end_task(expert, vectors, directions=directions)
        return
    # The owner ends its group where it can: then its sums need not be sent again.
    ends = [owner if owner in team else team[place % len(team)] for place, owner in enumerate(_owners(ranks, groups))]
    _collect(ranks, team, ends, [team] * len(groups), [(group.current, group.merge_part) for group in groups])
    statistics.end_task(expert, vectors, [place for place, rank in enumerate(ends) if rank == ranks.rank])
    for group, rank in zip(groups, ends, strict=True):
        if rank != ranks.rank:
            group.let_go()


def collect_sums(ranks: Ranks, groups: Sequence[Group]) -> list[Group]:
    """Send the sums over all tasks to the owners of the groups; return this rank's groups, which it solves."""
    owners = _owners(ranks, groups)
    if ranks.several:
        givers = [ranks.finishers(owner, place) for place, owner in enumerate(owners)]
        sums = [
            (group.sums, group.sums.merge) if ranks.rank in given else (None, _nothing)
            for group, given in zip(groups, givers, strict=True)
        ]
        _collect(ranks, range(ranks.size), owners, givers, sums)
    return [group for group, owner in zip(groups, owners, strict=True) if owner == ranks.rank]


def share_solutions(
    ranks: Ranks, groups: Sequence[Group], stored: dict[str, Tensor], lost: Rounding
) -> tuple[dict[str, Tensor], Rounding]:
    """Return all solutions of a block, by name inside it, and their rounding errors.

    Args:
        groups: all of the block; their statistics are released.
        stored: this rank's solutions, in their storage dtype. Parts of one tensor may have several owners.
        lost: rounding errors, measured by the owners, which alone have the unrounded solutions.
    """
    if not ranks.several:
        return stored, lost
    for group in groups:
        group.let_go()
    found: dict[str, Tensor] = {}
    for owner in sorted(set(_owners(ranks, groups))):
        found |= ranks.broadcast_tensors(stored if owner == ranks.rank else None, owner)
    return found, sum_parts(ranks.all_gather(lost))


def _nothing(theirs: Any) -> None:
    """Do nothing, for a group without incoming parts."""


def _owners(ranks: Ranks, groups: Sequence[Group]) -> list[int]:
    """Return the rank that solves each group, balanced by the number of multiplications in
    factorisation and substitution.
    """
    costs = [g.inputs**2 * (g.inputs / 3 + 2 * g.outputs) if isinstance(g, LinearGroup) else 1.0 for g in groups]
    return owners_of(costs, ranks.size)


def _collect(
    ranks: Ranks,
    members: Sequence[int],
    owners: Sequence[int],
    givers: Sequence[Sequence[int]],
    items: Sequence[tuple[Any, Callable[[Any], None]]],
) -> None:
    """Collect statistics with `Ranks.collect`; `items` are this rank's, with the functions that add another rank's."""

    def add(place: int, tensors: list[Tensor]) -> None:
        statistics, take = items[place]
        take(_rebuild(statistics, iter(tensors)))

    ranks.collect(members, owners, givers, [[] if one is None else _tensors(one) for one, _ in items], add)


def _tensors(statistics: Any) -> list[Tensor]:
    """Return the tensors of a dataclass of statistics and of its parts, in the order of its fields."""
    found: list[Tensor] = []
    for one in fields(statistics):
        value = getattr(statistics, one.name)
        if isinstance(value, Tensor):
            found.append(value)
        elif is_dataclass(value):
            found += _tensors(value)
        elif isinstance(value, list):
            found += [tensor for part in value for tensor in ([part] if isinstance(part, Tensor) else _tensors(part))]
        elif isinstance(value, int | float):
            # Ranks exchange tensors alone; float64 holds every count exactly.
            found.append(torch.tensor([value], dtype=torch.float64))
    return found


def _rebuild(like: T, tensors: Iterator[Tensor]) -> T:
    """Rebuild statistics like others from the tensors of `_tensors`."""
    found: dict[str, Any] = {}
    for one in fields(like):  # type: ignore[arg-type]
        value = getattr(like, one.name)
        if isinstance(value, Tensor):
            found[one.name] = next(tensors)
        elif is_dataclass(value):
            found[one.name] = _rebuild(value, tensors)
        elif isinstance(value, list):
            found[one.name] = [next(tensors) if isinstance(p, Tensor) else _rebuild(p, tensors) for p in value]
        elif isinstance(value, int | float):
            found[one.name] = type(value)(next(tensors).item())
    return replace(like, **found)  # type: ignore[type-var]

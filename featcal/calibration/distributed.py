"""Share a block whose statistics several ranks count, each on its own tasks: who finishes, owns and solves it.

Sums over tasks are additive (Eqs. 17, 55 and 58), moments of a task over its samples. A task's weight (Eq. 14) and
targets are made once its moments are together. Every group of maps has an owner, which gets its sums, solves it, and
sends what it solved to all. In a process that is alone nothing of this happens.
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
    """Return the rows that count, with the counts of the whole task where this rank has a part of it."""
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
    """Fold a task into the sums. Where the ranks of a team count its parts, each of them ends some groups.

    Args:
        expert: tensors of the expert's block by name inside it.
        vectors: those that a prior is made of (`LinearGroup.add_prior`); None without a prior.
        directions: of the expert's decisions, in a process that is alone (`BlockStatistics.end_task`).

    Raises:
        InputError: tokens of the task were not counted.
        NumericalError: no token of the task counts, or what was counted is not finite; names the modules.
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
    """Bring the sums over all tasks to the owners of the groups; return the groups of this rank, which solves them."""
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
    """Return all solutions of a block, by name inside it, and the cost of storing them.

    Args:
        groups: all of the block; they give up their statistics.
        stored: what this rank solved, in the dtype it is stored in. Parts of one tensor may have several owners.
        lost: measured by the owners, who alone have more digits than are stored.
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
    """Take nothing, where no part of a group comes."""


def _owners(ranks: Ranks, groups: Sequence[Group]) -> list[int]:
    """Return the rank that solves each group, shared out by the multiplications of factor and substitution."""
    costs = [g.inputs**2 * (g.inputs / 3 + 2 * g.outputs) if isinstance(g, LinearGroup) else 1.0 for g in groups]
    return owners_of(costs, ranks.size)


def _collect(
    ranks: Ranks,
    members: Sequence[int],
    owners: Sequence[int],
    givers: Sequence[Sequence[int]],
    items: Sequence[tuple[Any, Callable[[Any], None]]],
) -> None:
    """Bring statistics together by `Ranks.collect`; `items` are what this rank has of a group and what takes another
    rank's."""

    def add(place: int, tensors: list[Tensor]) -> None:
        statistics, take = items[place]
        take(_rebuild(statistics, iter(tensors)))

    ranks.collect(members, owners, givers, [[] if one is None else _tensors(one) for one, _ in items], add)


def _tensors(statistics: Any) -> list[Tensor]:
    """Return the numbers of a dataclass of statistics, those of its parts included, as tensors in the order of its
    fields."""
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
    """Make statistics like others from the tensors that `_tensors` gave of them."""
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

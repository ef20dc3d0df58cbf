"""A block whose statistics several ranks count, each on its own tasks: who finishes, who owns, who solves.

Sums over tasks are additive (Eqs. 17, 55 and 58), moments of a task over its samples; what is made of a whole task, its
weight (Eq. 14) and its targets, is made once its moments are together. Every group of maps has an owner, which gets its
sums, solves it, and sends what it solved to all. Alone, nothing of this happens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from featcal.calibration.block_statistics import BlockMoments
from featcal.calibration.linear_group import LinearGroup
from featcal.calibration.norm_groups import NormGroup
from featcal.calibration.prior import TaskVectors
from featcal.calibration.rounding import rounding, sum_parts
from featcal.calibration.store import Solved, anchors, merge_solutions, prefix_errors, round_to_stored
from featcal.calibration.token_rows import Named, TaskRows
from featcal.models.adapter import Block
from featcal.models.context import Run
from featcal.system.distributed import Ranks, owners_of

T = TypeVar("T")
Group = LinearGroup | NormGroup


def shared_rows(ranks: Ranks, rows: Mapping[str, TaskRows]) -> Mapping[str, TaskRows]:
    """Which tokens count, with those of the whole task where this rank has a part of it."""
    if not ranks.several:
        return rows
    counts = ranks.all_gather({task: own.counts() for task, own in rows.items()})
    return {task: own.part_of(task, [one[task] for one in counts if task in one]) for task, own in rows.items()}


def end_task(ranks: Ranks, moments: BlockMoments, expert: Named, vectors: TaskVectors | None = None) -> None:
    """Fold a task into the sums, where its parts are counted by the ranks of a team: each of them ends some groups.

    Args:
        vectors: what a prior is made of (`LinearGroup.add_prior`); None where there is none.

    Raises:
        InputError, NumericalError: as `BlockMoments.end_task`.
    """
    team, groups = ranks.team, moments.groups
    if len(team) == 1:
        moments.end_task(expert, vectors)
        return
    owners = _owners(ranks, groups)
    ends = [owner if owner in team else team[place % len(team)] for place, owner in enumerate(owners)]
    _collect(ranks, team, ends, [team] * len(groups), [(group.current, _make_adder(group)) for group in groups])
    moments.end_task(expert, vectors, [place for place, rank in enumerate(ends) if rank == ranks.rank])
    for group, rank in zip(groups, ends, strict=True):
        if rank != ranks.rank:
            group.let_go()


def _make_adder(group: Group) -> Callable[[Any], None]:
    """Takes over another rank's part of the current task."""

    def add(theirs: Any) -> None:
        if isinstance(group, LinearGroup):
            group.current.merge(theirs, str(group))
        else:
            group.current.merge(theirs)

    return add


def solve(run: Run, block: Block, merged: Named, moments: BlockMoments) -> Solved:
    """The solutions of all groups of a block, as they are stored, and what that costs.

    Args:
        merged: its tensors by canonical name.

    Raises:
        NumericalError: a system that cannot be solved, or a solution that does not fit its dtype; names the block.
    """
    with run.seconds("solve"), prefix_errors(block.name):
        return _solve_shared(run, block, merged, moments)


def _solve_shared(run: Run, block: Block, merged: Named, moments: BlockMoments) -> Solved:
    """As `solve`; what storing costs is measured by the owners, who alone have more digits than are stored. Parts of
    one tensor may have several owners."""
    ranks, groups, config = run.ranks, moments.groups, moments.config
    owners = _owners(ranks, groups)
    if ranks.several:
        givers = [ranks.finishers(owner, place) for place, owner in enumerate(owners)]
        sums = [
            (group.sums, group.sums.merge) if ranks.rank in given else (None, _nothing)
            for group, given in zip(groups, givers, strict=True)
        ]
        _collect(ranks, range(ranks.size), owners, givers, sums)
    mine = [group for group, owner in zip(groups, owners, strict=True) if owner == ranks.rank]
    own, base = anchors(run, block, merged) if mine else ({}, {})
    solved = merge_solutions(group.solve(own, base, config) for group in mine)
    old = block.local(merged)
    stored = round_to_stored(block, old, solved)
    lost = rounding(old, solved, stored)
    if not ranks.several:
        return Solved(block.canonical(stored), lost)
    for group in groups:
        group.let_go()
    spread = [ranks.broadcast_tensors(stored if owner == ranks.rank else None, owner) for owner in sorted(set(owners))]
    return Solved(block.canonical(merge_solutions(spread)), sum_parts(ranks.all_gather(lost)))


def _nothing(theirs: Any) -> None:
    """Nothing comes to who has no part of a group."""


def _owners(ranks: Ranks, groups: Sequence[Group]) -> list[int]:
    """Who solves what, by the multiplications of factor and substitution."""
    costs = [g.inputs**2 * (g.inputs / 3 + 2 * g.outputs) if isinstance(g, LinearGroup) else 1.0 for g in groups]
    return owners_of(costs, ranks.size)


def _collect(
    ranks: Ranks,
    members: Sequence[int],
    owners: Sequence[int],
    givers: Sequence[Sequence[int]],
    items: Sequence[tuple[Any, Callable[[Any], None]]],
) -> None:
    """`Ranks.collect` of statistics; `items` are what this rank has of a group and what takes another rank's."""

    def add(place: int, tensors: list[Tensor]) -> None:
        statistics, take = items[place]
        take(_rebuild(statistics, iter(tensors)))

    ranks.collect(members, owners, givers, [[] if one is None else _tensors(one) for one, _ in items], add)


def _tensors(statistics: Any) -> list[Tensor]:
    """The numbers of a dataclass of statistics, those of its parts included, as tensors in the order of its fields."""
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
            found.append(torch.tensor([value], dtype=torch.float64))
    return found


def _rebuild(like: T, tensors: Iterator[Tensor]) -> T:
    """The inverse of `_tensors`."""
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

"""One calibration by several processes: which rank has which tasks, and what the ranks send to each other.

`torchrun --nproc-per-node N -m featcal calibrate …` starts the processes, on one machine or on many. A rank has whole
tasks where there are at least as many tasks as ranks: every expert, the largest thing that is read, is then read by one
rank, and what is not additive over samples (Eq. 14) stays where the samples are. Where there are fewer tasks than ranks
every rank has one task, which the ranks of its team share sample by sample. Sums go to the rank that owns them.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import pairwise
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from featcal.system.errors import InputError

T = TypeVar("T")
Teams = Mapping[str, tuple[int, ...]]
"""The ranks that share a task, by task."""
PATIENCE = timedelta(minutes=30)
"""What the others may take to the next exchange. A rank that has died is noticed at once, by its closed connection."""
LOST = (
    "another process of this run has ended, so the others stop; what it said, if anything, is above or in its own log. "
    "Finished blocks are kept: run the same command again with --resume, with any number of processes"
)


def teams_of(tasks: Iterable[str], size: int) -> dict[str, tuple[int, ...]]:
    """Who has which task: neighbouring tasks to one rank, or neighbouring ranks to one task, as evenly as it goes.

    >>> teams_of("abcde", 2)
    {'a': (0,), 'b': (0,), 'c': (0,), 'd': (1,), 'e': (1,)}
    >>> teams_of("ab", 3)
    {'a': (0, 1), 'b': (2,)}
    """
    names = list(tasks)
    if len(names) >= size:
        return {name: (rank,) for rank, (start, end) in enumerate(parts(len(names), size)) for name in names[start:end]}
    return {name: tuple(range(*part)) for name, part in zip(names, parts(size, len(names)), strict=True)}


def parts(count: int, size: int) -> list[tuple[int, int]]:
    """`count` things in a row cut into `size` pieces, the first ones longer by one where it does not come out even.

    >>> parts(5, 3)
    [(0, 2), (2, 4), (4, 5)]
    """
    short, longer = divmod(count, size)
    starts = [one * short + min(one, longer) for one in range(size + 1)]
    return list(pairwise(starts))


def owners_of(costs: Sequence[float], size: int) -> list[int]:
    """Who solves what: the costliest first, each to whoever has least to do.

    >>> owners_of([1, 5, 3, 3], 2)
    [0, 0, 1, 1]
    """
    load, owners = [0.0] * size, [0] * len(costs)
    for item in sorted(range(len(costs)), key=lambda item: -costs[item]):
        owners[item] = min(range(size), key=lambda rank: load[rank])
        load[owners[item]] += costs[item]
    return owners


@dataclass
class Traffic:
    """Bytes that went between this rank and others, as this rank handed them over or was given them."""

    sent: int = 0
    received: int = 0


@dataclass(frozen=True)
class Ranks:
    """This process among those of a run. Alone, every exchange is nothing at all."""

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    """Where tensors have to be to be sent: CUDA with NCCL, the CPU with Gloo."""
    teams: Teams = field(default_factory=dict)
    traffic: Traffic = field(default_factory=Traffic)

    @property
    def several(self) -> bool:
        return self.size > 1

    def sharing(self, tasks: Iterable[str]) -> Ranks:
        """The same ranks with these tasks to share."""
        return replace(self, teams=teams_of(tasks, self.size))

    def mine(self, tasks: Mapping[str, T]) -> dict[str, T]:
        """Of what there is of every task, what this rank has a part of."""
        return {task: one for task, one in tasks.items() if not self.several or self.rank in self.teams[task]}

    def select_led(self, tasks: Mapping[str, T]) -> dict[str, T]:
        """Of what there is of every task, what this rank alone answers for; of a task that nobody has, rank 0."""
        return {task: one for task, one in tasks.items() if not self.several or self._leader(task) == self.rank}

    def _leader(self, task: str) -> int:
        return self.teams.get(task, (0,))[0]

    def part(self, task: str, count: int) -> slice:
        """Of the samples of a task that it has a part of, those of this rank.

        Raises:
            InputError: there are fewer than ranks that share them.
        """
        team = self.teams.get(task, (self.rank,))
        if count < len(team):
            raise InputError(f"task '{task}' has {count} samples for {len(team)} processes; start fewer")
        return slice(*parts(count, len(team))[team.index(self.rank)])

    @property
    def team(self) -> tuple[int, ...]:
        """The ranks that share this rank's task; of whole tasks this one alone."""
        return next((team for team in self.teams.values() if self.rank in team), (self.rank,))

    def finishers(self, owner: int, item: int) -> list[int]:
        """One rank of every team, which finishes an item of the team's task: its owner, where that is among them."""
        return [owner if owner in team else team[item % len(team)] for team in dict.fromkeys(self.teams.values())]

    def all_gather(self, own: T) -> list[T]:
        """Small things of all ranks, in their order."""
        if not self.several:
            return [own]
        found: list[Any] = [None] * self.size
        with _report_lost_peer():
            dist.all_gather_object(found, own)
        return found

    def team_sum(self, own: Tensor) -> Tensor:
        """Small sums of this rank and of those that share its task, added in the order of the ranks; alone its own.

        Where some task is shared every rank has one task, and all ranks ask for the same sums in the same order.
        """
        if all(len(team) == 1 for team in self.teams.values()):
            return own
        found = self.all_gather(own.cpu())
        return torch.stack([found[rank] for rank in self.team]).sum(0).to(own.device)

    def union(self, own: Mapping[str, T]) -> dict[str, T]:
        """What the ranks have by name, each something else, all together."""
        return {name: one for theirs in self.all_gather(dict(own)) for name, one in theirs.items()}

    def broadcast_object(self, word: T | None, source: int) -> T | None:
        """A small thing of one rank, to all."""
        said = [word]
        if self.several:
            with _report_lost_peer():
                dist.broadcast_object_list(said, source)
        return said[0]

    def broadcast_tensors(self, tensors: Mapping[str, Tensor] | None, source: int) -> dict[str, Tensor]:
        """Tensors of one rank, to all, in its order and on the CPU; None from the others."""
        alike = None if tensors is None else {name: (t.shape, t.dtype) for name, t in tensors.items()}
        found: dict[str, Tensor] = {}
        for name, (shape, dtype) in (self.broadcast_object(alike, source) or {}).items():
            if tensors is not None:
                tensor = tensors[name].to(self.device).contiguous()
                self.traffic.sent += _bytes(tensor)
            else:
                tensor = torch.empty(shape, dtype=dtype, device=self.device)
                self.traffic.received += _bytes(tensor)
            with _report_lost_peer():
                dist.broadcast(tensor, source)
            found[name] = tensor.cpu()
        return found

    def collect(
        self,
        members: Sequence[int],
        owners: Sequence[int],
        givers: Sequence[Collection[int]],
        items: Sequence[Sequence[Tensor]],
        add: Callable[[int, list[Tensor]], None],
    ) -> None:
        """Send every item to its owner, pair by pair: in round k each of n members sends to the k-th after it.

        What comes is added in the order of the rounds, so sums are the same whenever they are made by as many ranks.

        Args:
            members: this rank and those it exchanges with, the same list in all of them.
            owners, givers: by item, who gets it and who has something of it.
            items: by item the tensors that are sent, or whose like comes.
            add: called with the position of an item and what has come of it.
        """
        at = members.index(self.rank)
        for step in range(1, len(members)):
            to, source = members[(at + step) % len(members)], members[(at - step) % len(members)]
            own = [i for i, owner in enumerate(owners) if owner == to and self.rank in givers[i]]
            coming = {
                i: [torch.empty_like(tensor, device=self.device) for tensor in items[i]]
                for i, owner in enumerate(owners)
                if owner == self.rank and source in givers[i]
            }
            leaving = [tensor.to(self.device).contiguous() for i in own for tensor in items[i]]
            self._swap(leaving, to, [tensor for one in coming.values() for tensor in one], source)
            for i, tensors in coming.items():
                add(i, [tensor.to(like.device) for tensor, like in zip(tensors, items[i], strict=True)])

    def _swap(self, leaving: Sequence[Tensor], to: int, coming: Sequence[Tensor], source: int) -> None:
        """Send to one rank and receive from another."""
        self.traffic.sent += sum(map(_bytes, leaving))
        self.traffic.received += sum(map(_bytes, coming))
        moves = [dist.P2POp(dist.isend, tensor, to, tag=tag) for tag, tensor in enumerate(leaving)]
        moves += [dist.P2POp(dist.irecv, tensor, source, tag=tag) for tag, tensor in enumerate(coming)]
        with _report_lost_peer():
            for move in dist.batch_isend_irecv(moves) if moves else ():
                move.wait()


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


@contextmanager
def _report_lost_peer() -> Iterator[None]:
    """Inside the `with`, a broken exchange is an error of this run and no traceback."""
    try:
        yield
    except RuntimeError as error:  # torch has no narrower class for a peer that is gone
        raise InputError(f"{LOST} ({str(error).splitlines()[0].rpartition('] ')[2].partition('. ')[0]})") from error


ALONE = Ranks()
_here = ALONE


def current_ranks() -> Ranks:
    """Return the ranks that this process is one of: those of the `join_process_group` around it."""
    return _here


def world_size() -> int:
    """How many processes the launcher has started; 1 where there is none.

    Raises:
        InputError: the launcher's variable is no number.
    """
    said = os.environ.get("WORLD_SIZE", "1")
    if not said.isdecimal() or said == "0":
        raise InputError(f"WORLD_SIZE is '{said}', not a number of processes; start with torchrun")
    return int(said)


def own_device(device: str) -> str:
    """The device of this process: of several on a machine with GPUs one each."""
    if world_size() == 1 or device not in ("auto", "cuda") or not torch.cuda.is_available():
        return device
    return f"cuda:{int(os.environ.get('LOCAL_RANK', '0')) % torch.cuda.device_count()}"


@contextmanager
def join_process_group(device: str) -> Iterator[Ranks]:
    """Inside the `with`, this process is one of those that torchrun has started; alone where it has started one.

    The first rank that fails says so, the others end without a word and with status 1, as after SIGTERM, which torchrun
    sends to them. They need not ask each other: a rank that has ended breaks every exchange with it.

    Args:
        device: of this process, as `own_device` gives it.

    Raises:
        InputError: the processes do not find each other.
    """
    global _here
    if world_size() == 1:
        yield ALONE
        return
    from torch.distributed.rendezvous import rendezvous  # not in every build of torch

    crowded = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > torch.cuda.device_count()
    on_gpu = device != "cpu" and not crowded
    if on_gpu:
        torch.cuda.set_device(device)
    try:
        store, rank, size = next(rendezvous("env://", timeout=PATIENCE))
        backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
        dist.init_process_group(backend, timeout=PATIENCE, store=store, rank=rank, world_size=size)
    except (RuntimeError, ValueError) as error:
        raise InputError(
            f"the {world_size()} processes do not find each other: {error}; start them with torchrun"
        ) from error
    _here = Ranks(rank, size, torch.device(device if on_gpu else "cpu"))
    try:
        with _ends_on_sigterm():
            yield _here
        dist.destroy_process_group()
    except BaseException as error:
        if _first_to_end(store):
            raise
        raise SystemExit(130 if isinstance(error, KeyboardInterrupt) else 1) from None
    finally:
        _here = ALONE


def _first_to_end(store: Any) -> bool:
    """Whether no other rank has failed before; true where nobody can be asked any more."""
    with suppress(RuntimeError):
        return bool(store.add("failed", 1) == 1)
    return True


@contextmanager
def _ends_on_sigterm() -> Iterator[None]:
    """Inside the `with`, SIGTERM is an error with a message; only a main thread may ask for that. A process that ends
    by an error is not to be interrupted by a SIGTERM while it says so."""

    def end(number: int, frame: FrameType | None) -> None:
        raise InputError(f"stopped by SIGTERM: the run was cancelled, or {LOST}")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    except BaseException:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise
    signal.signal(signal.SIGTERM, before)

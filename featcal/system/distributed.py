"""Run one calibration in several processes: say which rank has which tasks, and exchange sums between ranks.

`torchrun --nproc-per-node N -m featcal calibrate …` starts the processes, on one machine or on several. If there are at
least as many tasks as ranks, each rank has whole tasks: every expert, the largest thing to read, is then read by one
rank, and statistics that are not additive over samples (Eq. 14) need no exchange. If there are fewer tasks than ranks,
each rank has one task and shares its samples with the other ranks of its team. Sums go to the rank that owns them.
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
"""Longest wait for the next exchange. A rank that has died is noticed at once, because its connection closes."""
LOST = (
    "another process of this run has ended, so the others stop; what it said, if anything, is above or in its own log. "
    "Finished blocks are kept: run the same command again with --resume, with any number of processes"
)


def teams_of(tasks: Iterable[str], size: int) -> dict[str, tuple[int, ...]]:
    """Return the ranks of every task: neighbouring tasks to one rank, or neighbouring ranks to one task, evenly.

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
    """Return `size` half-open ranges that cut `count` items in a row, the first ones longer by one for the rest.

    >>> parts(5, 3)
    [(0, 2), (2, 4), (4, 5)]
    """
    short, longer = divmod(count, size)
    starts = [one * short + min(one, longer) for one in range(size + 1)]
    return list(pairwise(starts))


def owners_of(costs: Sequence[float], size: int) -> list[int]:
    """Return the rank that solves each item: the costliest items first, each to the rank with the least to do.

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
    """Bytes that this rank has sent to and received from other ranks."""

    sent: int = 0
    received: int = 0


@dataclass(frozen=True)
class Ranks:
    """This process among the processes of a run; a process that runs alone exchanges nothing."""

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    """Device that tensors must be on to be sent: CUDA with NCCL, the CPU with Gloo."""
    teams: Teams = field(default_factory=dict)
    traffic: Traffic = field(default_factory=Traffic)

    @property
    def several(self) -> bool:
        return self.size > 1

    def sharing(self, tasks: Iterable[str]) -> Ranks:
        """Return these ranks with the given tasks divided among them."""
        return replace(self, teams=teams_of(tasks, self.size))

    def mine(self, tasks: Mapping[str, T]) -> dict[str, T]:
        """Return the entries of the tasks that this rank has a part of."""
        return {task: one for task, one in tasks.items() if not self.several or self.rank in self.teams[task]}

    def select_led(self, tasks: Mapping[str, T]) -> dict[str, T]:
        """Return the entries of the tasks that this rank leads; rank 0 leads a task that no rank has."""
        return {task: one for task, one in tasks.items() if not self.several or self._leader(task) == self.rank}

    def _leader(self, task: str) -> int:
        return self.teams.get(task, (0,))[0]

    def part(self, task: str, count: int) -> slice:
        """Return the slice of a task's samples that this rank has.

        Raises:
            InputError: the task has fewer samples than ranks that share it.
        """
        team = self.teams.get(task, (self.rank,))
        if count < len(team):
            raise InputError(f"task '{task}' has {count} samples for {len(team)} processes; start fewer")
        return slice(*parts(count, len(team))[team.index(self.rank)])

    @property
    def team(self) -> tuple[int, ...]:
        """Return the ranks that share this rank's task; this rank alone if it has whole tasks."""
        return next((team for team in self.teams.values() if self.rank in team), (self.rank,))

    def finishers(self, owner: int, item: int) -> list[int]:
        """Return one rank of every team to finish an item of the team's task: the item's owner if it is in the team."""
        # `item % len(team)` spreads the work of teams without the owner over their ranks.
        return [owner if owner in team else team[item % len(team)] for team in dict.fromkeys(self.teams.values())]

    def all_gather(self, own: T) -> list[T]:
        """Return the small objects of all ranks, in the order of the ranks."""
        if not self.several:
            return [own]
        found: list[Any] = [None] * self.size
        with _report_lost_peer():
            dist.all_gather_object(found, own)
        return found

    def team_sum(self, own: Tensor) -> Tensor:
        """Return the sum of small tensors over this rank's team, added in the order of the ranks.

        If some task is shared, every rank has one task, and all ranks ask for the same sums in the same order.
        """
        if all(len(team) == 1 for team in self.teams.values()):
            return own
        # Gathered instead of reduced: the order of a reduction depends on the backend, and with it the last bits.
        found = self.all_gather(own.cpu())
        return torch.stack([found[rank] for rank in self.team]).sum(0).to(own.device)

    def union(self, own: Mapping[str, T]) -> dict[str, T]:
        """Return the mappings of all ranks as one; their keys differ."""
        return {name: one for theirs in self.all_gather(dict(own)) for name, one in theirs.items()}

    def broadcast_object(self, word: T | None, source: int) -> T | None:
        """Return the small object of rank `source`, in every rank."""
        words = [word]
        if self.several:
            with _report_lost_peer():
                dist.broadcast_object_list(words, source)
        return words[0]

    def broadcast_tensors(self, tensors: Mapping[str, Tensor] | None, source: int) -> dict[str, Tensor]:
        """Return the tensors of rank `source` on the CPU, in its order, in every rank; the other ranks pass None."""
        alike = None if tensors is None else {name: (t.shape, t.dtype) for name, t in tensors.items()}
        found: dict[str, Tensor] = {}
        for name, (shape, dtype) in (self.broadcast_object(alike, source) or {}).items():
            if tensors is not None:
                tensor = tensors[name].to(self.device).contiguous()
                self.traffic.sent += tensor.nbytes
            else:
                tensor = torch.empty(shape, dtype=dtype, device=self.device)
                self.traffic.received += tensor.nbytes
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
        """Send every item to its owner, pair by pair: in round k each of n members sends to the k-th member after it.

        Args:
            members: this rank and those it exchanges with, the same list in all of them.
            owners, givers: for each item, the rank that gets it and the ranks that have a part of it.
            items: for each item the tensors to send, or tensors of the shape and dtype of those to receive.
            add: called with the position of an item and the tensors received for it.
        """
        at = members.index(self.rank)
        # Parts are added in the order of the rounds, so sums are equal to the bit whenever as many ranks make them.
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
        self.traffic.sent += sum(one.nbytes for one in leaving)
        self.traffic.received += sum(one.nbytes for one in coming)
        moves = [dist.P2POp(dist.isend, tensor, to, tag=tag) for tag, tensor in enumerate(leaving)]
        moves += [dist.P2POp(dist.irecv, tensor, source, tag=tag) for tag, tensor in enumerate(coming)]
        with _report_lost_peer():
            for move in dist.batch_isend_irecv(moves) if moves else ():
                move.wait()


@contextmanager
def _report_lost_peer() -> Iterator[None]:
    """Turn a broken exchange inside the `with` into an InputError of this run."""
    try:
        yield
    except RuntimeError as error:  # torch has no narrower class for a peer that is gone
        raise InputError(f"{LOST} ({str(error).splitlines()[0].rpartition('] ')[2].partition('. ')[0]})") from error


ALONE = Ranks()
_here = ALONE


def current_ranks() -> Ranks:
    """Return the ranks that this process belongs to: those of the `join_process_group` around it."""
    return _here


def world_size() -> int:
    """Return the number of processes that the launcher has started; 1 without a launcher.

    Raises:
        InputError: WORLD_SIZE is not a positive whole number.
    """
    text = os.environ.get("WORLD_SIZE", "1")
    if not text.isdecimal() or text == "0":
        raise InputError(f"WORLD_SIZE is '{text}', not a number of processes; start with torchrun")
    return int(text)


def own_device(device: str) -> str:
    """Return the device of this process; several processes on a machine with GPUs get one GPU each, in turn."""
    if world_size() == 1 or device not in ("auto", "cuda") or not torch.cuda.is_available():
        return device
    return f"cuda:{int(os.environ.get('LOCAL_RANK', '0')) % torch.cuda.device_count()}"


@contextmanager
def join_process_group(device: str) -> Iterator[Ranks]:
    """Join the processes that torchrun has started for as long as the `with` lasts; stay alone if there is only one.

    The first rank that fails reports its error; the others end silently with status 1, as after the SIGTERM that
    torchrun sends to them. They need not ask each other: a rank that has ended breaks every exchange with it.

    Args:
        device: of this process, as `own_device` returns it.

    Raises:
        InputError: the processes cannot connect to each other.
    """
    global _here
    if world_size() == 1:
        yield ALONE
        return
    # Imported later, as transformers does, its functions take this group as their default and keep it: Gloo's threads
    # then outlive the group, and one that lets a tensor go while Python shuts down aborts the process.
    import torch.distributed.nn.functional
    from torch.distributed.rendezvous import rendezvous  # not in every build of torch

    # NCCL refuses two ranks on one GPU, so processes that outnumber the GPUs exchange through the CPU.
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
            f"the {world_size()} processes cannot connect to each other: {error}; start them with torchrun"
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
    """Say whether no other rank has failed before; true if the store can no longer be asked."""
    with suppress(RuntimeError):
        return bool(store.add("failed", 1) == 1)
    return True


@contextmanager
def _ends_on_sigterm() -> Iterator[None]:
    """Turn SIGTERM inside the `with` into an InputError with a message."""

    def end(number: int, frame: FrameType | None) -> None:
        raise InputError(f"stopped by SIGTERM: the run was cancelled, or {LOST}")

    # Python allows handlers of signals only in the main thread.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    except BaseException:
        # torchrun sends SIGTERM as soon as one rank ends; it must not interrupt this one while it reports its error.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise
    signal.signal(signal.SIGTERM, before)

"""Work that several ranks do together: processes forked from this one, which keeps their store as torchrun does."""

from __future__ import annotations

import faulthandler
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from featcal.ranks import Ranks, joined

PATIENCE = 60
"""Seconds after which a rank that hangs says where, and ends."""


@dataclass(frozen=True)
class Ended:
    """How the ranks ended, in their order."""

    status: list[int]
    """As `os.waitstatus_to_exitcode` gives it: negative for a signal."""
    said: list[str]
    """What they wrote to stderr."""
    seconds: float


def run_ranks(size: int, work: Callable[[Ranks], object], logs: Path) -> Ended:
    """Do the work in so many ranks. The store begins once all of them are there: its threads must not be forked."""
    logs.mkdir(parents=True, exist_ok=True)
    started, (told, tells) = time.monotonic(), os.pipe()
    children = [_fork(rank, size, told, work, logs / f"{rank}.txt") for rank in range(size)]
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.write(tells, f"{store.port:5}".encode() * size)
    status = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    for end in (told, tells):
        os.close(end)
    said = [(logs / f"{rank}.txt").read_text() for rank in range(size)]
    return Ended(status, said, time.monotonic() - started)


def _fork(rank: int, size: int, told: int, work: Callable[[Ranks], object], log: Path) -> int:
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        torch.set_num_threads(1)  # the pool of a forked process is made anew by its first user: two at once would race
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": os.read(told, 5).decode().strip()}
        os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}
        with log.open("w", buffering=1) as sys.stderr:
            faulthandler.dump_traceback_later(PATIENCE, exit=True, file=sys.stderr)
            with joined("cpu") as ranks:
                work(ranks)
        status = 0
    except SystemExit as end:
        status = int(end.code or 0)
    except BaseException as error:
        log.write_text(f"{type(error).__name__}: {error}")
    finally:
        os._exit(status)

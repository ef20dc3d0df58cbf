"""Work that several ranks do together: processes forked from this one, which keeps their store as torchrun does."""

from __future__ import annotations

import faulthandler
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from featcal.ranks import Ranks, joined

PATIENCE = 20
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
    """Do the work in so many ranks; they have not to be waited for longer than the test's patience."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    logs.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    children = [_fork(rank, size, store.port, work, logs / f"{rank}.txt") for rank in range(size)]
    status = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    said = [(logs / f"{rank}.txt").read_text() for rank in range(size)]
    return Ended(status, said, time.monotonic() - started)


def _fork(rank: int, size: int, port: int, work: Callable[[Ranks], object], log: Path) -> int:
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
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

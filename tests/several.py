"""Work that several ranks do together: processes forked from this one, which keeps their store as torchrun does; and
whether they give what one process gives."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from featcal.calibration.calibrate import calibrate_to_folder
from featcal.calibration.config import CalibrationConfig
from featcal.family import Family
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


def killed_once(command: list[str], file: Path, rank: int | None = None) -> Ended:
    """A command whose process, or one rank of which, is killed (SIGKILL) as soon as a file is there."""
    started = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as running:
        while not file.exists():
            assert running.poll() is None, "it ended before the file was there"
            time.sleep(0.01)
        victim = running.pid if rank is None else _process(f"RANK={rank}")
        os.kill(victim, signal.SIGKILL)
        said = running.communicate(timeout=PATIENCE)[1]
    return Ended([running.returncode], [said], time.monotonic() - started)


def _process(setting: str) -> int:
    """The first process that was started with a setting in its environment."""
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if setting.encode() in environment.read_bytes().split(b"\0"):
                return int(environment.parent.name)
    raise AssertionError(f"no process has {setting}")


def tensors(folder: Path) -> dict[str, Tensor]:
    return {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}


def record(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "featcal.json").read_text())
    return found


def apart(one: Path, other: Path) -> float:
    """Largest relative difference of a tensor, by Frobenius norms."""
    mine, theirs = tensors(one), tensors(other)
    assert mine.keys() == theirs.keys()
    return max(
        float((t.double() - theirs[name].double()).norm() / t.double().norm().clamp_min(1e-30))
        for name, t in mine.items()
    )


def calibrated(family: Family, config: CalibrationConfig, out: Path, size: int, **more: Any) -> Ended:
    return run_ranks(
        size, lambda ranks: calibrate_to_folder(family, config, out, **more), out.parent / f"{out.name}.log"
    )


def check_alike(
    family: Family, config: CalibrationConfig, place: Path, sizes: tuple[int, ...], most: float = 1e-6
) -> list[dict[str, Any]]:
    """Every number of ranks gives the tensors and the account of one process; the records, one process's first."""
    alone = place / "alone"
    calibrate_to_folder(family, config, alone)
    found = [record(alone)]
    for size in sizes:
        out = place / str(size)
        ended = calibrated(family, config, out, size)
        assert ended.status == [0] * size, ended.said
        assert apart(alone, out) <= most, size
        found.append(record(out))
        for kind in ("tokens", "samples", "sha256", "indices", "truncated"):
            assert {t: one[kind] for t, one in found[-1]["tasks"].items()} == {
                t: one[kind] for t, one in found[0]["tasks"].items()
            }
        assert list(found[-1]["tasks"]) == list(found[0]["tasks"])
        assert found[-1]["inputs"] == found[0]["inputs"]
        assert found[-1]["notes"] == found[0]["notes"]
        for block, drift in found[0]["relative_drift"].items():
            assert found[-1]["relative_drift"][block] == pytest.approx(drift, rel=1e-5)
    return found

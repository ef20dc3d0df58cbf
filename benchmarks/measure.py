"""What a process costs (time, memory of its whole tree, energy) and on which machine; straight lines through points."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import psutil

BENCHMARKS = Path(__file__).resolve().parent
PACKAGES = ("featcal", "torch", "transformers", "safetensors", "numpy")
POLL = 0.2
"""Seconds between two looks at resident memory."""
POLL_SHARED = 5.0
"""The same for PSS, which the kernel counts page by page while the process can map nothing: every second cost a tenth
of the time of a calibration."""
T = TypeVar("T")
LOAD = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
"""Load of the machine before a benchmark begins; read later it would hold the benchmark itself."""


@dataclass(frozen=True)
class Memory:
    """Bytes of a process tree. Every page of a mapped file that was touched counts in `rss` until it is unmapped."""

    rss: int
    """Resident pages, summed over the processes; pages that two mappings share count twice."""
    anonymous: int | None
    """Resident pages that no file backs (Linux)."""
    pss: int | None
    """Resident pages, shared ones counted in parts that add up to one (Linux; looked at every few seconds)."""


@dataclass(frozen=True)
class Run:
    """A finished command."""

    document: dict[str, Any]
    """The JSON document that it printed."""
    seconds: float
    looks: Sequence[tuple[float, Memory]]
    """Memory at moments of `time.monotonic`, which all processes of a machine share."""

    def peak(self, window: Sequence[float] | None = None) -> dict[str, int | None]:
        """Largest value of every kind of memory, over the whole run or between two moments."""
        start, end = window or (0.0, float("inf"))
        seen = [asdict(memory) for moment, memory in self.looks if start <= moment <= end + POLL]
        kinds = ("rss", "anonymous", "pss")
        return {kind: max((look[kind] for look in seen if look[kind] is not None), default=None) for kind in kinds}

    def before(self, moment: float) -> Memory | None:
        """The last look before a moment: what was resident when a stage began."""
        return next((memory for when, memory in reversed(self.looks) if when <= moment), None)


def run(command: Sequence[str], threads: int | None = None) -> Run:
    """Run a command that prints one JSON document on stdout and watch the memory of its process tree.

    Raises:
        SystemExit: the command fails; its own messages have gone to stderr.
    """
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    if threads is not None:
        environment |= {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    with tempfile.TemporaryFile("w+", encoding="utf-8") as output:
        started = time.monotonic()
        process = subprocess.Popen(command, stdout=output, env=environment)
        looks = watch(process)
        seconds = time.monotonic() - started
        if process.returncode != 0:
            raise SystemExit(f"failed with status {process.returncode}: {' '.join(command)}")
        output.seek(0)
        return Run(json.load(output), seconds, looks)


def watch(process: subprocess.Popen[bytes]) -> list[tuple[float, Memory]]:
    """Look at the memory of a process and its children until it ends."""
    looks: list[tuple[float, Memory]] = []
    shared_due = time.monotonic()
    while process.poll() is None:
        now = time.monotonic()
        memory = tree_memory(process.pid, with_pss=now >= shared_due)
        if memory is not None:
            looks.append((now, memory))
        if now >= shared_due:
            shared_due = now + POLL_SHARED
        time.sleep(POLL)
    return looks


def tree_memory(pid: int, with_pss: bool = True) -> Memory | None:
    """Memory of a process and all its children now; None where the process is gone."""
    linux = sys.platform == "linux"
    rss = shared = pss = 0
    try:
        parent = psutil.Process(pid)
        members = [parent, *parent.children(recursive=True)]
    except psutil.Error:
        return None
    for member in members:
        try:
            info = member.memory_info()
            rss, shared = rss + info.rss, shared + (info.shared if linux else 0)
            pss += member.memory_full_info().pss if linux and with_pss else 0
        except psutil.Error:  # ended in between
            continue
    return Memory(rss, rss - shared if linux else None, pss if linux and with_pss else None) if rss else None


def timed(work: Callable[[], T], device: str) -> tuple[T, dict[str, Any]]:
    """Do the work and say what it took: seconds, those of all cores that this process had (on a busy machine the
    steadier figure), its window for `Run.peak`, and on CUDA bytes and joules.

    The device is synchronised before both readings. Power sensors average over up to a second: energies of stages
    below 5 s mean little.
    """
    import torch

    cuda = device.startswith("cuda")
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
        torch.cuda.synchronize(device)
    joules, cpu, start = gpu_joules(device) if cuda else None, time.process_time(), time.monotonic()
    result = work()
    if cuda:
        torch.cuda.synchronize(device)
    end, cpu, after = time.monotonic(), time.process_time() - cpu, gpu_joules(device) if cuda else None
    cost: dict[str, Any] = {"seconds": end - start, "cpu_seconds": cpu, "window": [start, end]}
    cost["cuda_peak_bytes"] = torch.cuda.max_memory_allocated(device) if cuda else None
    cost["gpu_joules"] = after - joules if joules is not None and after is not None else None
    return result, cost


def gpu_joules(device: str) -> float | None:
    """The driver's total energy counter of an NVIDIA GPU; None without one or without nvidia-ml-py."""
    import torch

    try:
        import pynvml
    except ModuleNotFoundError:
        return None
    try:
        pynvml.nvmlInit()
        # The driver numbers all cards, torch those that CUDA_VISIBLE_DEVICES lets it see.
        card = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        return float(pynvml.nvmlDeviceGetTotalEnergyConsumption(card)) / 1000
    except pynvml.NVMLError:
        return None


def machine(device: str = "cpu") -> dict[str, Any]:
    """Processor, memory, system, how busy it was at the start, GPU and versions.

    Args:
        device: the GPU that is named; with any other device it is torch's current one.
    """
    import torch

    card = device if device.startswith("cuda") else None
    names = [name for name in (*PACKAGES, "nvidia-ml-py") if _version(name)]
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "load": LOAD,
        "system": platform.platform(),
        "gpu": torch.cuda.get_device_name(card) if torch.cuda.is_available() else None,
        "cuda": torch.version.cuda,
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in names}},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


@dataclass(frozen=True)
class Line:
    """Least-squares line through points."""

    slope: float
    intercept: float
    r2: float
    """Share of the variance that the line explains, in [0, 1]."""


def line(x: Sequence[float], y: Sequence[float]) -> Line:
    """The line through at least two points with different x and different y."""
    slope, intercept = statistics.linear_regression(x, y)
    return Line(slope, intercept, statistics.correlation(x, y) ** 2)


def show(document: Mapping[str, Any]) -> None:
    """Print a result as JSON."""
    print(json.dumps(document, indent=2, allow_nan=False))


def say(text: str) -> None:
    """A line of progress on stderr."""
    print(text, file=sys.stderr, flush=True)

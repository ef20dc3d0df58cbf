"""Report progress of long functions, and measure their time and memory."""

from __future__ import annotations

import ctypes
import mmap
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
Progress = Callable[[str, int, int], None]
"""Called with a label, steps done and steps in all; it may raise to stop the work, and nothing is left half-done."""
SLACK = 1.15
"""Memory that allocators take per byte of tensors, as a factor."""


def silent(label: str, done: int, total: int) -> None:
    """Report nothing."""


def part_of(progress: Progress, part: int, parts: int) -> Progress:
    """Return the progress of one of several parts, one after the other, of work that is reported as a whole.

    >>> part_of(print, 1, 4)("measuring", 3, 10)
    measuring 13 40
    """
    return lambda label, done, total: progress(label, part * total + done, parts * total)


class Seconds(dict[str, float]):
    """Wall-clock seconds added up by stage; on CUDA they measure how long it took to launch the work.

    >>> seconds = Seconds()
    >>> with seconds("solve"):
    ...     pass
    >>> list(seconds)
    ['solve']
    """

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        """Add the time of the body of the `with` to a stage."""
        started = time.perf_counter()
        yield
        self[stage] = self.get(stage, 0.0) + time.perf_counter() - started


@dataclass
class Timing:
    """Seconds that work took, added up."""

    wall: float = 0.0
    """Seconds of the clock."""
    cpu: float = 0.0
    """Processor seconds of this process, all cores together; other processes do not count."""

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Add the time that the body of the `with` takes."""
        started, busy = time.perf_counter(), time.process_time()
        try:
            yield
        finally:
            self.wall += time.perf_counter() - started
            self.cpu += time.process_time() - busy

    def time_each(self, things: Iterator[T]) -> Iterator[T]:
        """Yield items, and add the time it takes to make them; the time their user takes does not count."""
        while True:
            with self.measure():
                try:
                    one = next(things)
                except StopIteration:
                    return
            yield one

    def add(self, other: Timing) -> None:
        """Add further work to the total."""
        self.wall += other.wall
        self.cpu += other.cpu


def rss_bytes() -> int:
    """Return the resident memory of this process in bytes; its peak so far where the system tells no more."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * mmap.PAGESIZE
    except OSError:
        return peak_rss_bytes() or 0


def available_bytes() -> int | None:
    """Return the bytes of memory that this machine or container can still give; None if the system does not say."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            sizes = dict(line.split(":") for line in file)
        free = int(sizes["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None
    left = _left_in_group(CONTROL_GROUP)
    return free if left is None else min(free, left)


def half_of_available_bytes() -> int:
    """Return half of `available_bytes`, or 4 GiB if the system does not report it: the default limit of memory, which
    leaves as much for allocations that no estimate counts and for other programs."""
    return (available_bytes() or 2**33) // 2


CONTROL_GROUP = Path("/sys/fs/cgroup")
"""Folder of a container's limits, as Linux shows it to the container (control groups, version 2)."""


def _left_in_group(group: Path) -> int | None:
    """Return the bytes below the memory limit of a control group; None without a limit."""
    try:
        limit = int((group / "memory.max").read_text(encoding="ascii"))
        used = int((group / "memory.current").read_text(encoding="ascii"))
        kinds = dict(line.split() for line in (group / "memory.stat").read_text(encoding="ascii").splitlines())
        # Linux counts cached files as used, but drops inactive ones before it refuses memory.
        return max(0, limit - used + int(kinds["inactive_file"]))
    except (OSError, KeyError, ValueError):  # "max" among them
        return None


def keep_memory() -> None:
    """Let the C library (glibc) keep freed memory for the next allocation until the process ends.

    There is no way back to the C library's own rule, so this is for the owner of a process: the command line and the
    app call it, functions of the library never do.
    """
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):  # another C library
            mallopt = ctypes.CDLL(None).mallopt
            # Features are tens of megabytes that come and go: a page fetched anew costs more than most operations on
            # it.
            mallopt(_M_MMAP_MAX, 0)
            mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


def release_memory() -> None:
    """Give freed memory back to the system if the C library (glibc) has kept it."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)


def peak_rss_bytes() -> int | None:
    """Return the largest resident memory of this process so far in bytes; None if the system does not say (Windows)."""
    if sys.platform == "win32":
        return None
    with suppress(OSError, StopIteration), open("/proc/self/status", encoding="ascii") as file:
        # getrusage includes the peak of the process that started this one
        return int(next(line for line in file if line.startswith("VmHWM:")).split()[1]) * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024

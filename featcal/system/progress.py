"""How long-running functions say where they are, and what they cost."""

from __future__ import annotations

import ctypes
import mmap
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

Progress = Callable[[str, int, int], None]
"""Called with a label, steps done and steps in all. It may raise to stop the work: nothing is left half-done."""
SLACK = 1.15
"""What allocators take beside the tensors that are counted, as a factor."""


def silent(label: str, done: int, total: int) -> None:
    """Say nothing."""


class Seconds(dict[str, float]):
    """Adds up wall-clock seconds by stage; on CUDA what is measured is how long the work took to be handed over.

    >>> seconds = Seconds()
    >>> with seconds("solve"):
    ...     pass
    >>> list(seconds)
    ['solve']
    """

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        """Count the body of the `with` to a stage."""
        started = time.perf_counter()
        yield
        self[stage] = self.get(stage, 0.0) + time.perf_counter() - started


def rss_bytes() -> int:
    """Resident memory of this process now; its peak so far where the system tells no more."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * mmap.PAGESIZE
    except OSError:
        return peak_rss_bytes() or 0


def available_bytes() -> int | None:
    """Memory that this machine, or the container that this runs in, can still give away; None where none says."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            sizes = dict(line.split(":") for line in file)
        free = int(sizes["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None
    left = _left_in_group(CONTROL_GROUP)
    return free if left is None else min(free, left)


CONTROL_GROUP = Path("/sys/fs/cgroup")
"""Where Linux keeps the limits of a container, as the container sees it (version 2)."""


def _left_in_group(group: Path) -> int | None:
    """Bytes below the limit of a control group, what can be dropped from its cache of files counted as free; None where
    there is no limit."""
    try:
        limit = int((group / "memory.max").read_text(encoding="ascii"))
        used = int((group / "memory.current").read_text(encoding="ascii"))
        kinds = dict(line.split() for line in (group / "memory.stat").read_text(encoding="ascii").splitlines())
        return max(0, limit - used + int(kinds["inactive_file"]))
    except (OSError, KeyError, ValueError):  # "max" among them
        return None


def keep_memory() -> None:
    """Let the C library keep what is freed for the next allocation, where it would give it back at once (glibc).

    Features are tens of megabytes that come and go; a page that is asked for anew costs more than most operations
    on it. It stays so until the process ends, and there is no way back to the C library's own rule, so this is for the
    owner of a process: the command line and the app call it, functions of the library never do.
    """
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):  # another C library
            mallopt = ctypes.CDLL(None).mallopt
            mallopt(_M_MMAP_MAX, 0)
            mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


def release_memory() -> None:
    """Give freed memory back to the system, where the C library keeps it for later (glibc)."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)


def peak_rss_bytes() -> int | None:
    """Largest resident memory of this process so far; None where the system does not say (Windows)."""
    if sys.platform == "win32":
        return None
    with suppress(OSError, StopIteration), open("/proc/self/status", encoding="ascii") as file:
        # what getrusage tells includes the process that started this one
        return int(next(line for line in file if line.startswith("VmHWM:")).split()[1]) * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024

"""What a piece of work costs: seconds of the clock and of the processor, and memory."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from featcal.system.progress import peak_rss_bytes, release_memory, rss_bytes


@dataclass
class Cost:
    """Filled in when the work is done."""

    wall: float = 0.0
    """Seconds of the clock."""
    cpu: float = 0.0
    """Seconds of all processors together, of this process; what else runs on the machine does not count."""
    peak_bytes: int | None = None
    """By how much the process's resident memory grew at most, above what it held before; None where the system cannot
    count a peak anew."""


@contextmanager
def metered() -> Iterator[Cost]:
    """Measure the body of the `with`; freed memory is given back before it."""
    cost = Cost()
    release_memory()
    held, counts = rss_bytes(), _forget_peak()
    started, busy = time.perf_counter(), time.process_time()
    try:
        yield cost
    finally:
        cost.wall, cost.cpu = time.perf_counter() - started, time.process_time() - busy
        peak = peak_rss_bytes()
        cost.peak_bytes = max(0, peak - held) if counts and peak is not None else None


def _forget_peak() -> bool:
    """Have the system count this process's peak from now on; whether it does (Linux alone)."""
    try:
        with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
            file.write("5")
    except OSError:
        return False
    return True

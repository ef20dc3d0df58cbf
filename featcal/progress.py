"""How long-running functions say where they are, and what they cost."""

from __future__ import annotations

import sys
from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Called with a label, steps done and steps in all. It may raise to stop the work: nothing is left half-done."""


def silent(label: str, done: int, total: int) -> None:
    """Say nothing."""


def peak_rss_bytes() -> int | None:
    """Largest resident memory of this process so far; None where the system does not say (Windows)."""
    if sys.platform == "win32":
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024

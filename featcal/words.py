"""How messages and tables put names and sizes."""

from __future__ import annotations

from collections.abc import Sequence


def some(names: Sequence[str], most: int = 4) -> str:
    """The first names in quotes, and how many more there are."""
    shown = ", ".join(f"'{name}'" for name in names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def readable(count: float) -> str:
    """Bytes as people read them, such as "1.5 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"

"""Versions of what can move a number."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from importlib.metadata import version

PACKAGES = (
    "featcal",
    "torch",
    "transformers",
    "safetensors",
    "numpy",
    "torchvision",
    "pillow",
    "open_clip_torch",
    "tokenizers",
)
"""Whose versions are recorded: all that can move a number, those that make inputs too."""
TELLING = PACKAGES[:3]
"""Of these, whose tell one run from another."""


def versions(packages: Iterable[str] = PACKAGES) -> dict[str, str]:
    """By package."""
    return {name: version(name) for name in packages}


def all_versions() -> dict[str, str]:
    """Of Python and of every package that can move a number."""
    return {"python": platform.python_version(), **versions()}

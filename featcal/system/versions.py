"""Versions of the packages that can move a number."""

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
"""Packages whose versions are recorded: all that can move a number, including those that prepare inputs."""
TELLING = PACKAGES[:3]
"""Packages whose versions tell one run from another."""


def versions(packages: Iterable[str] = PACKAGES) -> dict[str, str]:
    """Return the installed version of every package."""
    return {name: version(name) for name in packages}


def all_versions() -> dict[str, str]:
    """Return the versions of Python and of every package that can move a number."""
    return {"python": platform.python_version(), **versions()}

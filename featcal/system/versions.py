"""Versions of the packages that can move a number."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from functools import cache
from importlib.metadata import PackageNotFoundError, version

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
    """Return the version of every package that is installed: extras may be left out."""
    return {name: found for name in packages if (found := _installed_version(name)) is not None}


@cache  # the metadata of a package is parsed anew every time, which takes 3 ms
def _installed_version(package: str) -> str | None:
    """Return the version of a package; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def all_versions() -> dict[str, str]:
    """Return the versions of Python and of every package that can move a number."""
    return {"python": platform.python_version(), **versions()}

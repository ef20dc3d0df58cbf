"""Versions of the packages that can move a number."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, entry_points, version
from importlib.util import find_spec
from pathlib import Path

from featcal.system.fingerprints import digest_code

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
    """Return the version of a package; None if it is not installed. featcal also runs from a checkout that is not."""
    if package == "featcal":
        return str(import_module(package).__version__)  # an import statement would be one of every room
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@cache
def extension_versions() -> Mapping[str, str]:
    """Return the version of every package that brings methods or architectures (entry points of the groups
    `featcal.*`), with 12 digits of the SHA-256 of its code, which its author changes between versions.
    """
    every = entry_points()
    points = [
        point for group in sorted(every.groups) if group.startswith("featcal.") for point in every.select(group=group)
    ]
    homes = {one.dist.name: (one.dist.version, one.module.partition(".")[0]) for one in points if one.dist}
    return {
        name: f"{number}, {digest_code(_find_code(module))[:12]}" for name, (number, module) in sorted(homes.items())
    }


def _find_code(module: str) -> list[Path]:
    """Return the files of a package or of a single module, without importing it; none if it is not there."""
    spec = find_spec(module)
    if spec is None or spec.submodule_search_locations is None:
        return [Path(spec.origin)] if spec and spec.origin else []
    return [file for folder in spec.submodule_search_locations for file in Path(folder).rglob("*.py")]


def all_versions() -> dict[str, str]:
    """Return the versions of Python and of every package that can move a number."""
    return {"python": platform.python_version(), **versions(), **extension_versions()}

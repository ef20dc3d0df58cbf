"""Locate files shipped with featcal (the repository in a clone, `_bundle` in an installed wheel) and its cache."""

import os
import sys
from functools import cache
from pathlib import Path

from featcal.system.fingerprints import digest_code


def bundle_root() -> Path:
    """Return the folder that holds `app/`, `pages/` and `data/`."""
    package = Path(__file__).resolve().parents[1]
    bundled = package / "_bundle"
    return bundled if bundled.is_dir() else package.parent


def data_path(*parts: str) -> Path:
    """Return a path below `data/`, for example `data_path("clip-mini", "suite.yaml")`."""
    return bundle_root().joinpath("data", *parts)


def embedded_suites() -> dict[str, Path]:
    """Return name → suite file of every suite that needs no download."""
    return {file.parent.name: file for file in sorted(data_path().glob("*/suite.yaml"))}


def ready_suites() -> dict[str, Path]:
    """Return name → suite file of the published benchmarks, whose models and data sets are on the Hub."""
    return {file.stem: file for file in sorted(data_path("suites").glob("*.yaml"))}


def task_files() -> list[Path]:
    """Return the files of the task catalogue, whose entries suites `use`."""
    return sorted(data_path("suites", "tasks").glob("*.yaml"))


def cache_folder() -> Path:
    """Return the user's cache folder, which may not exist yet; FEATCAL_CACHE overrides it."""
    if own := os.environ.get("FEATCAL_CACHE"):
        return Path(own).expanduser()
    homes = {"win32": os.environ.get("LOCALAPPDATA"), "darwin": "~/Library/Caches"}
    home = homes.get(sys.platform) or os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser() / "featcal"


@cache
def code_digest() -> str:
    """Return the SHA-256 of featcal's own code, so that results of another version are not taken for this one's."""
    return digest_code(Path(__file__).resolve().parents[1].rglob("*.py"))

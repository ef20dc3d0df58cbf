"""Set rules for a server that other people use (`featcal app --shared`, `featcal mcp`): which files it reads and writes
and how much it holds.

They are read once, from the environment, which the processes of jobs inherit; without them nothing here applies.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from featcal.system.errors import InputError
from featcal.system.resources import bundle_root, cache_folder, data_path

VARIABLE = "FEATCAL_SHARED"
"""Holds a `ServerRules` as JSON."""


@dataclass(frozen=True)
class ServerRules:
    """The rules of a shared server."""

    roots: tuple[str, ...]
    """Folders, resolved, that visitors may name and write in; relative paths start from the first."""
    max_memory: int
    """Bytes that all suites that are open at once may need, by the estimates of `featcal check`."""
    jobs: int = 2
    """Unfinished jobs of one visitor."""
    all_jobs: int = 16
    """Unfinished jobs of all visitors: one who deletes the cookie counts as another visitor."""
    idle: float = 900.0
    """Seconds without a visitor after which a suite is removed from memory."""
    text: int = 2**20
    """Bytes of a suite file that a visitor types; `maxUploadSize` limits files."""
    hub: bool = False
    """True if the Hub may be asked, and its local cache read."""
    queue: str = "jobs"
    """Folder of the jobs, below the user's cache folder."""

    def to_environment(self) -> None:
        """Put this process, and those that it starts, under these rules."""
        os.environ[VARIABLE] = json.dumps(asdict(self))
        server_rules.cache_clear()


@cache
def server_rules() -> ServerRules | None:
    """Return the rules that this process is under; None outside a shared server."""
    text = os.environ.get(VARIABLE)
    if text is None:
        return None
    given = json.loads(text)
    return ServerRules(**{**given, "roots": tuple(given["roots"])})


def jobs_folder() -> Path:
    """Return the folder of the jobs of this process: the user's, or that of the server's rules."""
    rules = server_rules()
    return cache_folder() / ("jobs" if rules is None else rules.queue)


def require_inside(path: Path, what: str, *, to_write: bool = False) -> None:
    """Check, on a shared server, that a path leads into its folders or job results (to read, also featcal's data and,
    where the Hub is allowed, its local cache).

    Args:
        what: names the path in the message, which does not quote it.

    Raises:
        InputError: it leads elsewhere; the message does not tell whether something is there.
    """
    rules = server_rules()
    if rules is not None:
        read = [] if to_write else [str(data_path()), *_hub_cache(rules)]
        own = [os.path.realpath(one) for one in (str(jobs_folder() / "results"), *read)]
        _require_below((*rules.roots, *own), path, what)


def require_in_roots(path: Path, what: str) -> None:
    """Check, on a shared server, that a path leads into its folders: not into job results either.

    Raises:
        InputError: as `require_inside`.
    """
    rules = server_rules()
    if rules is not None:
        _require_below(rules.roots, path, what)


def _require_below(roots: Iterable[str], path: Path, what: str) -> None:
    try:
        # Links must be followed first: one inside a shared folder may lead anywhere.
        place = os.path.realpath(path)
    except (OSError, ValueError):  # a null character: nothing can be there
        place = ""
    if not any(place == root or place.startswith(os.path.join(root, "")) for root in roots):
        raise InputError(f"{what}: outside the folders that this server shares; name something inside them")


def _hub_cache(rules: ServerRules) -> list[str]:
    """Return the folder that models of the Hub are fetched to, where they may be read."""
    if not rules.hub:
        return []
    from huggingface_hub import constants

    return [constants.HF_HUB_CACHE]


def require_links_inside(place: Path, what: str) -> None:
    """Check, on a shared server, that every link at any depth of a folder leads to where the server may read.

    Raises:
        InputError: a link leads elsewhere.
    """
    if server_rules() is None or not place.is_dir():
        return
    for folder, folders, files in os.walk(place):  # which does not follow links
        for name in (*folders, *files):
            if os.path.islink(os.path.join(folder, name)):
                require_inside(Path(folder, name), what)


def require_no_hub(what: str) -> None:
    """Refuse the Hub on a shared server: any visitor could fill its disk, or read files that are private to its owner.

    Raises:
        InputError: this is a shared server whose rules do not allow it.
    """
    rules = server_rules()
    if rules is not None and not rules.hub:
        raise InputError(f"{what}: not in the folders that this server shares, and it fetches nothing from the Hub")


def without_places(text: str) -> str:
    """Return a text without the paths of a shared server: those below its first folder become relative, those below
    another keep its name alone, and all others that featcal knows of are hidden."""
    rules = server_rules()
    if rules is None:
        return text
    for place, shown in _places(rules, cache_folder()):
        whole = rf"(?<![\w.-]){re.escape(place)}"
        text = re.sub(rf"{whole}[/\\]", f"{shown}/" if shown else "", text)
        text = re.sub(rf"{whole}(?!\.?[\w-])", shown or ".", text)
    return text


@cache
def _places(rules: ServerRules, kept: Path) -> list[tuple[str, str]]:
    """Return folders of this machine that messages may name, as written and resolved, with the text to show instead;
    inner folders first, and never the root of a disk."""
    named: list[str | Path] = [bundle_root(), kept, tempfile.gettempdir(), sys.prefix, sys.base_prefix, Path.home()]
    own = [str(one) for place in named for one in (Path(place).absolute(), Path(place).resolve())]
    first, *others = rules.roots
    shown = {**dict.fromkeys(own, "…"), **{root: Path(root).name.replace("\\", "") for root in others}, first: ""}
    return sorted(((one, text) for one, text in shown.items() if one != Path(one).anchor), key=lambda one: -len(one[0]))

"""The files of a suite as they are now: what was computed from others is not shown again."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from featcal.preflight.models import references
from featcal.suite import SPLITS, Suite

Stamp = tuple[tuple[str, int, int], ...]
"""Name, size and time of change (ns) of every file; the suite itself comes first, as its text."""


def stamp(suite: Suite) -> Stamp:
    """What tells whether a file of a suite has changed: those of its models and of its samples, folders to the bottom.

    Models and samples on the Hub are not looked at: a revision never changes once it was fetched.
    """
    named = dict.fromkeys([*_models(suite), *_samples(suite)])
    states = [(str(file), file.stat()) for place in named for file in _files(suite.root / place)]
    return (suite.model_dump_json(), 0, 0), *((name, one.st_size, one.st_mtime_ns) for name, one in states)


def _models(suite: Suite) -> Iterator[str]:
    """Everything in a reference that may be a path: `REF+ADAPTER`, `open_clip:ARCH:FILE`, `local-dir:FOLDER`."""
    for reference in references(suite).values():
        for part in reference.split("+"):
            yield part.split(":")[-1] if part.startswith(("open_clip:", "local-dir:")) else part


def _samples(suite: Suite) -> Iterator[str]:
    for task in suite.tasks.values():
        for split in SPLITS:
            source = task.source(split)
            if source is not None and source.kind not in ("embedded", "hub"):
                yield str(getattr(source, source.kind))


def _files(place: Path) -> Iterator[Path]:
    if place.is_file():
        yield place
    for folder, _, names in os.walk(place):
        yield from (path for name in sorted(names) if (path := Path(folder, name)).is_file())

"""The files of a suite as they are now: what was computed from others is not shown again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from featcal.errors import InputError
from featcal.paths import local_path
from featcal.preflight.models import references
from featcal.stamps import FileStamp, stamps
from featcal.suite import SPLITS, Suite

Stamp = tuple[FileStamp, ...]
"""The state of every file; the suite itself comes first, as its text."""


def stamp(suite: Suite) -> Stamp:
    """What tells whether a file of a suite has changed: those of its models and of its samples, folders to the bottom.

    Models and samples on the Hub are not looked at: a revision never changes once it was fetched.
    """
    named = dict.fromkeys([*_models(suite), *_samples(suite)])
    return (suite.model_dump_json(), 0, 0), *(one for place in named for one in _stamps(place, suite.root))


def _stamps(named: str, root: Path) -> Iterator[FileStamp]:
    """Of what a suite names; nothing where no path has such a name, as whoever opens the suite is told."""
    with suppress(InputError):
        yield from stamps(local_path(named, root, "suite"))


def _models(suite: Suite) -> Iterator[str]:
    """Everything in a reference that may be a path: `REF+ADAPTER`, `open_clip:ARCH:FILE`, `local-dir:FOLDER`."""
    for reference in references(suite).values():
        for part in dict.fromkeys([reference, *reference.split("+")]):
            words = part.split(":", 2)[1:] if part.startswith(("open_clip:", "local-dir:")) else [part]
            yield from filter(None, words)


def _samples(suite: Suite) -> Iterator[str]:
    """Where sources read; one of the kind `hub` reads a local folder where there is one."""
    for task in suite.tasks.values():
        for split in SPLITS:
            source = task.source(split)
            if source is not None and source.kind != "embedded":
                yield str(getattr(source, source.kind))

"""The files of a suite as they are now: what was computed from others is not taken for theirs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from featcal.errors import InputError
from featcal.paths import local_path
from featcal.preflight.models import references
from featcal.stamps import FileStamp, stamps
from featcal.suite import SPLITS, Suite

Stamp = tuple[str, str, tuple[FileStamp, ...]]
"""The suite's text, the folder that its relative paths start from, and the state of every file."""


def suite_stamp(suite: Suite) -> Stamp:
    """What tells whether anything that a suite reads has changed: its own text, and every file of its models and of
    its samples, folders to the bottom.

    Of the suite it is the content. Of a file it is what the system keeps of its content (`stamps`), which costs one
    look at each and not the reading of gigabytes. Models and samples on the Hub are not looked at: a revision never
    changes once it was fetched.
    """
    named = dict.fromkeys([*_models(suite), *_samples(suite)])
    files = tuple(one for place in named for one in _stamps(place, suite.root))
    return suite.model_dump_json(), str(suite.root), files


def model_stamp(reference: str, root: Path) -> tuple[FileStamp, ...]:
    """The same of one model: every file here that a reference may name; empty for a model on the Hub."""
    return tuple(one for place in _places(reference) for one in _stamps(place, root))


def _stamps(named: str, root: Path) -> Iterator[FileStamp]:
    """Of what a suite names; nothing where no path has such a name, as whoever opens the suite is told."""
    with suppress(InputError):
        yield from stamps(local_path(named, root, "suite"))


def _models(suite: Suite) -> Iterator[str]:
    for reference in references(suite).values():
        yield from _places(reference)


def _places(reference: str) -> Iterator[str]:
    """Everything in a reference that may be a path: `REF+ADAPTER`, `open_clip:ARCH:FILE`, `local-dir:FOLDER`."""
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

"""Look at the files of a suite as they are now: what was computed from others is not taken for theirs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from heapq import nsmallest
from pathlib import Path

from featcal.samples.table import read_jsonl
from featcal.suite.schema import SPLITS, Suite, references
from featcal.suite.source import Source
from featcal.system.errors import InputError
from featcal.system.fingerprints import FileStamp, stamps
from featcal.system.paths import local_path

MOST = 1000
"""Most files of a model's folder that are looked at."""
ENDINGS = (".safetensors", ".json", ".txt", ".model", ".jinja", ".bin", ".pt", ".pth")
"""Of weights, configuration and tokenizer."""
Stamp = tuple[str, str, tuple[FileStamp, ...]]
"""The suite's text, the folder that its relative paths start from, and the state of every file."""


def suite_stamp(suite: Suite) -> Stamp:
    """Return what tells whether anything that a suite reads has changed: its own text, and the state of every file of
    its models (`model_stamp`) and of its samples, folders to the bottom.

    The state of a file is what the system keeps of it (`stamps`). Models and samples on the Hub are not looked at.

    """
    # One look at each file and no reading of gigabytes. A revision on the Hub never changes once it was fetched.
    models = (one for reference in references(suite).values() for one in model_stamp(reference, suite.root))
    samples = (one for place in _samples(suite) for one in _stamps(place, suite.root, stamps))
    return suite.model_dump_json(), str(suite.root), tuple(dict.fromkeys([*models, *samples]))


def model_stamp(reference: str, root: Path) -> tuple[FileStamp, ...]:
    """Return the state of every file here that a model's reference may name; empty for a model on the Hub.

    A model lies in its folder and not in those inside it. Of a folder that holds more than `MOST` files those count
    whose names end as a model's do, before others: a reference that somebody typed may be any folder.
    """
    return tuple(one for place in _places(reference) for one in _stamps(place, root, _model_files))


def _stamps(named: str, root: Path, of: Callable[[Path], Iterator[FileStamp]]) -> Iterator[FileStamp]:
    """Yield the state of what a suite names; nothing where no path has such a name."""
    with suppress(InputError):  # whoever opens the suite is told
        yield from of(local_path(named, root, "suite"))


def _model_files(place: Path) -> Iterator[FileStamp]:
    if not place.is_dir():
        yield from stamps(place)
        return
    with suppress(OSError):  # whoever reads it says what is wrong
        # A reference that somebody typed may be any folder, a home with a million files too: weights come first.
        names = nsmallest(MOST, os.listdir(place), key=lambda name: (not name.endswith(ENDINGS), name))
        for file in (place / name for name in sorted(names)):
            if not file.is_dir():
                yield from stamps(file)


def _places(reference: str) -> Iterator[str]:
    """Yield everything in a reference that may be a path: `REF+ADAPTER`, `open_clip:ARCH:FILE`, `local-dir:FOLDER`."""
    for part in dict.fromkeys([reference, *reference.split("+")]):
        words = part.split(":", 2)[1:] if part.startswith(("open_clip:", "local-dir:")) else [part]
        yield from filter(None, words)


def _samples(suite: Suite) -> Iterator[str]:
    """Yield the places that sources read; one of the kind `hub` reads a local folder where there is one."""
    for task in suite.tasks.values():
        for split in SPLITS:
            source = task.source(split)
            if source is not None and source.kind not in ("embedded", "self_generated"):
                yield str(getattr(source, source.kind))
                yield from _named_pictures(source, suite.root)


def _named_pictures(source: Source, root: Path) -> Iterator[str]:
    """Yield the files that the rows of JSON Lines name."""
    if source.jsonl is None or source.image is None:
        return
    with suppress(InputError, OSError):  # whoever draws samples says what is wrong
        table = read_jsonl(local_path(source.jsonl, root, "jsonl"))
        yield from (str(table.folder / str(row[source.image])) for row in table.content if source.image in row)

"""Detect changes of a suite's files, so that results of other files are never reused."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from featcal.formats.model_files import Commit, model_commits, model_files
from featcal.samples.hub import data_commit
from featcal.samples.named_pictures import named_pictures
from featcal.suite.schema import SPLITS, Suite, references
from featcal.suite.source import Source
from featcal.system.errors import InputError
from featcal.system.fingerprints import FileStamp, stamps
from featcal.system.paths import local_path
from featcal.system.sandbox import require_inside


class Stamp(NamedTuple):
    """State of everything that a suite reads; it differs if anything has changed."""

    text: str
    """The suite's own content."""
    root: str
    """The folder that its relative paths start from."""
    files: tuple[FileStamp, ...]
    """The state of every file of its models and samples."""
    commits: tuple[Commit, ...]
    """Commits of models on the Hub, for those that are fetched."""
    data: tuple[Commit, ...]
    """Commits of data sets on the Hub, for those that are known."""


def suite_stamp(suite: Suite) -> Stamp:
    """Return the state of everything that a suite reads: its text, the files of its models (`model_files`) and of its
    samples, with all sub-folders, and the commits of models and data on the Hub. Nothing is read or fetched; the Hub is
    asked once per process which commits the data sets have.

    The state of a file is its size and times in the file system (`stamps`).
    """
    named = references(suite).values()
    # One look at each file and no reading of gigabytes. A commit on the Hub never changes.
    models = (one for reference in named for one in _model_stamps(reference, suite.root))
    sources = [source for task in suite.tasks.values() for split in SPLITS if (source := task.source(split))]
    samples = (one for source in sources for one in _sample_stamps(source, suite.root))
    files = tuple(dict.fromkeys([*models, *samples]))
    data = tuple(sorted({one for source in sources for one in data_commit(source, suite.root)}))
    return Stamp(suite.model_dump_json(), str(suite.root), files, model_commits(named, suite.root), data)


def model_stamp(reference: str, root: Path) -> tuple[FileStamp | Commit, ...]:
    """Return the state of every local file of a model (`model_files`), and the commit of every part of it on the Hub,
    if it is fetched."""
    return (*_model_stamps(reference, root), *model_commits([reference], root))


def _model_stamps(reference: str, root: Path) -> Iterator[FileStamp]:
    yield from (one for file in model_files(reference, root) for one in stamps(file))


def _sample_stamps(source: Source, root: Path) -> Iterator[FileStamp]:
    """Yield the state of the files that a source reads; the kind `hub` may read a local folder."""
    if source.kind in ("embedded", "self_generated"):
        return
    with suppress(InputError):  # whoever draws samples says what is wrong
        yield from stamps(local_path(str(getattr(source, source.kind)), root, source.kind))
        for file in named_pictures(source, root):
            with suppress(InputError):
                # Rows may be a stranger's, and name any place: a folder is no picture, and is not walked through.
                require_inside(file, "picture")
                if not os.path.isdir(file):
                    yield from stamps(file)

"""Read data sets on the Hub, or in local folders of the same layout, through the package `datasets`."""

from __future__ import annotations

from contextlib import suppress
from functools import lru_cache, partial
from pathlib import Path

from featcal.formats.hub import cached_commit
from featcal.formats.model_files import Commit
from featcal.samples.arrow import ArrowTable
from featcal.samples.hub_repository import (
    explain_reading,
    find_repository,
    hide_bars,
    import_datasets,
    settle_commit,
)
from featcal.samples.hub_rows import find_rows, may_read_rows, read_dataset
from featcal.suite.source import Source
from featcal.system.errors import InputError
from featcal.system.extras import require_packages
from featcal.system.fingerprints import FileStamp, stamps
from featcal.system.paths import local_path
from featcal.system.sandbox import require_links_inside, require_no_hub

_SAVED_TO_DISK = ("dataset_dict.json", "dataset_info.json", "state.json")
"""Files that `save_to_disk` leaves: the first for several splits, the others for one."""


def read_hub(name: str, root: Path, config: str | None, split: str, revision: str | None) -> ArrowTable:
    """Return a split of the data set `name`: of a folder below `root` if there is one, else of an id on the Hub.

    Rows stay on disk, mapped into memory. A data set is opened once, a folder as long as its files stay the same.

    Raises:
        InputError: a folder of `save_to_disk`; `datasets` is not installed; no such data set, configuration, split or
            revision; or the Hub cannot be reached and its cache does not have it.
    """
    folder = local_path(name, root, "hub").resolve()
    if folder.is_dir():
        require_links_inside(folder, "hub")
    else:
        require_no_hub("hub")
    return _open(name, folder, (*stamps(folder), *_commits(name, revision)), config, split, revision)


def data_commit(source: Source, root: Path) -> tuple[Commit, ...]:
    """Return the commit of a source's data set on the Hub (`settle_commit`); empty if it is stored elsewhere, or not
    known."""
    with suppress(InputError):  # whoever draws samples is told
        if source.hub is not None and not local_path(source.hub, root, "hub").is_dir():
            require_no_hub("hub")
            settle_commit(source.hub, source.revision)
            return _commits(source.hub, source.revision)
    return ()


def _commits(name: str, revision: str | None) -> tuple[Commit, ...]:
    commit = cached_commit(name, revision, "dataset")
    return () if commit is None else ((name, commit),)


@lru_cache(maxsize=64)
def _open(
    name: str, folder: Path, state: tuple[FileStamp | Commit, ...], config: str | None, split: str, revision: str | None
) -> ArrowTable:
    refuse_saved_to_disk(folder)
    require_packages("datasets", "pyarrow", label=f"data set '{name}'")
    import datasets

    where = f"data set '{name}'" + (f", configuration '{config}'" if config else "") + f", split '{split}'"
    with explain_reading(f"{name}@{revision}" if revision else name, where):
        if folder.is_dir():
            with hide_bars(name):
                return read_dataset(datasets.load_dataset(str(folder), name=config, split=split), where)
        return _fetch(name, config, split, revision, where)


def _fetch(name: str, config: str | None, split: str, revision: str | None, where: str) -> ArrowTable:
    """Fetch a split of a data set on the Hub; only that split if it can be read by itself."""
    datasets = import_datasets(name)
    repository = find_repository(name, revision)
    layout = None if repository is None else repository.lay_out(config)
    load = partial(datasets.load_dataset, name, name=config, split=split)
    if layout is None:
        with hide_bars(name):
            return read_dataset(load(revision=revision), where)
    layout.splits_of(split)
    if layout.is_prepared_whole or not layout.parts:
        commit = layout.repository.commit if layout.is_prepared_whole else revision
        with layout.fetch_files(split):
            return read_dataset(load(revision=commit), where)
    if may_read_rows(layout, split) and not layout.is_prepared(split):
        return find_rows(layout, split, keep=True).table(where)
    return read_dataset(layout.prepare(split), where)


def refuse_saved_to_disk(folder: Path) -> None:
    """Raise an InputError with the remedy if a folder was written by the `save_to_disk` of `datasets`."""
    files = {name for name in _SAVED_TO_DISK if (folder / name).is_file()}
    if "dataset_dict.json" in files or len(files) == 2:
        raise InputError(
            f"{folder} was written by save_to_disk, the cache format of `datasets`; write every split as a file, "
            "load_from_disk(...)['train'].to_parquet('FOLDER/train.parquet') and so on, and give the source "
            "{parquet: FOLDER, split: train}"
        )

"""Data sets on the Hub, or in local folders of the same layout, through the package `datasets`."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from featcal.errors import InputError
from featcal.tasks.arrow import ArrowTable


@lru_cache(maxsize=64)
def read_hub(name: str, root: Path, config: str | None, split: str, revision: str | None) -> ArrowTable:
    """A split of the data set `name`: a folder below `root` if there is one, else an id on the Hub.

    Rows stay on disk, mapped into memory.

    Raises:
        InputError: `datasets` is not installed; no such data set, configuration, split or revision; or the Hub
            cannot be reached and its cache does not have it.
    """
    try:
        import datasets
    except ImportError as error:
        raise InputError(
            f"data set '{name}' is read with the package 'datasets': pip install 'featcal[hub]'"
        ) from error
    folder = (root / name).resolve()
    place = str(folder) if folder.is_dir() else name
    where = f"data set '{name}'" + (f", configuration '{config}'" if config else "")
    try:
        opened = datasets.load_dataset(place, name=config, split=split, revision=revision)
    except (datasets.exceptions.DatasetsError, OSError, ValueError, RuntimeError) as error:
        reason = next(iter(str(error).splitlines()), "no reason given")
        raise InputError(f"{where}, split '{split}' cannot be loaded ({type(error).__name__}: {reason})") from error
    table = opened.with_format("arrow")[:]
    batches = table.to_batches()

    def read(chunk: int, columns: list[str]) -> Any:
        import pyarrow as pa

        return pa.Table.from_batches([batches[chunk]]).select(columns)

    return ArrowTable(f"{where}, split '{split}'", table.schema, [len(batch) for batch in batches], read)

"""List the pictures that rows name by their files."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from featcal.samples.arrow import picture_cells
from featcal.samples.table import picture_of, read_jsonl
from featcal.suite.source import Source
from featcal.system.fingerprints import FileStamp, stamps
from featcal.system.paths import local_path


def named_pictures(source: Source, root: Path) -> Iterator[Path]:
    """Yield the files of pictures that the rows of JSON Lines or Parquet name, whether or not they are there.

    Raises:
        InputError: the rows cannot be read.
    """
    column = source.image or ("image" if source.input is None else None)
    if column is None or source.kind not in ("jsonl", "parquet"):
        return
    path = local_path(str(getattr(source, source.kind)), root, source.kind)
    folder = path if path.is_dir() else path.parent
    yield from (folder / name for name in _names(source.kind, path, column, tuple(stamps(path))))


@lru_cache(maxsize=64)
def _names(kind: str, path: Path, column: str, state: tuple[FileStamp, ...]) -> tuple[str, ...]:
    if not state:
        return ()
    of_rows = kind == "jsonl"
    cells = [row.get(column) for row in read_jsonl(path).content] if of_rows else picture_cells(path, column)
    return tuple(dict.fromkeys(name for name in map(picture_of, cells) if isinstance(name, str)))

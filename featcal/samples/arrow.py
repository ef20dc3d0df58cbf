"""Read columns from disk: parquet files, and the arrow tables of Hub data sets."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from featcal.samples.table import Row
from featcal.system.errors import InputError
from featcal.system.extras import require_packages
from featcal.system.paths import require_plain

if TYPE_CHECKING:
    import pyarrow as pa


SPLIT_NAMES = {
    "calibration": ("calibration", "train", "training"),
    "validation": ("validation", "val", "valid", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""Names that files, folders and rows of a suite's splits have; `datasets` takes the same ones for the same split."""
EVERY_SPLIT_NAME = tuple(chain.from_iterable(SPLIT_NAMES.values()))
_MOST_DIGITS = 18
"""Number of digits that always fit 64 bits."""
_BETWEEN = r"[-._ 0-9]"
"""Characters between the words of a file's name, those of `datasets`."""


@dataclass(frozen=True)
class ArrowTable:
    """Columns on disk in chunks of rows, of which only the wanted ones are read."""

    where: str
    schema: pa.Schema
    sizes: Sequence[int]
    """Number of rows of every chunk."""
    read: Callable[[int, list[str]], pa.Table]
    """Returns some columns of a chunk."""
    folder: Path = Path()
    """Folder of pictures that are named by a path."""
    fetch: Callable[[Iterable[int]], None] | None = None
    """Fetches some remote chunks of rows at once; None if everything is local."""

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(self.schema.names)

    def __len__(self) -> int:
        return int(sum(self.sizes))

    def column(self, name: str) -> list[Any]:
        if self.fetch is not None:
            self.fetch(range(len(self.sizes)))
        return [value for chunk in range(len(self.sizes)) for value in self.read(chunk, [name])[name].to_pylist()]

    def rows(self, wanted: Sequence[int], columns: Sequence[str], optional: Sequence[str] = ()) -> list[Row]:
        read = [*columns, *(name for name in optional if name in self.columns)]
        self.prepare(wanted)
        ends, chunks = np.cumsum(self.sizes), self._chunks_of(wanted)
        found: dict[int, Row] = {}
        for chunk in np.unique(chunks):
            here = np.flatnonzero(chunks == chunk)
            local = np.asarray(wanted)[here] - (ends[chunk] - self.sizes[chunk])
            part = self.read(int(chunk), read).take(local)
            found.update(zip(here.tolist(), part.to_pylist(), strict=True))
        return [found[position] for position in range(len(wanted))]

    def prepare(self, wanted: Sequence[int]) -> None:
        """Fetch some rows at once, if they are remote."""
        if self.fetch is not None:
            self.fetch(np.unique(self._chunks_of(wanted)).tolist())

    def slice(self, start: int, count: int, columns: list[str]) -> pa.Table:
        """Return some columns of consecutive rows."""
        ends = np.cumsum(self.sizes)
        first, last = self._chunks_of([start, start + count - 1])
        parts = [self.read(chunk, columns) for chunk in range(first, last + 1)]
        return (
            import_pyarrow(self.where).concat_tables(parts).slice(start - int(ends[first] - self.sizes[first]), count)
        )

    def _chunks_of(self, rows: Sequence[int]) -> NDArray[np.int64]:
        return np.searchsorted(np.cumsum(self.sizes), np.asarray(rows, dtype=np.int64), side="right")

    def has_numbers(self, column: str) -> bool:
        """Say whether a column holds integers or booleans, as class indices are."""
        types, kind = import_pyarrow(self.where).types, self.schema.field(column).type
        return bool(types.is_integer(kind) or types.is_boolean(kind))

    def class_names(self, column: str) -> tuple[str, ...] | None:
        described = (self.schema.metadata or {}).get(b"huggingface")
        if described is None:
            return None
        try:
            names = json.loads(described)["info"]["features"][column]["names"]
        except (ValueError, KeyError, TypeError):
            return None  # another description, or not a column of classes
        return tuple(map(str, names))

    def place(self, row: int) -> str:
        return f"{self.where}, row {row}"


def import_pyarrow(label: str) -> Any:
    """Return the package pyarrow, with its module for Parquet; InputError if it is not installed."""
    require_packages("pyarrow", label=label)
    import pyarrow
    import pyarrow.parquet

    return pyarrow


def read_parquet(path: Path, split: str | None) -> tuple[ArrowTable, bool]:
    """Return the table of a parquet file or a folder of them, and whether its files belong only to `split`.

    In a folder the Hub's names decide: the files of split "test" are `test.parquet`, `test-*.parquet` or lie in
    `test/`, or in `split=test/` as partitions of a table. Without any of these they have the split as a word in their
    name or in that of a folder, as `test_0.parquet` and `data-test.parquet`. If no file has such a name, all files are
    read.

    Raises:
        InputError: there are no parquet files, or they cannot be read or have different columns.
    """
    files = sorted(path.rglob("*.parquet")) if path.is_dir() else [path]
    if not files:
        raise InputError(f"{path} has no .parquet files")
    named = [] if split is None else _files_of_split(path, files, split)
    return _parquet_table(path, named or files), bool(named)


def splits_of_files(path: Path) -> list[str]:
    """Return the splits that the names of a folder's parquet files tell apart."""
    files = list(path.rglob("*.parquet")) if path.is_dir() else []
    return [name for name in EVERY_SPLIT_NAME if _files_of_split(path, files, name)]


def picture_cells(path: Path, column: str) -> list[Any]:
    """Return the cells of a column of pictures that may be file names, from a parquet file or all files of a folder;
    only the path of `{"bytes", "path"}`, and none if the bytes of every picture are stored.

    Raises:
        InputError: `pyarrow` is not installed, or the files cannot be read.
    """
    require_packages("pyarrow", label="Parquet files")
    import pyarrow as pa
    import pyarrow.parquet as pq

    cells: list[Any] = []
    for file in sorted(path.rglob("*.parquet")) if path.is_dir() else [path]:
        require_plain(file)
        try:
            with pq.ParquetFile(file) as opened:
                schema = opened.schema_arrow
                text = column in schema.names and "string" in str(schema.field(column).type)
                for number in range(opened.num_row_groups):
                    if names := _name_column(opened.metadata.row_group(number), column, text):
                        cells += opened.read_row_group(number, columns=[names])[column].to_pylist()
        except (pa.ArrowException, OSError, ValueError) as error:
            raise InputError(f"{file} is not a whole parquet file ({error})") from error
    return cells


def _name_column(group: Any, column: str, text: bool) -> str | None:
    """Return the file names in a column of some rows; None if there are none."""
    leaves = {leaf.path_in_schema: leaf for leaf in map(group.column, range(group.num_columns))}
    if f"{column}.path" not in leaves:
        return column if text else None
    counted = leaves[f"{column}.bytes"].statistics if f"{column}.bytes" in leaves else None
    return None if counted is not None and counted.null_count == 0 else f"{column}.path"


def _files_of_split(folder: Path, files: Sequence[Path], split: str) -> list[Path]:
    """Return the files of a folder that their names give to a split; of a file that is given itself none."""
    if not folder.is_dir():
        return []
    # The plain name comes first: beside `train-*` the files `train_extra-*` are a split of their own on the Hub. A
    # folder comes last, and only for files without a split in their name: `train_and_test/test_0` is of "test" alone.
    ways: tuple[Callable[[Path], bool], ...] = (
        lambda name: (
            name.stem == split
            or name.stem.startswith(f"{split}-")
            or any(part in (split, f"split={split}") for part in name.parts[:-1])
        ),
        lambda name: _has_word(name.stem, split),
        lambda name: (
            any(_has_word(part, split) for part in name.parts[:-1])
            and not any(_has_word(name.stem, one) for one in EVERY_SPLIT_NAME)
        ),
    )
    named = ([file for file in files if belongs(file.relative_to(folder))] for belongs in ways)
    return next(filter(None, named), [])


def _count_whole(table: pa.Table) -> pa.Table:
    """Return a table whose decimals without places are integers, as databases write them."""
    types = import_pyarrow("Parquet files").types
    for place, field in enumerate(table.schema):
        if types.is_decimal(field.type) and field.type.scale == 0 and field.type.precision <= _MOST_DIGITS:
            table = table.set_column(place, field.name, table.column(place).cast("int64"))
    return table


def _has_word(name: str, word: str) -> bool:
    return re.search(rf"(?:^|{_BETWEEN}){re.escape(word)}(?:$|{_BETWEEN})", name, re.IGNORECASE) is not None


def _parquet_table(path: Path, files: Sequence[Path]) -> ArrowTable:
    require_packages("pyarrow", label="Parquet files")
    import pyarrow as pa
    import pyarrow.parquet as pq

    places: list[tuple[Path, int]] = []
    sizes: list[int] = []
    schema: pa.Schema | None = None
    for file in files:
        require_plain(file)
        try:
            with pq.ParquetFile(file) as opened:
                own = opened.schema_arrow
                sizes += [opened.metadata.row_group(group).num_rows for group in range(opened.num_row_groups)]
                places += [(file, group) for group in range(opened.num_row_groups)]
        except (pa.ArrowException, OSError, ValueError) as error:
            raise InputError(f"{file} is not a whole parquet file ({error})") from error
        schema = schema or own
        if own.names != schema.names:
            raise InputError(f"{file} has columns {', '.join(own.names)}, {files[0]} has {', '.join(schema.names)}")

    def read(chunk: int, columns: list[str]) -> pa.Table:
        file, group = places[chunk]
        try:
            with pq.ParquetFile(file) as opened:
                return _count_whole(opened.read_row_group(group, columns=columns))
        except (pa.ArrowException, OSError, ValueError) as error:
            raise InputError(f"{file} is not a whole parquet file ({error})") from error

    return ArrowTable(str(path), schema, sizes, read, path if path.is_dir() else path.parent)

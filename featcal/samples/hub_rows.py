"""Read rows of Parquet files on the Hub, fetching only the row groups that a draw needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from featcal.formats.hub_errors import try_again
from featcal.samples.arrow import ArrowTable, import_pyarrow
from featcal.samples.hub_repository import DatasetLayout, Repository, explain_reading, import_datasets
from featcal.system.atomic_files import put
from featcal.system.errors import InputError

if TYPE_CHECKING:
    import pyarrow as pa

T = TypeVar("T")
R = TypeVar("R")
WORTH = 64 << 20
"""Smallest split, in bytes, of which row groups are fetched; smaller ones are fetched whole, with fewer requests."""
SHARE = 0.75
"""Largest share of a split's bytes for which row groups are fetched; beyond it, the whole split is."""
_TAIL = 1 << 16
"""Bytes from the end of a file in the first request: most footers are shorter."""
_AT_ONCE = 8


@dataclass(frozen=True)
class RowGroup:
    """Consecutive rows, and their bytes in a file."""

    file: str
    number: int
    rows: int
    start: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class HubRows:
    """The rows of one split, in its Parquet files on the Hub."""

    layout: DatasetLayout
    split: str
    footers: Mapping[str, bytes]
    """The end of every file, from its footer on, in their order."""
    groups: Sequence[RowGroup]
    schema: pa.Schema

    @classmethod
    def from_footers(cls, layout: DatasetLayout, split: str, footers: Mapping[str, bytes]) -> HubRows:
        """Read footers: the rows of every row group, and the column types that `datasets` gives."""
        datasets = import_datasets(layout.repository.name)
        features = layout.builder.info.features or layout.builder.config.features
        groups: list[RowGroup] = []
        for file, footer in footers.items():
            opened = _parse(footer)
            features = features or datasets.Features.from_arrow_schema(opened.schema_arrow)
            groups += (_place(file, number, opened.metadata) for number in range(opened.num_row_groups))
        return cls(layout, split, footers, groups, features.arrow_schema)

    def __len__(self) -> int:
        return sum(group.rows for group in self.groups)

    def missing(self, rows: Sequence[int]) -> list[RowGroup]:
        """Return the row groups of some rows that are not fetched yet."""
        return [self.groups[number] for number in sorted({*self._numbers(rows)}) if not self._is_here(number)]

    def count_here(self, rows: Sequence[int]) -> int:
        """Return how many of the given rows, from the first one, can be read without a download."""
        return next((place for place, one in enumerate(self._numbers(rows)) if not self._is_here(one)), len(rows))

    def _numbers(self, rows: Sequence[int]) -> list[int]:
        """Return the numbers of the row groups of some rows."""
        ends = np.cumsum([group.rows for group in self.groups])
        found: list[int] = np.searchsorted(ends, np.asarray(rows, dtype=np.int64), side="right").tolist()
        return found

    def _is_here(self, number: int) -> bool:
        return self._file_of(self.groups[number]).is_file()

    def takes_all(self, missing: Sequence[RowGroup]) -> bool:
        """Say whether so many row groups are needed, including those already here, that the whole split is fetched."""
        here = [group for group in self.groups if self._file_of(group).is_file()]
        return sum(one.size for one in (*here, *missing)) > SHARE * sum(one.size for one in self.groups)

    def fetched_bytes(self, rows: Sequence[int]) -> int:
        """Return the bytes to fetch for some rows, including missing footers."""
        missing, sizes = self.missing(rows), self.layout.repository.sizes
        groups = self.groups if missing and self.takes_all(missing) else missing
        here = kept_footers(self.layout, self.split) is not None
        tails = 0 if here else sum(max(len(one), min(_TAIL, sizes[file])) for file, one in self.footers.items())
        if groups is self.groups:
            return tails + sum(sizes[file] for file in self.footers)
        return tails + sum(group.size for group in groups)

    def table(self, where: str) -> ArrowTable:
        """Return the rows as a table that fetches each row when it is read."""
        whole: list[ArrowTable] = []

        def fetch(chunks: Iterable[int]) -> None:
            if whole:
                return
            missing = [group for one in chunks if not self._file_of(group := self.groups[one]).is_file()]
            if not missing:
                return
            with explain_reading(self.layout.repository.ref, where):
                if self.takes_all(missing):
                    whole.append(read_dataset(self.layout.prepare(self.split), where))
                else:
                    self._fetch(missing)

        def read(chunk: int, columns: list[str]) -> pa.Table:
            fetch([chunk])
            if whole:
                start = sum(group.rows for group in self.groups[:chunk])
                return whole[0].slice(start, self.groups[chunk].rows, columns)
            return _read_arrow(self._file_of(self.groups[chunk])).select(columns)

        return ArrowTable(where, self.schema, [group.rows for group in self.groups], read, fetch=fetch)

    def _file_of(self, group: RowGroup) -> Path:
        return _folder_of(self.layout.repository, group.file) / f"{group.number}.arrow"

    def _fetch(self, groups: Sequence[RowGroup]) -> None:
        read = _range_reader(self.layout.repository)

        def fetch_one(group: RowGroup) -> None:
            rows = self._decode(group, read(group.file, group.start, group.end))
            put(self._file_of(group), lambda place: _write_arrow(rows, place))

        _side_by_side(fetch_one, groups)

    def _decode(self, group: RowGroup, content: bytes) -> pa.Table:
        """Return the rows of a row group in the form of `datasets`."""
        pa, datasets = import_pyarrow(group.file), import_datasets(self.layout.repository.name)
        footer, size = self.footers[group.file], self.layout.repository.sizes[group.file]
        # A file with holes: pages that nobody writes to take no memory.
        whole = np.zeros(size, dtype=np.uint8)
        whole[group.start : group.end] = np.frombuffer(content, dtype=np.uint8)
        whole[size - len(footer) :] = np.frombuffer(footer, dtype=np.uint8)
        with pa.parquet.ParquetFile(pa.BufferReader(pa.py_buffer(whole))) as opened:
            return datasets.table.table_cast(opened.read_row_group(group.number), self.schema)


def may_read_rows(layout: DatasetLayout, split: str) -> bool:
    """Say whether row groups of a split can be fetched, and whether that may be worthwhile."""
    config = layout.builder.config
    if layout.builder.name != "parquet" or split not in layout.splits or config.columns or config.filters is not None:
        return False
    return sum(layout.repository.sizes[file] for file in layout.splits[split]) >= WORTH


def find_rows(layout: DatasetLayout, split: str, *, keep: bool) -> HubRows:
    """Return the rows of a split, after fetching missing footers.

    Args:
        keep: keep footers for the next time.
    """
    found = kept_footers(layout, split)
    if found is None:
        read, sizes = _range_reader(layout.repository), layout.repository.sizes

        def fetch_one(file: str) -> bytes:
            tail = read(file, max(0, sizes[file] - _TAIL), sizes[file])
            start = sizes[file] - min(int.from_bytes(tail[-8:-4], "little") + 8, sizes[file])
            more = sizes[file] - len(tail) - start
            return tail[-more:] if more <= 0 else read(file, start, start + more) + tail

        files = layout.splits[split]
        found = dict(zip(files, _side_by_side(fetch_one, files), strict=True))
        if keep:
            for file, footer in found.items():
                folder = _folder_of(layout.repository, file)
                folder.mkdir(parents=True, exist_ok=True)
                put(folder / "footer", partial(_write_bytes, footer))
    return HubRows.from_footers(layout, split, found)


def kept_footers(layout: DatasetLayout, split: str) -> dict[str, bytes] | None:
    """Return the stored footers of a split's files; None if one is missing."""
    places = {file: _folder_of(layout.repository, file) / "footer" for file in layout.splits[split]}
    if not all(place.is_file() for place in places.values()):
        return None
    return {file: place.read_bytes() for file, place in places.items()}


def read_dataset(opened: Any, where: str) -> ArrowTable:
    """Return a data set that `datasets` has opened as a table; its rows stay on disk, mapped into memory."""
    table, pa = opened.with_format("arrow")[:], import_pyarrow(where)
    batches = table.to_batches()

    def read(chunk: int, columns: list[str]) -> Any:
        return pa.Table.from_batches([batches[chunk]]).select(columns)

    return ArrowTable(where, table.schema, [len(batch) for batch in batches], read)


def _folder_of(repository: Repository, file: str) -> Path:
    return repository.folder / "rows" / file


def _range_reader(repository: Repository) -> Callable[[str, int, int], bytes]:
    """Return a function that reads some bytes of a file on the Hub, with retries after temporary failures."""
    from huggingface_hub import HfFileSystem, constants

    files = HfFileSystem(endpoint=constants.ENDPOINT)
    top = f"datasets/{repository.name}@{repository.commit}"

    def read(file: str, start: int, end: int) -> bytes:
        content: bytes = try_again(lambda: files.cat_file(f"{top}/{file}", start, end, cache_type="none"))
        if len(content) != end - start:
            raise InputError(
                f"{file} of '{repository.name}' on the Hub: {len(content)} bytes came of the {end - start} that were "
                "asked for; start again"
            )
        return content

    return read


def _side_by_side(work: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """Apply a function to every item in parallel; after a failure no further item begins."""
    pool = ThreadPoolExecutor(_AT_ONCE)
    try:
        return list(pool.map(work, items))
    finally:
        pool.shutdown(cancel_futures=True)


def _parse(footer: bytes) -> Any:
    pa = import_pyarrow("Parquet files")
    return pa.parquet.ParquetFile(pa.BufferReader(footer))


def _place(file: str, number: int, metadata: Any) -> RowGroup:
    group = metadata.row_group(number)
    columns = [group.column(one) for one in range(group.num_columns)]
    # A column begins with its dictionary where it has one.
    starts = [one.dictionary_page_offset or one.data_page_offset for one in columns]
    ends = [start + one.total_compressed_size for start, one in zip(starts, columns, strict=True)]
    return RowGroup(file, number, group.num_rows, min(starts), max(ends))


def _write_bytes(content: bytes, place: Path) -> None:
    place.write_bytes(content)


def _write_arrow(rows: pa.Table, place: Path) -> None:
    pa = import_pyarrow("Parquet files")
    with pa.OSFile(str(place), "wb") as stream, pa.ipc.new_file(stream, rows.schema) as writer:
        writer.write_table(rows)


def _read_arrow(place: Path) -> pa.Table:
    pa = import_pyarrow("Parquet files")
    return pa.ipc.open_file(pa.memory_map(str(place))).read_all()

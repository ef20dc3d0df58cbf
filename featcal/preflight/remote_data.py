"""Check a data set on the Hub before its data are fetched: the planned download of a source, and its problems."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from featcal.preflight.remote import Download
from featcal.samples.hub_repository import (
    ALONE,
    DatasetLayout,
    Repository,
    cache_folder_of,
    describe_repository,
    explain_reading,
    hold_to,
    known_repository,
)
from featcal.samples.hub_rows import HubRows, find_rows, kept_footers, may_read_rows
from featcal.samples.records import label_column, require_columns
from featcal.suite.source import Source
from featcal.system.extras import is_installed, require_packages

DrawnRows = Callable[[int], Sequence[int]]
"""Function from the total number of rows to the rows that a run would draw, with those of a smaller draw first."""


@dataclass(frozen=True)
class RemoteData:
    """A data set that the Hub has described."""

    repository: Repository

    def plan(self, source: Source, rows: DrawnRows | None) -> Download:
        """Return the planned download of a source.

        Args:
            rows: gives the rows, of so many, that a run would draw; None for all.

        Raises:
            InputError: `datasets` would not read it, or it has no such configuration, split or column, as far as its
                card and its file names tell.
        """
        layout = self.repository.lay_out(source.config) if is_installed("datasets") else None
        if layout is None:
            return self._plan_unknown(source)
        split = str(source.split)
        layout.splits_of(split)
        files = layout.files_of(split)
        if layout.columns is not None:
            require_columns(source, layout.columns)
        name = _name(source, [source.config, split if layout.parts else None])
        whole = sum(self.repository.sizes[file] for file in files)
        if rows is not None and may_read_rows(layout, split):
            with explain_reading(self.repository.ref, f"data set {name}"):
                found = find_rows(layout, split, keep=False)
            size = found.fetched_bytes(_needed_rows(found, source, rows))
            if size < whole:
                return Download(name, "data set", len(files), size)
        return Download(name, "data set", len(files), whole, copied_bytes=layout.copied_bytes(split))

    def _plan_unknown(self, source: Source) -> Download:
        """Return the size of all files, or of those of one configuration where it has a folder of its own."""
        sizes = self.repository.sizes
        start = f"{source.config}/"
        own = {name: size for name, size in sizes.items() if source.config and name.startswith(start)} or sizes
        total = sum(own.values())
        return Download(_name(source, [source.config]), "data set", len(own), total, copied_bytes=total)


def ask_data(source: Source) -> RemoteData:
    """Ask the Hub for the data set of a source.

    Raises:
        InputError: no such data set or revision, or gated.
        Unreachable: the Hub does not answer.
    """
    return RemoteData(describe_repository(str(source.hub), source.revision))


def is_data_cached(source: Source, rows: DrawnRows | None) -> bool:
    """Say whether the part of a Hub data set that a source reads is in the cache.

    Args:
        rows: gives the rows, of so many, that a run would draw; None for all.
    """
    require_packages("datasets", label=str(source.hub))
    known = known_repository(str(source.hub), source.revision)
    layout = None if known is None else known.lay_out(source.config)
    if known is not None and layout is not None and layout.parts:
        here = _has_rows(layout, source, rows)
        if here:
            # Opening it must not fetch what has changed since.
            hold_to(known, source.revision)
        return here
    folder = cache_folder_of(str(source.hub))
    prepared = [file.parents[2].name for file in folder.glob("*/*/*/dataset_info.json")]
    return any(source.config in (None, one, one.partition("-")[0]) for one in prepared if not one.endswith(ALONE))


def _has_rows(layout: DatasetLayout, source: Source, rows: DrawnRows | None) -> bool:
    split = str(source.split)
    if layout.is_prepared(split):
        return True
    found = _kept_rows(layout, split)
    return found is not None and rows is not None and not found.missing(_needed_rows(found, source, rows))


def _kept_rows(layout: DatasetLayout, split: str) -> HubRows | None:
    """Return a split of which single row groups may be here; None where none were fetched."""
    footers = kept_footers(layout, split) if may_read_rows(layout, split) else None
    return None if footers is None else HubRows.from_footers(layout, split, footers)


def describe_rows_here(source: Source, rows: DrawnRows | None) -> str:
    """Say how many samples of a draw were fetched, as the end of a phrase that names them; "" where none were."""
    known = known_repository(str(source.hub), source.revision)
    layout = None if known is None or rows is None else known.lay_out(source.config)
    found = None if layout is None else _kept_rows(layout, str(source.split))
    if found is None or rows is None:
        return ""
    wanted = rows(len(found))
    here = found.count_here(wanted) if _needed_rows(found, source, rows) == wanted else 0
    return f", of which {here} of {len(wanted)} are here, enough for --samples {here}" if here else ""


def _needed_rows(found: HubRows, source: Source, rows: DrawnRows) -> Sequence[int]:
    """Return the drawn rows; all of them where labels are words, which are counted over the whole split."""
    table = found.table("")
    label = label_column(source, table.columns)
    return rows(len(found)) if label is None or table.has_numbers(label) else range(len(found))


def _name(source: Source, parts: list[str | None]) -> str:
    ref = f"{source.hub}@{source.revision}" if source.revision else str(source.hub)
    known = ", ".join(part for part in parts if part)
    return f"{ref} ({known})" if known else ref

"""Look at a data set on the Hub before its data are fetched: what a source would fetch of it, and what is wrong."""

from __future__ import annotations

from dataclasses import dataclass

from featcal.preflight.remote import Download
from featcal.samples.hub_repository import (
    ALONE,
    Repository,
    cache_folder_of,
    describe_repository,
    known_repository,
)
from featcal.samples.records import require_columns
from featcal.suite.source import Source
from featcal.system.extras import is_installed, require_packages


@dataclass(frozen=True)
class RemoteData:
    """A data set that the Hub has described."""

    repository: Repository

    def plan(self, source: Source) -> Download:
        """Return what a source would fetch of it.

        Raises:
            InputError: `datasets` would not read it, or it has no such configuration, split or column, as far as its
                card and its file names tell.
        """
        layout = self.repository.lay_out(source.config) if is_installed("datasets") else None
        if layout is None:
            return self._plan_unknown(source)
        split = str(source.split)
        files = layout.files_of(split)
        layout.splits_of(split)
        if layout.columns is not None:
            require_columns(source, layout.columns)
        parts = [source.config, split if layout.parts else None]
        size = sum(self.repository.sizes[file] for file in files)
        return Download(_name(source, parts), "data set", len(files), size, copied_bytes=layout.copied_bytes(split))

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


def is_data_cached(source: Source) -> bool:
    """Say whether the package `datasets` has prepared what a source reads of a data set on the Hub."""
    require_packages("datasets", label=str(source.hub))
    known = known_repository(str(source.hub), source.revision)
    layout = None if known is None else known.lay_out(source.config)
    if layout is not None and layout.parts:
        return layout.is_prepared(str(source.split))
    folder = cache_folder_of(str(source.hub))
    prepared = [file.parents[2].name for file in folder.glob("*/*/*/dataset_info.json")]
    return any(source.config in (None, one, one.partition("-")[0]) for one in prepared if not one.endswith(ALONE))


def _name(source: Source, parts: list[str | None]) -> str:
    ref = f"{source.hub}@{source.revision}" if source.revision else str(source.hub)
    known = ", ".join(part for part in parts if part)
    return f"{ref} ({known})" if known else ref

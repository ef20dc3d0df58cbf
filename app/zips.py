"""Send a checkpoint of the list as one zip file, read from disk while it is sent.

This module imports neither streamlit nor torch, because the server imports it before it serves anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from zipfile import ZIP_STORED, ZipFile, ZipInfo

from featcal.studies.checkpoints import Checkpoints, WrittenModel
from featcal.system.errors import InputError
from featcal.system.sandbox import require_in_roots

ROUTE = "checkpoint"
"""Address of downloads beside the pages, followed by the id of a checkpoint."""
PIECE = 2**20
"""Bytes that are read, and so in memory, at a time."""
is_served = False
"""True in a process that serves `ROUTE` (`app.server`)."""


def visible(known: Iterable[WrittenModel]) -> list[WrittenModel]:
    """Return the checkpoints that a visitor may see: on a shared server those in its folders."""
    found = []
    for written in known:
        try:
            require_in_roots(Path(written.folder), "checkpoint")
        except InputError:
            continue
        found.append(written)
    return found


def find(identity: str) -> WrittenModel | None:
    """Return the checkpoint of the list with this id, if a visitor may see it."""
    return next((one for one in visible(Checkpoints().read_all()) if one.id == identity), None)


def link(identity: str, base: str) -> str:
    """Return the address of a checkpoint's zip on a server whose pages are below `base`."""
    return "/".join(["", *filter(None, [base.strip("/")]), ROUTE, identity])


class _Pieces:
    """A write-only file whose content is taken out piece by piece."""

    def __init__(self) -> None:
        self._written: list[bytes] = []

    def write(self, piece: bytes) -> int:
        self._written.append(bytes(piece))
        return len(piece)

    def flush(self) -> None:
        """Do nothing, because writes are immediate."""

    def take(self) -> bytes:
        """Return the content written since the last call."""
        taken, self._written = b"".join(self._written), []
        return taken


def zip_pieces(folder: Path, files: Iterable[Path]) -> Iterator[bytes]:
    """Yield a zip file that contains a folder, uncompressed because weights do not compress.

    Args:
        files: paths in the folder.
    """
    sink = _Pieces()
    with ZipFile(sink, "w", ZIP_STORED) as archive:  # type: ignore[call-overload]
        for name in files:
            entry = ZipInfo.from_file(folder / name, f"{folder.name}/{name.as_posix()}")
            with (folder / name).open("rb") as source, archive.open(entry, "w", force_zip64=True) as member:
                while piece := source.read(PIECE):
                    member.write(piece)
                    yield sink.take()
    yield sink.take()

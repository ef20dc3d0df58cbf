"""Keep a list of the checkpoints written on this machine: their folders, and their measurements at that time."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any
from uuid import uuid4

from featcal.formats.hub import RECORD_FILE
from featcal.studies.history import HistoryEntry, RunMeasurement
from featcal.studies.records import Records
from featcal.system.errors import InputError
from featcal.system.fingerprints import json_digest, stamps
from featcal.system.json_files import read_json
from featcal.system.resources import cache_folder


@dataclass(frozen=True)
class WrittenModel:
    """A checkpoint written on this machine, with its measurements at that time."""

    id: str
    """32 hexadecimal digits."""
    folder: str
    """Absolute path of the checkpoint's folder."""
    run: HistoryEntry
    """Id of its run (`featcal.studies.recording.run_of`), whether or not the history contains it."""
    time: str
    """Time at which the checkpoint was written: UTC, ISO 8601."""
    tensors: str
    """Digest of the hashes of its tensors, and of the state of its weights and settings; if the folder gets others, it
    is another checkpoint."""
    loading: str
    """Lines of Python that load the checkpoint."""
    before: RunMeasurement | None
    """Measurements of the model before calibration, on the samples of `after`."""
    after: RunMeasurement | None

    @property
    def is_there(self) -> bool:
        """Say whether the folder still holds this checkpoint."""
        try:
            return _tensors(Path(self.folder)) == self.tensors
        except InputError:
            return False

    def record(self) -> dict[str, Any]:
        """Return the content of its `featcal.json`.

        Raises:
            InputError: the file can no longer be read.
        """
        return read_json(Path(self.folder) / RECORD_FILE)

    @property
    def files(self) -> dict[Path, int]:
        """Return the bytes of every file in the folder, by its path; the card is included."""
        place = Path(self.folder)
        found = sorted(one for one in place.rglob("*") if one.is_file())
        return {one.relative_to(place): one.stat().st_size for one in found}


class Checkpoints(Records):
    """The checkpoints written on this machine. Several processes may write at once.

    Args:
        folder: by default `checkpoints` in the user's cache folder.
    """

    def __init__(self, folder: Path | None = None) -> None:
        super().__init__(cache_folder() / "checkpoints" if folder is None else folder, "the list of checkpoints")

    def add(
        self,
        folder: Path,
        run: HistoryEntry,
        loading: str,
        before: RunMeasurement | None = None,
        after: RunMeasurement | None = None,
    ) -> WrittenModel:
        """Add a folder that was just written; if the list cannot be written, `problems` says why.

        Raises:
            InputError: the folder has no record.
        """
        place, now = folder.absolute(), datetime.now(UTC).isoformat(timespec="microseconds")
        written = WrittenModel(uuid4().hex, str(place), run, now, _tensors(place), loading, before, after)
        self.write(self.folder / f"{written.id}.json", asdict(written))
        return written

    def read_all(self) -> list[WrittenModel]:
        """Return the checkpoints that still exist, newest first; each folder once."""
        files = sorted(self.folder.glob("*.json")) if self.folder.is_dir() else []
        found = [one for file in files if (one := self.read(str(file), WrittenModel)) is not None]
        newest: dict[str, WrittenModel] = {}
        for one in sorted(found, key=lambda one: one.time, reverse=True):
            if one.folder not in newest and one.is_there:
                newest[one.folder] = one
        return [*newest.values()]

    def find(self, run_id: str) -> list[WrittenModel]:
        """Return the checkpoints of a run, newest first."""
        return [one for one in self.read_all() if one.run.id == run_id]

    def remove(self, written: WrittenModel) -> None:
        """Remove a checkpoint from the list; its folder stays. If the list cannot be written, `problems` says why."""
        try:
            for file in self.folder.glob("*.json"):
                one = self.read(str(file), WrittenModel)
                if one is not None and one.folder == written.folder:
                    file.unlink(missing_ok=True)
        except OSError as error:
            self.tell(f"{self.folder} cannot be written: {error.strerror}")


def _tensors(folder: Path) -> str:
    """Return the digest of the hashes of a folder's tensors from its record, and of the state of the files that hold
    weights and settings, so that what was edited in place is something else.

    Raises:
        InputError: the folder has no record.
    """
    file = folder / RECORD_FILE
    missing = f"{folder} has no {RECORD_FILE}; give a folder that featcal has written"
    if not file.is_file():
        raise InputError(missing)
    state = file.stat()
    held = sorted([*folder.rglob("*.safetensors"), folder / "config.json"])
    # Without the time of change of the file, which moving the folder elsewhere and back may alter.
    files = tuple((str(one.relative_to(folder)), *found[1:3]) for one in held for found in stamps(one))
    return _digest(str(file), (state.st_ino, state.st_size, state.st_mtime_ns), files)


@lru_cache(maxsize=1024)
def _digest(file: str, state: tuple[int, ...], files: tuple[tuple[str, int, int], ...]) -> str:
    """Return the digest of the tensors in a record file, which is read again only if it has changed, and of the state
    of files."""
    return json_digest([read_json(Path(file)).get("tensors"), files])

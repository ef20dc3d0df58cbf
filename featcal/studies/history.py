"""Keep the history of every measured model, in a folder of records that sessions, processes and restarts share.

No file is ever rewritten, so no lock is needed: a run is one file, and every measurement and every mark of a person
(name, notes, pinned) is another. A file appears whole or not at all.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeVar
from uuid import uuid4

from pydantic import Field, FiniteFloat

from featcal.studies.records import Records
from featcal.suite.methods import methods_code
from featcal.system.atomic_files import put
from featcal.system.errors import InputError
from featcal.system.fingerprints import json_digest
from featcal.system.formatting import shorten
from featcal.system.resources import cache_folder, code_digest
from featcal.system.versions import TELLING, extension_versions, versions

if TYPE_CHECKING:  # a list of runs needs no torch
    from featcal.formats.model_files import Commit
    from featcal.suite.schema import Suite
    from featcal.system.fingerprints import FileStamp

T = TypeVar("T")
How = Literal["features", "answers"]
"""Kind of scores: from final features, together with the drift; or from whole answers (for pictures the class)."""
Mark = Literal["name", "notes", "pinned"]
WHOLE = 2**26
"""Total size of a suite's files, in bytes, up to which its hash covers their content."""
LONGEST = 2000
"""Largest number of characters of a name or a note."""
_ID = re.compile(r"[0-9a-f]{16}")


@dataclass(frozen=True)
class TaskValue:
    """A score in 0-1, with the number of samples."""

    metric: str
    value: FiniteFloat
    n: Annotated[int, Field(ge=1)]


@dataclass(frozen=True)
class RunMeasurement:
    """A measurement of a run on some samples; equal whenever the same run is measured again."""

    how: How
    split: str
    samples: int | None
    """Number of samples per task, as requested; None means the whole split."""
    seed: int
    scores: Mapping[str, TaskValue]
    """Scores by task; empty if the samples have no labels."""
    drift: Mapping[str, FiniteFloat]
    """Relative final drift by task: its mean norm over that of the expert's features. Empty if it was not measured."""
    seconds: FiniteFloat | None = None
    """Duration of the calibration, if it was made for this measurement."""
    cpu: FiniteFloat | None = None
    """Processor seconds of the calibration, if known."""

    @property
    def samples_key(self) -> tuple[str, str, int | None, int]:
        """Return a key that is equal for comparable measurements."""
        return self.how, self.split, self.samples, self.seed

    @property
    def mean(self) -> float:
        """Return the unweighted mean score over tasks, 0-1; NaN without scores."""
        return _mean([one.value for one in self.scores.values()])

    @property
    def worst(self) -> float:
        """Return the score of the task with the lowest one; NaN without scores."""
        return min((one.value for one in self.scores.values()), default=float("nan"))

    @property
    def worst_task(self) -> str:
        """Return the first of the tasks with the lowest score; "" without scores."""
        return min(self.scores, key=lambda task: self.scores[task].value, default="")

    @property
    def mean_drift(self) -> float:
        """Return the mean over tasks of the relative final drift; NaN if it was not measured."""
        return _mean(list(self.drift.values()))


@dataclass(frozen=True)
class HistoryEntry:
    """A model of a suite, its measurements, and a person's marks.

    >>> import featcal
    >>> entry = featcal.HistoryEntry("0123456789abcdef", "mini", "0" * 16, "merged", {}, {}, "2026-01-01T00:00:00Z")
    >>> entry.model, entry.measured, entry.pinned
    ('merged', (), False)
    """

    id: str
    """16 hexadecimal digits; equal for the same model of the same suite made with the same versions."""
    suite: str
    suite_hash: str
    model: str
    """Name of the model, as for `--model`."""
    options: Mapping[str, Any]
    """Options of the calibration; empty for a model that is not calibrated."""
    made_by: Mapping[str, str]
    """Versions of featcal, torch, transformers and the packages that bring methods or architectures, and the kind of
    device."""
    time: str
    """Time of the first record: UTC, ISO 8601."""
    measured: tuple[RunMeasurement, ...] = ()
    name: str = ""
    notes: str = ""
    pinned: bool = False

    def find_measured(self, how: How, split: str, samples: int | None, seed: int) -> RunMeasurement | None:
        """Return the measurement on these samples, if there is one."""
        return next((one for one in self.measured if one.samples_key == (how, split, samples, seed)), None)

    def to_json(self) -> dict[str, Any]:
        """Return one entry of `featcal history list --json`."""
        return asdict(self)


class Looks(NamedTuple):
    """Number of times that scores on a suite's test split were computed, and number of different models among them."""

    times: int
    models: int


@dataclass(frozen=True)
class _Look:
    model: str
    time: str
    place: str


class History(Records):
    """Runs in a folder. Several processes may write at once.

    Args:
        folder: by default `runs` in the user's cache folder.

    >>> import featcal, tempfile
    >>> from pathlib import Path
    >>> entry = featcal.HistoryEntry("0123456789abcdef", "mini", "0" * 16, "merged", {}, {}, "2026-01-01T00:00:00Z")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     history = featcal.History(Path(folder))
    ...     added = history.add(entry)
    ...     history.mark(entry.id, "name", "the first")
    ...     [(run.model, run.name) for run in history.runs()]
    [('merged', 'the first')]
    """

    def __init__(self, folder: Path | None = None) -> None:
        super().__init__(cache_folder() / "runs" if folder is None else folder, "the history")

    def add(self, run: HistoryEntry, measured: RunMeasurement | None = None) -> bool:
        """Record a run and a measurement of it; existing records stay. Return False if that fails."""
        place = self.folder / run.suite_hash
        kept = {name: value for name, value in asdict(run).items() if name in _RECORDED}
        files = {f"{run.id}.json": kept}
        if measured is not None:
            how, split, samples, seed = measured.samples_key
            files[f"{run.id}.{how}-{split}-{'all' if samples is None else samples}-{seed}.json"] = asdict(measured)
        return all(self.write(place / name, content) for name, content in files.items())

    def has(self, run: HistoryEntry) -> bool:
        """Say whether a run is recorded."""
        return (self.folder / run.suite_hash / f"{run.id}.json").is_file()

    def runs(self, suite_hash: str | None = None) -> list[HistoryEntry]:
        """Return the runs of a suite, or of all suites, newest first."""
        found: list[HistoryEntry] = []
        for place in self._places() if suite_hash is None else [self.folder / suite_hash]:
            found += self._read(str(place), "")
        return sorted(found, key=lambda run: run.time, reverse=True)

    def get(self, run_id: str) -> HistoryEntry:
        """Return one run.

        Raises:
            InputError: there is no such run.
        """
        place = self._home(run_id)
        for run in self._read(str(place), run_id):
            return run
        raise InputError(f"run {run_id} in {place} cannot be read; see `featcal history list`")

    def mark(self, run_id: str, mark: Mark, value: str | bool) -> None:
        """Name a run, add a note to it, or pin it; "" and False remove the mark.

        Raises:
            InputError: there is no such run, a name or note is too long or contains control characters, or the folder
                cannot be written.
        """
        # A file of its own: rewriting the record would need a lock against everybody else who writes.
        file = self._home(run_id) / f"{run_id}.{mark}"
        text = value if isinstance(value, str) else "yes" if value else ""
        if len(text) > LONGEST or not text.replace("\n", "").isprintable():
            raise InputError(f"{mark}: at most {LONGEST} printable characters")
        try:
            if text:
                put(file, text)
            else:
                file.unlink(missing_ok=True)
        except OSError as error:
            raise InputError(f"{file} cannot be written: {error.strerror}") from error

    def delete(self, run_id: str) -> None:
        """Delete a run and all its measurements.

        Raises:
            InputError: there is no such run, it is pinned, or the folder cannot be written.
        """
        place = self._home(run_id)
        if (place / f"{run_id}.pinned").exists():
            raise InputError(f"run {run_id} is pinned; unpin it first")
        try:
            # The record itself goes last: what is stopped half-way is still a run that can be deleted.
            for file in sorted(place.glob(f"{run_id}.*"), key=lambda file: file.name == f"{run_id}.json"):
                file.unlink(missing_ok=True)
        except OSError as error:
            raise InputError(f"{place} cannot be written: {error.strerror}") from error

    def look(self, suite_hash: str, model: str, place: str) -> bool:
        """Record a use of the test split to score a model; return False if that fails.

        Args:
            place: where the scores are shown, such as "featcal evaluate".
        """
        look = asdict(_Look(model, _timestamp(), place))
        return self.write(self.folder / suite_hash / f"look-{uuid4().hex}.json", look)

    def looks(self, suite_hash: str) -> Looks:
        """Count the uses of the test split of a suite so far."""
        place = str(self.folder / suite_hash)
        files = (f"{place}/{name}" for name in self._names(place) if name.startswith("look-"))
        found = [look for file in files if (look := self.read(file, _Look)) is not None]
        return Looks(len(found), len({look.model for look in found}))

    def _places(self) -> list[Path]:
        return [place for name in self._names(str(self.folder)) if (place := self.folder / name).is_dir()]

    def _names(self, place: str) -> list[str]:
        """Return the names of the files in a folder, without those being written."""
        try:
            return sorted(name for name in os.listdir(place) if not name.startswith("."))
        except FileNotFoundError:
            return []
        except OSError as error:
            # Of a file in the folder's place writing tells; only a list of all runs would be empty without a word.
            if not isinstance(error, NotADirectoryError) or (place == str(self.folder) and not self.problems):
                self.tell(f"{place} cannot be read: {error.strerror}; its runs are not listed")
            return []

    def _home(self, run_id: str) -> Path:
        if is_run_id(run_id):
            for place in self._places():
                if (place / f"{run_id}.json").is_file():
                    return place
        raise InputError(f"no run {shorten(run_id, 40)!r} in {self.folder}; `featcal history list` lists them")

    def _read(self, place: str, prefix: str) -> Iterator[HistoryEntry]:
        """Yield the runs in one folder whose ids begin with a given text."""
        beside: dict[str, list[str]] = {}
        for name in self._names(place):
            run_id, _, rest = name.partition(".")
            if is_run_id(run_id) and run_id.startswith(prefix):
                beside.setdefault(run_id, []).append(rest)
        for run_id, parts in beside.items():
            run = self.read(f"{place}/{run_id}.json", HistoryEntry) if "json" in parts else None
            if run is None:
                continue
            if (run.id, run.suite_hash) != (run_id, os.path.basename(place)):
                self.tell(f"{place}/{run_id}.json is the record of another run; it is left out")
                continue
            measured = [
                self.read(f"{place}/{run_id}.{part}", RunMeasurement) for part in parts if part.endswith(".json")
            ]
            yield replace(
                run,
                measured=tuple(one for one in measured if one is not None),
                name=_read_mark(f"{place}/{run_id}.name") if "name" in parts else "",
                notes=_read_mark(f"{place}/{run_id}.notes") if "notes" in parts else "",
                pinned="pinned" in parts,
            )


def is_run_id(text: str) -> bool:
    """Say whether a text is the id of a run."""
    return _ID.fullmatch(text) is not None


def new_run(
    suite: tuple[str, str],
    model: str,
    options: Mapping[str, Any],
    made_by: Mapping[str, str],
    files: tuple[FileStamp | Commit, ...] = (),
) -> HistoryEntry:
    """Make the record of a run that has no measurements yet.

    Args:
        suite: its name and its hash.
        model: name of the model; for a calibration, of the model before it, since the options state the rest.
        files: state of the checkpoint that the model is or starts from (`ModelRef.files`), since other weights make
            another run.
    """
    start = model.partition("@")[2]
    # What calibrates the suite's own merge is told by its options alone, as before other merges were.
    content = model if not options else dict(options) if not start else [dict(options), start]
    identity = [suite[1], content, dict(made_by), *files]
    # Versions and device are a part of it: they move the last digits of what is measured.
    return HistoryEntry(json_digest(identity)[:16], *suite, model, options, made_by, _timestamp())


def suite_hash(suite: Suite, commits: tuple[Commit, ...] | None = None) -> str:
    """Return 16 hexadecimal digits that identify the state of a suite: models, tasks and samples in its file (not its
    description or recommended options), and the files of its models and samples.

    The hash covers the content of files of at most `WHOLE` bytes together, so a copy elsewhere has the same history; of
    larger ones it covers path, size and times, as in `suite_stamp`. Models and samples on the Hub enter by their commit
    in the cache, or by their names alone before they are fetched; pictures that featcal generates enter by the version
    of featcal, which is part of every run.

    Args:
        commits: of the models, if they are open; by default the current ones.

    Raises:
        InputError: a file cannot be read.
    """
    from featcal.session.fingerprint import suite_stamp

    stamp = suite_stamp(suite)
    stamps = stamp.files
    # Content, so that a copy elsewhere has the same history; of gigabytes the state must do.
    small = sum(size for _, size, _, _ in stamps) <= WHOLE
    files = [(_relative_path(Path(one[0]), suite.root), _digest(*one)) if small else one for one in stamps]
    document = suite.model_dump_json(exclude={"description", "calibration"}, exclude_none=True)
    hub = [*(stamp.commits if commits is None else commits), *stamp.data]
    return hashlib.sha256(json.dumps([document, files, *hub]).encode()).hexdigest()[:16]


def _relative_path(file: Path, root: Path) -> str:
    """Return a path relative to the suite file."""
    return file.relative_to(root).as_posix() if file.is_relative_to(root) else str(file)


@cache
def _digest(path: str, *stamp: int) -> str:
    """Return the SHA-256 of a file in its current state."""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error


def current_maker(device: str) -> dict[str, str]:
    """Return versions and kind of device of this process; runs with other versions or devices are separate runs.

    Like those of extensions featcal's version has 12 digits of the SHA-256 of its code, which a checkout changes
    between versions.
    """
    found = versions(TELLING)
    own = {"featcal": f"{found['featcal']}, {code_digest()[:12]}"}
    return {**found, **own, **extension_versions(), **methods_code(), "device": device}


def _read_mark(file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8")[:LONGEST]
    except (OSError, ValueError):
        return ""


_RECORDED = ("id", "suite", "suite_hash", "model", "options", "made_by", "time")


def _timestamp() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds")


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else float("nan")

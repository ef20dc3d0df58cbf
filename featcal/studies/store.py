"""Keep what was measured of one model on one suite: a small file each, written when it is done and never again.

A study that was ended finds its finished rows here, and so does any other study that asks for the same.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, FiniteFloat, TypeAdapter, ValidationError

from featcal.studies.history import TaskValue
from featcal.system.atomic_files import put_new
from featcal.system.resources import cache_folder

_DIGITS = 6
"""Of what is written: far more than any of it means."""


@dataclass(frozen=True)
class Spent:
    """Seconds of one stage."""

    wall: FiniteFloat
    cpu: FiniteFloat


@dataclass(frozen=True)
class Found:
    """Measurements of one model, or why there are none."""

    scores: Mapping[str, TaskValue]
    """By task; empty where samples have no labels."""
    drift: Mapping[str, FiniteFloat]
    """By task: relative drift of the final features."""
    cosine: Mapping[str, Annotated[float, Field(ge=-1.001, le=1.001)]]
    """By task: mean cosine of the final features to the expert's."""
    seconds: Mapping[str, Spent]
    """Of making the model ("make"), scoring it and measuring its features ("drift")."""
    stages: Mapping[str, FiniteFloat]
    """Seconds of the clock of what making it consists of, where its method says so."""
    peak_bytes: int | None
    """By how much the process grew at most while the model was made."""
    beside: Mapping[str, FiniteFloat] = field(default_factory=dict)
    """Measurements that its study alone makes, by name."""
    failure: str = ""
    """Why the method cannot be used here; "" where it can."""


def round_found(found: Found) -> Found:
    """Return it with numbers as they are written, so that what was measured and what was read again are equal."""
    return _FOUND.validate_python(_round_numbers(asdict(found)))


def parse_found(content: Mapping[str, Any]) -> Found:
    """Read the row that a mapping holds, whatever else is in it.

    Raises:
        ValueError: it does not hold a row.
    """
    return _FOUND.validate_python({name: content[name] for name in Found.__dataclass_fields__ if name in content})


class Rows:
    """A folder of rows, by the hash of their suite. Several processes may write at once.

    Args:
        folder: left out, `studies` in the user's cache folder.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = cache_folder() / "studies" if folder is None else folder
        self.problems: list[str] = []
        """Messages about what could not be kept or read; the rows are measured all the same."""

    def get(self, suite_hash: str, identity: Mapping[str, Any]) -> Found | None:
        """Return what was measured of this very thing; None where nothing was, or its file is damaged."""
        file = self._file(suite_hash, identity)
        try:
            return _RECORD.validate_json(file.read_bytes()).found
        except FileNotFoundError:
            return None
        except OSError as error:
            self._tell(f"{file} cannot be read: {error.strerror}")
        except ValidationError:
            self._tell(f"{file} holds no row of a study; remove it")
        return None

    def put(self, suite_hash: str, identity: Mapping[str, Any], found: Found) -> None:
        """Keep a row; one that is there stays."""
        file = self._file(suite_hash, identity)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            # Another process has measured the same meanwhile; its row is as good.
            with suppress(FileExistsError):
                put_new(file, json.dumps({"identity": identity, "found": asdict(found)}, allow_nan=False))
        except OSError as error:
            self._tell(f"rows are not kept in {self.folder}: {error.strerror}; set FEATCAL_CACHE to a folder")

    def _file(self, suite_hash: str, identity: Mapping[str, Any]) -> Path:
        digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
        # The name is the hash of all that tells a row, so whatever study asks for the same finds it.
        return self.folder / suite_hash / f"{digest[:24]}.json"

    def _tell(self, problem: str) -> None:
        if problem not in self.problems:
            self.problems.append(problem)


@dataclass(frozen=True)
class _Record:
    identity: Mapping[str, Any]
    found: Found


_FOUND, _RECORD = TypeAdapter(Found), TypeAdapter(_Record)


def _round_numbers(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, _DIGITS)
    if isinstance(value, dict):
        return {name: _round_numbers(one) for name, one in value.items()}
    return value

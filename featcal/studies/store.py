"""Keep what was measured of one model on one suite: a small file each, written when it is done and never again.

A study that was ended finds its finished rows here, and so does any other study that asks for the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, FiniteFloat, TypeAdapter

from featcal.studies.history import TaskValue
from featcal.studies.records import Records
from featcal.system.fingerprints import json_digest
from featcal.system.resources import cache_folder

_DIGITS = 6
"""Of what is written: far more than any of it means."""


@dataclass(frozen=True)
class StageSeconds:
    """Seconds of one stage."""

    wall: FiniteFloat
    cpu: FiniteFloat


@dataclass(frozen=True)
class RowResult:
    """Measurements of one model, or why there are none."""

    scores: Mapping[str, TaskValue]
    """By task; empty where samples have no labels."""
    drift: Mapping[str, FiniteFloat]
    """By task: relative drift of the final features."""
    cosine: Mapping[str, Annotated[float, Field(ge=-1.001, le=1.001)]]
    """By task: mean cosine of the final features to the expert's."""
    seconds: Mapping[str, StageSeconds]
    """Of making the model ("make"), scoring it and measuring its features ("drift")."""
    stages: Mapping[str, FiniteFloat]
    """Seconds of the clock of what making it consists of, where its method says so."""
    peak_bytes: int | None
    """By how much the process grew at most while the model was made."""
    beside: Mapping[str, FiniteFloat] = field(default_factory=dict)
    """Measurements that its study alone makes, by name."""
    failure: str = ""
    """Why the method cannot be used here; "" where it can."""


def round_found(found: RowResult) -> RowResult:
    """Return it with numbers as they are written, so that what was measured and what was read again are equal."""
    return _FOUND.validate_python(_round_numbers(asdict(found)))


def parse_found(content: Mapping[str, Any]) -> RowResult:
    """Read the row that a mapping holds, whatever else is in it.

    Raises:
        ValueError: it does not hold a row.
    """
    return _FOUND.validate_python({name: content[name] for name in RowResult.__dataclass_fields__ if name in content})


class Rows(Records):
    """A folder of rows, by the hash of their suite. Several processes may write at once.

    Args:
        folder: left out, `studies` in the user's cache folder.
    """

    def __init__(self, folder: Path | None = None) -> None:
        super().__init__(cache_folder() / "studies" if folder is None else folder, "what is measured")

    def get(self, suite_hash: str, identity: Mapping[str, Any]) -> RowResult | None:
        """Return what was measured of this very thing; None where nothing was, or its file is damaged."""
        record = self.read(str(self._file(suite_hash, identity)), _Record)
        return None if record is None else record.found

    def put(self, suite_hash: str, identity: Mapping[str, Any], found: RowResult) -> None:
        """Keep a row; one that is there stays."""
        self.write(self._file(suite_hash, identity), {"identity": identity, "found": asdict(found)})

    def _file(self, suite_hash: str, identity: Mapping[str, Any]) -> Path:
        # The name is the hash of all that tells a row, so whatever study asks for the same finds it.
        return self.folder / suite_hash / f"{json_digest(identity)[:24]}.json"


@dataclass(frozen=True)
class _Record:
    identity: Mapping[str, Any]
    found: RowResult


_FOUND = TypeAdapter(RowResult)


def _round_numbers(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, _DIGITS)
    if isinstance(value, dict):
        return {name: _round_numbers(one) for name, one in value.items()}
    return value

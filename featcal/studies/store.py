"""Store the measurements of one model on one suite, in small files that are written once and never changed.

An interrupted study finds its finished rows here, and so does any other study of the same models.
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
"""Number of digits that are written: far more than are significant."""


@dataclass(frozen=True)
class StageSeconds:
    """Seconds of one stage."""

    wall: FiniteFloat
    cpu: FiniteFloat


@dataclass(frozen=True)
class RowResult:
    """Measurements of one model, or the reason why there are none."""

    scores: Mapping[str, TaskValue]
    """Scores by task; empty if samples have no labels."""
    drift: Mapping[str, FiniteFloat]
    """Relative drift of the final features, by task."""
    cosine: Mapping[str, Annotated[float, Field(ge=-1.001, le=1.001)]]
    """Mean cosine of the final features to the expert's, by task."""
    seconds: Mapping[str, StageSeconds]
    """Seconds for making the model ("make"), scoring it and measuring its features ("drift")."""
    stages: Mapping[str, FiniteFloat]
    """Wall-clock seconds of the stages of making it, if its method reports them."""
    peak_bytes: int | None
    """Largest growth of the process while the model was made."""
    beside: Mapping[str, FiniteFloat] = field(default_factory=dict)
    """Further measurements of its study, by name."""
    failure: str = ""
    """Reason why the method cannot be used here, or ""."""


def round_found(found: RowResult) -> RowResult:
    """Return the result with numbers rounded as in files, so that it equals its copy read from disk."""
    return _FOUND.validate_python(_round_numbers(asdict(found)))


def parse_found(content: Mapping[str, Any]) -> RowResult:
    """Parse the row in a mapping; other keys are ignored.

    Raises:
        ValueError: it is not a row.
    """
    return _FOUND.validate_python({name: content[name] for name in RowResult.__dataclass_fields__ if name in content})


class Rows(Records):
    """A folder of rows, by the hash of their suite. Several processes may write at once.

    Args:
        folder: by default `studies` in the user's cache folder.
    """

    def __init__(self, folder: Path | None = None) -> None:
        super().__init__(cache_folder() / "studies" if folder is None else folder, "what is measured")

    def get(self, suite_hash: str, identity: Mapping[str, Any]) -> RowResult | None:
        """Return the measurements with this identity; None if there are none, or the file is damaged."""
        record = self.read(str(self._file(suite_hash, identity)), _Record)
        return None if record is None else record.found

    def put(self, suite_hash: str, identity: Mapping[str, Any], found: RowResult) -> None:
        """Store a row; an existing one stays."""
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

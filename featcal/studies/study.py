"""Define a finished study: its rows, and the document of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from featcal.session.session import Session
from featcal.studies.history import current_maker
from featcal.studies.recording import hash_of
from featcal.studies.runner import Point, Row, Views
from featcal.studies.store import parse_found
from featcal.studies.summary import Summary, summaries
from featcal.system.errors import InputError
from featcal.system.json_files import read_json


@dataclass(frozen=True)
class Study:
    """Results of a study, measured or read from a file."""

    kind: str
    """Name of its command."""
    suite: str
    suite_hash: str
    on: Mapping[str, Any]
    """The samples of scores and drift: split, samples per task (null is all) and seed."""
    by: Mapping[str, str]
    """Versions and kind of device."""
    rows: tuple[Row, ...]

    def summaries(self) -> list[Summary]:
        """Return the table: one row per method and place in the study."""
        return summaries(self.rows)

    def to_json(self) -> dict[str, Any]:
        """Return the public document of the command."""
        head = {"study": self.kind, "suite": self.suite, "suite_hash": self.suite_hash, "on": self.on, "by": self.by}
        methods = [one.to_json() for one in self.summaries()]
        return {**head, "methods": methods, "rows": [row.to_json() for row in self.rows]}

    def text(self) -> str:
        """Return the document without redundant parts, one row per line, for version control."""
        document = self.to_json()
        del document["methods"]
        rows = ",\n".join(json.dumps(row, allow_nan=False) for row in document.pop("rows"))
        return f'{json.dumps(document, allow_nan=False)[:-1]},\n"rows": [\n{rows}\n]}}\n'


def study_of(kind: str, session: Session, on: Views, rows: Sequence[Row]) -> Study:
    """Make the study of the rows that a session measured."""
    samples = {
        what: {"split": view.split or session.split, "samples": view.samples, "seed": view.seed}
        for what, view in zip(("scores", "drift"), on, strict=True)
    }
    by = current_maker(session.family.compute.device.type)
    return Study(kind, session.family.suite.name, hash_of(session), samples, by, tuple(rows))


def read_study(file: Path) -> Study:
    """Read a study from the file that `--out` wrote.

    Raises:
        InputError: it cannot be read, or does not hold a study.
    """
    document = read_json(file)
    try:
        rows = tuple(_row(one) for one in document["rows"])
        kind, suite, suite_hash, on, by = (document[name] for name in ("study", "suite", "suite_hash", "on", "by"))
        return Study(kind, suite, suite_hash, on, by, rows)
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{file} is not the document of a study: {type(error).__name__}, {error}") from error


def _row(one: Mapping[str, Any]) -> Row:
    point = Point(one["method"], one["model"], one["seed"], one["at"])
    return Row(point, tuple(one["needs"]), parse_found(one))

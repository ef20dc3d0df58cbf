"""Store and find finished studies: those that come with featcal, and the user's own."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from featcal.studies.study import Study, read_study
from featcal.system.atomic_files import put
from featcal.system.errors import InputError
from featcal.system.resources import cache_folder, embedded_suites

TABLE = "compare"
"""Kind of a study that is a table of methods; studies of other kinds have several places,
such as numbers of samples.
"""
KINDS: Mapping[str, str] = {
    TABLE: "methods",
    "budget": "samples per task",
    "corrupt": "corrupted calibration pictures",
    "schedule": "forward order against stale and parallel",
    "ablate": "parts of a calibration",
    "tasks": "number of tasks",
    "paper": "what the paper's tables have",
}
"""Studies by their commands, with their subjects. One that comes with featcal is KIND.json beside its suite."""


def keep_study(study: Study) -> str:
    """Store a finished study for the app, replacing one with the same rows; return the reason of a failure, or ""."""
    rows = [[row.point.model, row.point.made, dict(row.point.at)] for row in study.rows]
    identity = json.dumps([study.kind, study.suite_hash, study.on, rows], sort_keys=True)
    file = _folder() / f"{hashlib.sha256(identity.encode()).hexdigest()[:24]}.json"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        put(file, study.text())
    except OSError as error:
        return f"the study is not kept in {file.parent}: {error.strerror}; set FEATCAL_CACHE to a folder"
    return ""


def shipped_studies() -> list[Study]:
    """Return the studies of the embedded suites that come with featcal; method tables first."""
    files = [file.with_name(f"{kind}.json") for kind in KINDS for file in embedded_suites().values()]
    return [read_study(file) for file in files if file.is_file()]


def own() -> tuple[list[Study], list[str]]:
    """Return the user's own studies, newest first, and problems with files that contain none."""
    found, problems = [], []
    for file in sorted(_folder().glob("[!.]*.json"), key=_age):
        try:
            found.append(read_study(file))
        except InputError as error:
            problems.append(str(error))
    return found, problems


def studies_of_suite(name: str, suite_hash: str, own_studies: Sequence[Study]) -> list[Study]:
    """Return the studies of a suite, tables of methods first: the user's own for the same files, then those that came
    with featcal under the suite's name, which were measured on the shipped files."""
    found = [study for study in own_studies if study.suite_hash == suite_hash]
    found += [study for study in shipped_studies() if study.suite == name]
    return sorted(found, key=lambda study: study.kind != TABLE)


def _folder() -> Path:
    return cache_folder() / "studies" / "finished"


def _age(file: Path) -> float:
    try:
        return -file.stat().st_mtime
    except OSError:
        return 0.0

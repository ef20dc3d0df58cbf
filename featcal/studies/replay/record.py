"""Read the part of a `featcal.json` that is needed to repeat its run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from featcal.formats.hub import RECORD_FILE
from featcal.suite.calibration_options import CalibrationConfig
from featcal.suite.recipe import MergeRecipe
from featcal.system.errors import InputError
from featcal.system.formatting import printable
from featcal.system.json_files import read_json

COMMANDS = ("calibrate", "merge")
"""Commands whose outputs can be replayed."""


class SuiteFacts(BaseModel):
    """Facts of a suite that `suite_facts` writes."""

    shipped: str | None
    sha256: dict[str, str]
    name: str | None = None


class Drawn(BaseModel):
    """The samples of a task."""

    indices: tuple[int, ...]
    sha256: str


class Recorded(BaseModel):
    """Part of a record that says how its model was made; the other parts are ignored."""

    command: Literal["calibrate", "merge"]
    suite: str
    suite_file: SuiteFacts
    model: str = "merged"
    """Name of the model that was calibrated."""
    of: tuple[str, ...] = ()
    """That model with a hash, if it is not the suite's own."""
    config: dict[str, Any] = {}
    recipe: dict[str, Any] = {}
    tasks: dict[str, Drawn] = {}
    inputs: dict[str, dict[str, str]]
    """SHA-256 of every weight file by model and file name."""
    preparation: dict[str, str] = {}
    versions: dict[str, str]
    machine: dict[str, str | int]
    ranks: tuple[dict[str, Any], ...] = ()
    """Records of the processes, if there were several; empty for one."""
    written: tuple[str, ...]
    tensors: Annotated[dict[str, str], Field(min_length=1)]
    """Digest of every written tensor, as `tensor_digests` gives it."""

    @property
    def device(self) -> str:
        """Return the kind of device of the run."""
        return str(self.machine.get("device", "cpu")).split(":")[0]

    @property
    def threads(self) -> int | None:
        """Return the number of threads, if the record has one that is possible."""
        threads = self.machine.get("threads")
        return threads if isinstance(threads, int) and 1 <= threads <= 1024 else None

    @property
    def processes(self) -> int:
        """Return the number of processes of the run."""
        return len(self.ranks) or 1

    def options(self) -> CalibrationConfig:
        """Return the options of a calibration.

        Raises:
            InputError: unknown options, or a value outside its range.
        """
        unknown = sorted(self.config.keys() - {one.name for one in fields(CalibrationConfig)})
        if unknown:
            raise InputError(f"the record has options that this version of featcal does not know: {', '.join(unknown)}")
        try:
            return TypeAdapter(CalibrationConfig).validate_python(self.config)
        except (ValidationError, InputError) as error:
            why = _first(error) if isinstance(error, ValidationError) else error
            raise InputError(f"the record's options are not those of a calibration: {why}") from error

    def merge_recipe(self) -> MergeRecipe:
        """Return the recipe of a merge.

        Raises:
            InputError: this version of featcal does not know it.
        """
        try:
            return MergeRecipe.model_validate(self.recipe)
        except ValidationError as error:
            raise InputError(f"the record's recipe cannot be merged by: {_first(error)}") from error


def record_file(place: Path) -> Path:
    """Return the record file at a path, or in the folder at that path."""
    return place / RECORD_FILE if place.is_dir() else place


def read_record(file: Path) -> Recorded:
    """Read a record of a run that can be repeated.

    Raises:
        InputError: there is no record, it is another command's, or it lacks what a replay needs.
    """
    content = read_json(file)
    _refuse_others(content, file)
    try:
        return Recorded.model_validate(content)
    except ValidationError as error:
        raise InputError(
            f"{file} lacks what a replay needs: {_first(error)}; a run of this version of featcal writes all of it"
        ) from error


def _refuse_others(content: Mapping[str, Any], file: Path) -> None:
    changed = next((f"{word} to another folder" for word in ("converted", "exported") if word in content), None)
    if changed:
        raise InputError(f"{file}: its model was {changed}; replay the record of the folder from which it was made")
    facts = content.get("suite_file")
    held = facts.get("in_memory") if isinstance(facts, Mapping) else None
    if held:
        raise InputError(
            f"{file}: {printable(', '.join(map(str, held)), 200)} were objects of a Python process and are in no "
            "file, so the run cannot be repeated; give the same objects to featcal.Suite.of, calibrate, and "
            "compare 'inputs' and 'tensors' of the two records"
        )
    command = content.get("command")
    if command in COMMANDS:
        return
    known = " or ".join(f"featcal {one}" for one in COMMANDS)
    if command is not None:
        what = f"a record of '{printable(str(command), 80)}'"
    elif "options" in content and "model" in content:
        what = f"a record of the baseline '{printable(str(content['model']), 80)}'"
    else:
        what = "not a record of a run"
    raise InputError(f"{file} is {what}; what {known} of this version wrote can be replayed")


def _first(error: ValidationError) -> str:
    one = error.errors()[0]
    return printable(f"{'.'.join(map(str, one['loc']))}: {one['msg']}", 200)

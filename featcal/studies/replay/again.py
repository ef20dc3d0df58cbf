"""Repeat the run of a record and compare the results."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from featcal.calibration.calibrate import calibrate_to_folder
from featcal.export.kept_work import UNCHECKED
from featcal.export.merge import write_merge
from featcal.family.opening import open_family
from featcal.formats.contents import tensor_digests
from featcal.formats.hub import RECORD_FILE
from featcal.models.compute import use_threads
from featcal.session.session import Session
from featcal.studies.replay.compare import (
    Different,
    inputs_that_differ,
    samples_that_differ,
    surroundings_that_differ,
    tensors_that_differ,
)
from featcal.studies.replay.record import Recorded, read_record, record_file
from featcal.suite.facts import ask_for_suite
from featcal.suite.schema import load_suite
from featcal.system.errors import InputError, UncheckedError
from featcal.system.progress import Progress, silent


@dataclass(frozen=True)
class Replayed:
    """Result of a replay."""

    record: Path
    command: str
    tensors: int
    """Number of tensors that were compared."""
    held_against: str
    """Reference of the comparison: the "files" beside the record, or the record's own "hashes"."""
    damaged: Sequence[str]
    """Tensors in the files beside the record that differ from the record's hashes."""
    inputs: Sequence[str]
    samples: Sequence[str]
    surroundings: Mapping[str, Sequence[str]]
    different: Sequence[Different]
    unchecked: Sequence[str] = ()
    """Sentences on checks of the new model that could not run."""

    @property
    def same(self) -> bool:
        """Say whether every tensor was compared and is equal bit for bit."""
        return self.tensors > 0 and not self.different and not self.damaged

    def to_json(self) -> dict[str, Any]:
        """Return the document of `featcal replay --json`."""
        return {
            "record": str(self.record),
            "command": self.command,
            "same": self.same,
            "tensors": self.tensors,
            "held_against": self.held_against,
            "damaged": list(self.damaged),
            "inputs": list(self.inputs),
            "samples": list(self.samples),
            **{name: list(lines) for name, lines in self.surroundings.items()},
            "different": [one.to_json() for one in self.different],
            "unchecked": list(self.unchecked),
        }


def replay_record(
    place: str | Path,
    suite: str | Path | None = None,
    out: str | Path | None = None,
    *,
    device: str | None = None,
    progress: Progress = silent,
) -> Replayed:
    """Repeat the run behind a `featcal.json`, with its options and its number of threads, and compare every tensor.

    The result is compared with the weight files beside the record, else with the record's hashes.

    Args:
        place: the record, or the folder that holds it.
        suite: the suite, if the record's does not come with featcal.
        out: folder for the new model; it must not exist.
        device: None means the record's kind of device.

    Raises:
        InputError: there is no record that can be replayed, or its suite, models or samples are not available.
        NumericalError: the calibration has no trustworthy solution.
    """
    file = record_file(Path(place).expanduser())
    then = read_record(file)
    named = suite if suite is not None else then.suite_file.shipped
    if named is None:
        raise InputError(f"{file}: {ask_for_suite(then.suite, then.suite_file.name)}")
    files = _weights(file.parent, then)
    # Files rather than the record's hashes: of values a difference can be told, of hashes that there is one.
    kept = tensor_digests(files) if files else then.tensors
    with tempfile.TemporaryDirectory(prefix="featcal-replay-") as spare:
        target = Path(spare) / "model" if out is None else Path(out).expanduser()
        with use_threads(then.threads):
            unchecked = _run(then, named, target, device or then.device, progress)
        now = read_record(target / RECORD_FILE)
        again = _weights(target, now)
        made = tensor_digests(again)
        different = tensors_that_differ(kept, made, files, again)
    return Replayed(
        file,
        then.command,
        len(made.keys() & kept.keys()),
        "files" if files else "hashes",
        sorted(name for name, digest in then.tensors.items() if kept.get(name) != digest),
        inputs_that_differ(then, now),
        samples_that_differ(then, now),
        surroundings_that_differ(then, now),
        different,
        unchecked,
    )


def _run(then: Recorded, suite: str | Path, out: Path, device: str, progress: Progress) -> Sequence[str]:
    """Write the model again, and return the checks that could not run."""
    try:
        if then.command == "merge":
            write_merge(open_family(load_suite(suite), "cpu"), then.merge_recipe(), out, device=device)
        else:
            family = Session(open_family(load_suite(suite), device), one_shot=True).fit.family_with(then.model)
            calibrate_to_folder(family, then.options(), out, progress=progress)
    except UncheckedError as error:  # it is written whole, so it can be compared
        sentences: list[str] = error.document[UNCHECKED]
        return sentences
    return ()


def _weights(folder: Path, record: Recorded) -> list[Path]:
    """Return a record's weight files in a folder; names with a path in them are ignored."""
    names = [name for name in record.written if name.endswith(".safetensors") and Path(name).name == name]
    return [folder / name for name in names if (folder / name).is_file()]

"""Store the result of every candidate on every fold, in small files that are written once and never changed.

An interrupted choice finds its finished cells here and continues. Processes that make the same choice share its cells:
a lock marks a cell that is being computed, and the system releases it when the process ends.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import FiniteFloat, TypeAdapter, ValidationError

from featcal.evaluation.heads import CosineHead
from featcal.formats.contents import inputs_digest
from featcal.formats.weights import Weights, raw_bytes
from featcal.models.model import tasks_with_own_modules
from featcal.studies.selection.held_out_samples import SelectionProblem
from featcal.suite.calibration_options import CHOSEN, IDLE
from featcal.suite.methods import methods_code
from featcal.suite.name_grammar import reference_in
from featcal.system.atomic_files import put
from featcal.system.errors import InputError
from featcal.system.fingerprints import json_digest
from featcal.system.json_files import read_json
from featcal.system.locks import try_lock
from featcal.system.resources import cache_folder, code_digest
from featcal.system.versions import all_versions


@dataclass(frozen=True)
class FoldCell:
    """One candidate on one fold."""

    values: Mapping[str, tuple[FiniteFloat, ...]]
    """Nearness to the experts by measure and sample (`Judge.values`); empty if the candidate failed."""
    failure: str
    """Reason of a failure, or ""."""
    seconds: FiniteFloat


_CELL = TypeAdapter(FoldCell)


class Cells:
    """The cells of one choice.

    Args:
        folder: only for this choice; None keeps them in memory.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder, self._known = folder, dict[tuple[str, int], FoldCell]()

    def get(self, name: str, fold: int) -> FoldCell | None:
        """Return the result of a candidate on a fold; None if there is none, or its file is damaged."""
        if (name, fold) not in self._known and self._folder is not None:
            with suppress(FileNotFoundError, ValidationError), _explain_refusal(self._folder):
                self._known[name, fold] = _CELL.validate_json(self._file(name, fold, "json").read_bytes())
        return self._known.get((name, fold))

    def put(self, name: str, fold: int, cell: FoldCell, lasting: bool = True) -> None:
        """Store a result; only in memory if another process might get a different one."""
        self._known[name, fold] = cell
        if lasting and self._folder is not None:
            with _explain_refusal(self._folder):
                put(self._file(name, fold, "json"), json.dumps({"model": name, "fold": fold, **asdict(cell)}))

    @contextmanager
    def claim(self, name: str, fold: int) -> Iterator[bool]:
        """Claim a cell for this process for the duration of the `with`; return whether that worked."""
        if self._folder is None:
            yield True
            return
        claim = self._file(name, fold, "lock")
        with _explain_refusal(self._folder):
            claim.parent.mkdir(parents=True, exist_ok=True)
        # The system takes the lock back when the process ends, so a kill leaves no cell that nobody may compute.
        with try_lock(claim, 0.0) as mine:
            try:
                yield mine
            finally:
                if mine:
                    with suppress(OSError):  # a system that keeps open files; it lies there empty then
                        claim.unlink()

    def _file(self, name: str, fold: int, ending: str) -> Path:
        assert self._folder is not None
        return self._folder / f"{hashlib.sha256(name.encode()).hexdigest()[:24]}-{fold}.{ending}"


@contextmanager
def _explain_refusal(folder: Path) -> Iterator[None]:
    """Turn a disk error into an error that names the folder; a missing file is ignored."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise InputError(
            f"results cannot be stored in {folder}: {error.strerror}; set FEATCAL_CACHE to a folder"
        ) from error


def folder_of(contest: SelectionProblem) -> Path | None:
    """Return the folder of a choice's cells: with the same models, samples, options and code, candidates have the same
    scores. None if a model has maps or heads that are objects, whose content has no hash."""
    session, drawn, heads = contest.session, contest.drawn, contest.criterion.heads or {}
    family = session.family
    models = [*([family.base] if family.is_base_known else []), family.merged, *family.experts.values()]
    if any(tasks_with_own_modules(one) for one in models):
        return None
    adapter = family.adapter
    own = adapter.head_tensors
    starts = {tried.start for tried in contest.plan}
    models += [session.fit.family_with(name).merged for name in sorted(starts) if reference_in(name) is not None]
    prompts = [head.prompts for pair in heads.values() for head in pair if isinstance(head, CosineHead)]
    identity = {
        "options": {name: value for name, value in asdict(contest.asked).items() if name not in (*CHOSEN, *IDLE)},
        "models": [_digest(model, adapter.tower) for model in models],
        "shared": _digest(models[0], adapter.head),
        "classifiers": [_digest(expert, own) for expert in family.experts.values()],
        "heads": [hashlib.sha256(raw_bytes(one)).hexdigest() for one in prompts],
        # What scores depend on beside the tensors: rotary settings, end tokens, how long an answer may be.
        "described": json.dumps(dict(family.origin.config), sort_keys=True, default=str),
        "generation": _read_settings(family.base_folder / "generation_config.json"),
        "lengths": {task: family.suite.task(task).max_target_length for task in drawn},
        "samples": {task: inputs_digest([one.inputs]) for task, one in drawn.items()},
        "criterion": contest.criterion.name,
        "versions": all_versions(),
        # Never the suite's hash: it covers the test split too, which a choice does not read.
        "code": code_digest(),
        "methods": dict(methods_code()),
    }
    return cache_folder() / "selections" / json_digest(identity)[:32]


def _read_settings(file: Path) -> object:
    """Return the content of a JSON file; None if there is none."""
    return read_json(file) if file.is_file() else None


def _digest(model: Weights, names: Iterable[str]) -> str:
    """Return the SHA-256 of those of the given tensors that a model has, wherever they are stored."""
    digest = hashlib.sha256()
    for name in names:
        if name in model.info:
            digest.update(name.encode())
            digest.update(raw_bytes(model.read([name])[name]))
    return digest.hexdigest()

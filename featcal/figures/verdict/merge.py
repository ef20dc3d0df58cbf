"""Diagnose a merged model of unknown quality: measure its ingredients, then its features, then the gain of a
calibration."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from featcal.drift.ledger import DriftLedger, Features
from featcal.family.ingredients import take_contents
from featcal.figures import tables
from featcal.figures.verdict.faults import Commands, MergeFindings, find_wrong_weights
from featcal.figures.verdict.measure import attribution_options, examine, repair_of
from featcal.formats.hub import RECIPE_FILE
from featcal.preflight.own_merge import OpenMerge
from featcal.session.model_ref import BASE, MERGED
from featcal.session.session import Session
from featcal.suite.source import WRITTEN
from featcal.suite.views import EvaluationSamples
from featcal.system.errors import NumericalError
from featcal.system.formatting import how_many
from featcal.system.progress import Progress, silent


@dataclass(frozen=True)
class Recipe:
    """Known facts about how a merged model was made: fields of `MergeFindings`, which `Origins.facts` gives."""

    stated: Mapping[str, float] | None = None
    is_exact: bool = False
    method: str = ""
    notes: Sequence[str] = ()
    found_base: str | None = None
    missed_base: str = ""
    is_uneven: bool = False
    dtype: str = ""
    """In which it was merged."""


@dataclass(frozen=True)
class MergeNames:
    """Names of a merged model and of its suite on a command line.

    Args:
        model: folder or Hub id.
        suite: the suite file.
        before: command line that writes the suite file first; "" if the file exists.
    """

    model: str
    suite: str
    before: str = ""

    @property
    def name(self) -> str:
        """Return the last part of the model's reference."""
        return Path(self.model).resolve().name  # of "." too

    def commands(self, folder: Path, copy: str, is_known: bool, has_base: bool) -> Commands:
        """Return command lines, one of which may repair the merged model.

        Args:
            folder: the model's folder.
            copy: command that corrects the files beside the weights.
            is_known: whether featcal has the recipe of its merge.
            has_base: whether the base is known, which another merge needs.
        """
        name, file = self.name, folder / RECIPE_FILE
        again = ["featcal", "merge", str(file), "--out"] if is_known else ["mergekit-yaml", str(file)]
        scaled = ["merge", self.suite, "--method", "task-arithmetic", "--scale", "0.3", "--out", f"{name}-again"]
        return Commands(
            copy,
            shlex.join([*again, f"{name}-again"]) if file.is_file() else "",
            self._write_first(scaled) if has_base else "",
            self._write_first(["calibrate", self.suite, "--out", f"{name}-calibrated"]),
            self._write_first(["select", self.suite]),
        )

    def _write_first(self, words: list[str]) -> str:
        own = shlex.join(["featcal", *words])
        return f"{self.before} && {own}" if self.before else own


def examine_weights(opened: OpenMerge, recipe: Recipe, names: MergeNames) -> MergeFindings:
    """Examine the weights of a merged model and the files beside them, without measuring features."""
    family = opened.family
    return MergeFindings(
        names.name,
        opened.differences,
        take_contents(family, family.merged, recipe.dtype),
        names.commands(opened.folder, opened.copy, recipe.stated is not None, family.is_base_known),
        recipe.stated,
        recipe.is_exact,
        recipe.method,
        recipe.notes,
        found_base=recipe.found_base,
        missed_base=recipe.missed_base,
        is_uneven=recipe.is_uneven,
    )


def examine_merge(
    session: Session,
    opened: OpenMerge,
    recipe: Recipe,
    names: MergeNames,
    on: EvaluationSamples = EvaluationSamples(),  # noqa: B008 - frozen
    progress: Progress = silent,
) -> MergeFindings:
    """Measure the complete verdict on a merged model; a calibration only if nothing else must be corrected first.

    Args:
        session: of `opened.family`.

    Raises:
        InputError: as `Measurements.drift`.
    """
    family, found = opened.family, examine_weights(opened, recipe, names)
    is_wrong = bool(found.wrong_files or any(find_wrong_weights(found)))
    repair = None if is_wrong else repair_of(session, MERGED)
    unscored = WRITTEN if family.suite.has_written("calibration") else ""
    try:
        *_, features = examine(session, MERGED, on, repair, progress, unscored)
        ledger = session.measure.drift(MERGED, attribution_options(on), progress)
        base = _finals(session.measure.features(BASE, on, progress)) if family.is_base_known else {}
    except NumericalError as error:
        return replace(found, failure=str(error))
    if unscored:
        count = how_many(len(task.indices) for task in ledger.tasks.values())
        features = replace(features, on=f"{count} texts per task that its expert wrote, since no samples were given")
    return replace(
        found,
        features=features,
        finals=_finals(ledger),
        base_finals=base,
        drift=tables.relative_drift_table(ledger).to_dict(),
        is_written=bool(unscored),
    )


def _finals(measured: Features | DriftLedger) -> dict[str, float]:
    return {name: task.layers[-1].relative_drift for name, task in measured.tasks.items()}

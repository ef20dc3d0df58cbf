"""Merge by a recipe of mergekit, diagnose the merge, and calibrate it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from featcal.cli.own_merge import DiagnosisOrder, examine_own
from featcal.cli.repair import is_doubtful, list_checkpoint, show_drift
from featcal.cli.terminal import bar, print_json, print_message, require_new, say_notes, write_document
from featcal.system.errors import InputError, UncheckedError

if TYPE_CHECKING:
    from featcal.family.opening import Family

MERGED, CALIBRATED, SUITE_FILE, DIAGNOSIS = "merged", "calibrated", "suite.yaml", "diagnosis.json"
"""Parts of the folder that is written."""


@dataclass(frozen=True)
class RecipeOrder:
    """Order to merge by a recipe of mergekit.

    Args:
        recipe: its YAML file.
        merged: folder or Hub id of mergekit's merge by it; with None featcal merges.
        base: the model from which the experts were fine-tuned; None means the recipe's.
        data: task → samples; experts write texts for the others.
        out: folder to write.
    """

    recipe: Path
    merged: str | None
    base: str | None
    data: Mapping[str, str]
    out: Path


def is_recipe(named: str) -> bool:
    """Say whether a configuration of mergekit is named, rather than a suite."""
    from featcal.authoring.from_mergekit import is_configuration
    from featcal.system.paths import expand_home
    from featcal.system.yaml_files import read_yaml

    file = expand_home(named)
    if file.suffix not in (".yml", ".yaml") or not file.is_file():
        return False
    content = read_yaml(file)
    return isinstance(content, dict) and is_configuration(content)


def merge_by_recipe(asked: RecipeOrder, out: Path, max_memory: int | None, device: str) -> dict[str, Any]:
    """Merge as a recipe says, and lay the recipe beside the weights, where mergekit leaves it.

    Returns:
        The document of `featcal merge --json`.

    Raises:
        InputError: a recipe with mistakes, or a method that mergekit alone has.
    """
    from featcal.authoring.recipes import import_recipe
    from featcal.export.merge import merge_to_folder
    from featcal.formats.hub import RECIPE_FILE
    from featcal.suite.schema import suite_from_dict

    imported = import_recipe(asked.recipe)
    content = imported.suite | _given_base(asked)
    if content["merged"]["method"] == "linear" and asked.base is None:
        # A mean of whole models has no base in it; files that lie beside one are the first model's, as mergekit's are.
        content["base"] = next(iter(content["tasks"].values()))["expert"]
    # As mergekit does, rows of a vocabulary that the base lacks are left out, with a note.
    suite = suite_from_dict({**content, "vocabulary": "base"}, Path.cwd(), str(asked.recipe), RECIPE_FILE)
    document = merge_to_folder(suite, None, None, out, max_memory=max_memory, device=device)
    shutil.copyfile(asked.recipe, out / RECIPE_FILE)
    return {**document, "notes": [*imported.notes, *document["notes"]]}


def calibrate_by_recipe(asked: RecipeOrder, kind: str, device: str, as_json: bool) -> int:
    """Merge by a recipe, print the verdict on the merge, and calibrate it; return the exit status.

    Args:
        kind: recipe of the calibration: "paper", "refined" or "informed".
    """
    from featcal.authoring.from_form import write_draft
    from featcal.authoring.recipes import import_recipe
    from featcal.figures.verdict.faults import FILES
    from featcal.figures.verdict.sentences import MERGE
    from featcal.suite.views import EvaluationSamples

    require_new(asked.out)
    content = import_recipe(asked.recipe, asked.merged).suite
    document: dict[str, Any] = {"out": str(asked.out)}
    try:
        asked.out.mkdir(parents=True)
    except OSError as error:
        raise InputError(f"{asked.out} cannot be made: {error.strerror}; name another folder") from error
    if asked.merged is None:
        # Sums on a GPU come in another order, so its bits differ.
        document["merge"] = merge_by_recipe(asked, asked.out / MERGED, None, "cpu")
        say_notes(document["merge"])
    experts = {task: one["expert"] for task, one in content["tasks"].items()}
    base = asked.base or content.get("base")
    merged = asked.merged or str(asked.out / MERGED)
    own = DiagnosisOrder(merged, base, experts, asked.data, (), None, asked.out / SUITE_FILE)
    found = examine_own(own, EvaluationSamples(64), device, as_json)
    document["diagnosis"] = found.document
    write_document(asked.out / DIAGNOSIS, json.dumps(found.document, indent=2, allow_nan=False) + "\n")
    if found.judged is None:
        return _end(document, as_json, 1)
    session, verdict = found.judged
    suite = write_draft(found.text, own.file)
    for line in verdict.lines if not as_json else ():
        print_message(line)
    if found.failure or verdict.next in (FILES, MERGE):
        print_message("Nothing was calibrated: what is said above comes first.", err=True)
        return _end(document, as_json, 1)
    # The texts that experts wrote stay with the family that was measured.
    family = replace(session.family, suite=suite)
    document["calibration"] = _calibrate(family, kind, asked.out / CALIBRATED)
    if as_json:
        say_notes(document["calibration"])
    else:
        show_drift(document["calibration"], as_json)
    return _end(document, as_json, int(is_doubtful(document["calibration"], False)))


def _given_base(asked: RecipeOrder) -> dict[str, str]:
    return {} if asked.base is None else {"base": asked.base}


def _calibrate(family: Family, kind: str, out: Path) -> dict[str, Any]:
    """Calibrate the merged model of a family to a folder; return the document, which says what was not checked."""
    from featcal.calibration.calibrate import calibrate_to_folder, config_for
    from featcal.session.session import Session

    config = config_for(family, recipe=kind)
    try:
        document = calibrate_to_folder(family, config, out, progress=bar())
    except UncheckedError as error:
        document = error.document
    list_checkpoint(Session(family), config, "merged", out)
    return document


def _end(document: Mapping[str, Any], as_json: bool, status: int) -> int:
    if as_json:
        print_json(document)
    return status

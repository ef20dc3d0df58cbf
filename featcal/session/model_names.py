"""Parse the names of a suite's models, and write unique names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from featcal.baselines.common.fold_heads import with_heads
from featcal.calibration.anchor import AnchorWeights
from featcal.calibration.calibrate import config_for
from featcal.calibration.config import all_parts, idle_options, resolve_options
from featcal.calibration.config import resolve_recipe as of_recipe
from featcal.export.merge import recipe_for
from featcal.family.opening import Family
from featcal.formats.hub import RECORD_FILE
from featcal.formats.lora import LoraWeights
from featcal.formats.weights import Weights
from featcal.suite.calibration_options import (
    ASKED,
    IDLE,
    NUMBERS,
    OPTIONS,
    PAPER,
    PARTIAL,
    CalibrationConfig,
)
from featcal.suite.facts import ask_for_suite
from featcal.suite.methods import NAMED, REFERENCE, method_names
from featcal.suite.name_grammar import ModelName, format_parts, model_name, read_options
from featcal.suite.options import format_value
from featcal.system.errors import InputError
from featcal.system.formatting import did_you_mean
from featcal.system.json_files import read_json
from featcal.system.sandbox import require_inside


def config_of_name(name: ModelName, family: Family) -> CalibrationConfig:
    """Return the options of a named calibration; options that the name does not have are the suite's, else the paper's.

    Raises:
        InputError: an option that is unknown or outside its range.
    """
    options = read_options(name, {option: one.kind for option, one in ASKED.items()})
    # None, all parts, would leave the suite's own choice.
    every = all_parts(family.adapter, family.suite.tasks)
    return config_for(family, **{o: every[o] if value is None else value for o, value in options.items()})


def name_calibration(config: CalibrationConfig, family: Family) -> str:
    """Return a name that identifies a calibration with these options, independent of the suite's recommendations: with
    the main options, and all that differ from the suite's (`config_of_suite`) or from the recipe's own."""
    config = resolve_options(config, family.adapter, family.suite.tasks)
    suites = config_for(family, recipe=config.recipe)
    own = of_recipe(family.adapter, family.suite.tasks, {"recipe": config.recipe})
    idle = idle_options(family.adapter)
    always = {*NUMBERS[config.recipe], "samples"}
    if {config.recipe, config_for(family).recipe} != {PAPER}:
        always.add("recipe")
    values = {name: getattr(config, name) for name in OPTIONS if name not in IDLE}
    options = [
        f"{name}={format_parts(value) if name in PARTIAL else format_value(value)}"
        for name, value in values.items()
        if name in always or value != getattr(suites, name) or (value != getattr(own, name) and name not in idle)
    ]
    return f"calibrated:{','.join(options)}"


def weights_of(model: str, family: Family) -> Weights:
    """Return the tensors of a named model, except for calibrations and baselines.

    Args:
        family: an anchor belongs to its merged model; the name after the anchor's @ is ignored.

    Raises:
        InputError: no such model, unknown options, or a checkpoint that does not fit the suite.
    """
    name = model_name(model)
    if name.kind == "expert":
        return _expert(name, family)
    if name.kind == "anchor":
        options = read_options(name, {"rho": float})
        if not options:
            raise InputError("model 'anchor' needs its rho, such as anchor:rho=2")
        # With rho 1 it is the merged model, wherever it starts from.
        is_idle = options["rho"] == 1 and not family.is_base_known
        return AnchorWeights(options["rho"], family.merged if is_idle else family.base, family.merged)
    if name.kind == REFERENCE:
        return _checkpoint(model, family)
    if name.kind in ("base", "merged"):
        return family.model(model)
    return family.merge(recipe_for(family.suite, model))


def _checkpoint(model: str, family: Family) -> Weights:
    try:
        located, weights = family.checkpoint(model)
        # The record of a base is not that of its sum with an adapter.
        return weights if isinstance(weights, LoraWeights) else with_heads(family, weights, located)
    except InputError as error:
        meant = did_you_mean(model.partition(":")[0], (*NAMED, *method_names()))
        if not meant or Path(model).exists():
            raise
        raise InputError(f"{error}.{meant}") from error


def _expert(name: ModelName, family: Family) -> Weights:
    known = family.experts
    if name.task is None:
        raise InputError(
            f"model 'expert' means every expert on its own task; name a single one, such as expert:{next(iter(known))}"
        )
    if name.task not in known:
        raise InputError(
            f"model 'expert:{name.task}': no such task; there are {', '.join(known)}.{did_you_mean(name.task, known)}"
        )
    return known[name.task]


def holds_calibration(reference: str) -> bool:
    """Say whether a model's reference is a folder with the record of a calibration."""
    try:
        recorded_calibration(Path(reference))
    except InputError:
        return False
    return True


def recorded_calibration(folder: Path) -> tuple[CalibrationConfig, str]:
    """Return the options of the calibration that wrote a folder, and the name of the model that it calibrated.

    Raises:
        InputError: it has no record of one.
    """
    record = read_calibration_record(folder)
    try:
        return CalibrationConfig(**record["config"]), str(record.get("model", "merged"))
    except (KeyError, TypeError) as error:
        raise InputError(_no_record(folder)) from error


def read_calibration_record(folder: Path) -> dict[str, Any]:
    """Return the content of the record in a calibrated folder.

    Raises:
        InputError: there is none.
    """
    require_inside(folder / RECORD_FILE, "record")
    return read_json(folder / RECORD_FILE, missing=_no_record(folder))


def _no_record(folder: Path) -> str:
    return f"{folder} has no featcal.json of a calibration; give a calibrated folder or 'merged'"


def recorded_suite(folder: Path) -> str:
    """Return the name of the suite of a calibrated folder, if the suite comes with featcal.

    Raises:
        InputError: it has no record of a calibration, or one of another suite file.
    """
    recorded_calibration(folder)
    record = read_json(folder / RECORD_FILE)
    facts = dict(record.get("suite_file") or {})
    if facts.get("shipped") is None:
        raise InputError(f"{folder}: {ask_for_suite(str(record.get('suite')), facts.get('name'))}")
    return str(facts["shipped"])

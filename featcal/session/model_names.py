"""Read the names of a suite's models, and write the names that tell them from others."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from featcal.baselines.common.fold_heads import with_heads
from featcal.calibration.anchor import AnchorWeights
from featcal.calibration.calibrate import config_for
from featcal.calibration.config import all_parts, resolve
from featcal.export.merge import recipe_for
from featcal.family.opening import Family
from featcal.formats.weights import Weights
from featcal.suite.calibration_options import (
    ASKED,
    IDLE,
    NUMBERS,
    OF_A_RECIPE,
    OPTIONS,
    PAPER,
    PARTIAL,
    CalibrationConfig,
)
from featcal.suite.methods import ALL, NAMED, REFERENCE, method_names
from featcal.suite.name_grammar import ModelName, format_parts, model_name, read_options
from featcal.system.errors import InputError
from featcal.system.formatting import did_you_mean, exactly
from featcal.system.json_files import read_json
from featcal.system.sandbox import require_inside


def config_of(name: ModelName, family: Family) -> CalibrationConfig:
    """Return the options of a calibration that is named; those that are not said are the suite's, else the paper's.

    Raises:
        InputError: an option that is unknown or outside its range.
    """
    said = read_options(name, {option: one.kind for option, one in ASKED.items()})
    # None, all parts, would leave the suite's own choice.
    every = all_parts(family.adapter, family.suite.tasks)
    return config_for(family, **{o: every[o] if value is None else value for o, value in said.items()})


def name_calibration(config: CalibrationConfig, family: Family) -> str:
    """Return the name that stands for a calibration with these options: with all that matter most, and what differs
    from the suite's."""
    config, own = resolve(config, family.adapter, family.suite.tasks), config_for(family)
    always = (*NUMBERS[config.recipe], "samples")
    said = [
        f"{name}={format_parts(value) if name in PARTIAL else _format_value(value)}"
        for name in OPTIONS
        if name not in IDLE
        if (value := getattr(config, name)) != getattr(own, name) or name in always
    ]
    return f"calibrated:{','.join(said)}"


def calibrate_command(
    suite: str, config: CalibrationConfig, defaults: CalibrationConfig, out: str, model: str = "merged"
) -> str:
    """Return the `featcal calibrate` line with these options.

    Args:
        suite: its name or its file.
        config: resolved, as a session's models have theirs (`calibration.config.resolve`).
        defaults: the suite's own options; of what is seldom changed, what differs from them is said.
        model: what is calibrated.
    """
    parts = ["featcal", "calibrate", suite, *(() if model == "merged" else ("--model", model))]
    parts += ["--recipe", config.recipe] if config.recipe != PAPER or config.recipe != defaults.recipe else []
    numbers = {name: getattr(config, name) for name in NUMBERS[config.recipe]}
    return shlex.join([*parts, *_flags(numbers | shared_options(config, defaults)), "--out", out])


def select_command(suite: str, options: Mapping[str, Any]) -> str:
    """Return the `featcal select` line with these `shared_options`."""
    return shlex.join(["featcal", "select", suite, *_flags(options)])


def shared_options(config: CalibrationConfig, defaults: CalibrationConfig) -> dict[str, Any]:
    """Return what is left beside a recipe and its numbers: samples, and what else differs from the suite's own options;
    of parts the list of them."""
    rest = [name for name in OPTIONS if name not in ("recipe", "samples", *OF_A_RECIPE, *PARTIAL, *IDLE)]
    found = {name: getattr(config, name) for name in rest if getattr(config, name) != getattr(defaults, name)}
    parts = {name: getattr(config, name) for name in PARTIAL}
    listed = {name: [ALL] if chosen is None else list(chosen) for name, chosen in parts.items()
              if chosen is not None or getattr(defaults, name) is not None}  # fmt: skip
    return {"samples": config.samples, **found, **listed}


def _flags(options: Mapping[str, Any]) -> list[str]:
    """Return options as words of the command line."""
    parts: list[str] = []
    for name, value in options.items():
        if isinstance(value, list):
            apart = any("," in one for one in value)  # a list with commas between would be read as other names
            parts += [word for one in (value if apart else [",".join(value)]) for word in (f"--{name}", one)]
        else:
            parts += _flag(name, value)
    return parts


def _flag(name: str, value: bool | float | str) -> list[str]:
    """Return an option as words of the command line."""
    flag = name.replace("_", "-")
    return [f"--{'' if value else 'no-'}{flag}"] if isinstance(value, bool) else [f"--{flag}", _format_value(value)]


def _format_value(value: float | str) -> str:
    return exactly(value) if isinstance(value, float) else str(value).lower()


def weights_of(model: str, family: Family) -> Weights:
    """Return the tensors of a model that is named, but for calibrated ones and baselines.

    Raises:
        InputError: no such model, options that it does not have, or a checkpoint that does not fit the suite.
    """
    name = model_name(model)
    if name.kind == "expert":
        return _expert(name, family)
    if name.kind == "anchor":
        said = read_options(name, {"rho": float})
        if not said:
            raise InputError("model 'anchor' needs its rho, such as anchor:rho=2")
        return AnchorWeights(said["rho"], family.base, family.merged)
    if name.kind == REFERENCE:
        return with_heads(family, _checkpoint(model, family), Path(model).expanduser())
    if name.kind in ("base", "merged"):
        return family.model(model)
    return family.merge(recipe_for(family.suite, model))


def _checkpoint(model: str, family: Family) -> Weights:
    try:
        return family.model(model)
    except InputError as error:
        meant = did_you_mean(model.partition(":")[0], (*NAMED, *method_names()))
        if not meant or Path(model).exists():
            raise
        raise InputError(f"{error}.{meant}") from error


def _expert(name: ModelName, family: Family) -> Weights:
    known = family.experts
    if name.task is None:
        raise InputError(f"model 'expert' is every expert on its own task; name one: expert:{next(iter(known))}")
    if name.task not in known:
        raise InputError(
            f"model 'expert:{name.task}': no such task; there are {', '.join(known)}.{did_you_mean(name.task, known)}"
        )
    return known[name.task]


def recorded_config(folder: Path) -> CalibrationConfig:
    """Return the options of the calibration that wrote a folder.

    Raises:
        InputError: it holds no record of one.
    """
    return recorded_calibration(folder)[0]


def recorded_calibration(folder: Path) -> tuple[CalibrationConfig, str]:
    """Return the options of the calibration that wrote a folder, and the name of the model that it calibrated.

    Raises:
        InputError: it holds no record of one.
    """
    require_inside(folder / "featcal.json", "record")
    missing = f"{folder} has no featcal.json of a calibration; give a calibrated folder or 'merged'"
    record = read_json(folder / "featcal.json", missing=missing)
    try:
        return CalibrationConfig(**record["config"]), str(record.get("model", "merged"))
    except (KeyError, TypeError) as error:
        raise InputError(missing) from error

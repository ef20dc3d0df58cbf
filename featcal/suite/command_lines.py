"""Write the command lines that make calibrations and send them to the Hub."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from featcal.suite.calibration_options import (
    IDLE,
    NUMBERS,
    OF_A_RECIPE,
    OPTIONS,
    OWN,
    PAPER,
    PARTIAL,
    CalibrationConfig,
)
from featcal.suite.methods import ALL
from featcal.suite.options import format_value


def calibrate_line(
    suite: str, config: CalibrationConfig, defaults: CalibrationConfig, out: str, model: str = "merged"
) -> str:
    """Return the `featcal calibrate` line with these options.

    Args:
        suite: its name or its file.
        config: resolved, as a session's models have theirs (`calibration.config.resolve_options`).
        defaults: the suite's own options; rarely used options are written only where they differ from these.
        model: the model to calibrate.
    """
    parts = ["featcal", "calibrate", suite, *(() if model == "merged" else ("--model", model))]
    parts += ["--recipe", config.recipe] if config.recipe != PAPER or config.recipe != defaults.recipe else []
    if config.recipe != defaults.recipe:  # what a suite recommends for one recipe says nothing of another
        plain = CalibrationConfig(recipe=config.recipe)
        defaults = replace(defaults, recipe=config.recipe, **{name: getattr(plain, name) for name in OWN})
    numbers = {name: getattr(config, name) for name in NUMBERS[config.recipe]}
    return shlex.join([*parts, *_flags(numbers | shared_options(config, defaults)), "--out", out])


def select_line(suite: str, options: Mapping[str, Any], of: str = "merged") -> str:
    """Return the `featcal select` line with these `shared_options`; `of` is the merge on which all recipes are
    tried."""
    return shlex.join(["featcal", "select", suite, *(() if of == "merged" else ("--of", of)), *_flags(options)])


def shared_options(config: CalibrationConfig, defaults: CalibrationConfig) -> dict[str, Any]:
    """Return the options besides a recipe and its numbers: samples, and every other option that differs from the
    suite's own; parts as a list."""
    rest = [name for name in OPTIONS if name not in ("recipe", "samples", *OF_A_RECIPE, *PARTIAL, *IDLE)]
    found = {name: getattr(config, name) for name in rest if getattr(config, name) != getattr(defaults, name)}
    parts = {name: getattr(config, name) for name in PARTIAL}
    listed = {name: [ALL] if chosen is None else list(chosen) for name, chosen in parts.items()
              if chosen is not None or getattr(defaults, name) is not None}  # fmt: skip
    return {"samples": config.samples, **found, **listed}


def push_line(folder: str, licence: bool) -> str:
    """Return the `featcal push` line that shows what an upload of a folder would send to the Hub.

    Args:
        licence: whether the folder's card states one; otherwise the line has a placeholder for it.
    """
    return shlex.join(["featcal", "push", folder, "OWNER/NAME", *([] if licence else ["--license", "ID"])])


def _flags(options: Mapping[str, Any]) -> list[str]:
    """Return options as words of the command line."""
    parts: list[str] = []
    for name, value in options.items():
        if isinstance(value, list):
            # Tasks have names of others, and one may be called as two of them are with a comma between.
            listed = value if name == "tasks" else [",".join(value)]
            parts += [word for one in listed for word in (f"--{name}", one)]
        else:
            parts += _flag(name, value)
    return parts


def _flag(name: str, value: bool | float | str) -> list[str]:
    """Return an option as words of the command line."""
    flag = name.replace("_", "-")
    return [f"--{'' if value else 'no-'}{flag}"] if isinstance(value, bool) else [f"--{flag}", format_value(value)]

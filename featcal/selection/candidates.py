"""Which options are tried: the recipes' defaults, a small grid, then what the tree-structured Parzen estimator says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import product
from typing import Any

from featcal.calibration.calibrate import config_for
from featcal.calibration.config import OF_A_RECIPE, PAPER, RECIPES, REFINED, CalibrationConfig
from featcal.family import Family

CHOSEN = ("recipe", *OF_A_RECIPE)
"""What a candidate decides; everything else is the same for all."""
LAMS = (1e-3, 1e-2, 1e-1)
ALPHAS = (0.6, 0.3)
BETAS = (0.5, 0.0)
_LAM = (1e-6, 1.0)
_STEPS = {"rho": (0.5, 2.5, 0.25), "alpha": (0.05, 1.0, 0.05), "beta": (0.0, 1.0, 0.1)}
"""Lowest and highest value and step."""
Options = Mapping[str, Any]
Number = Callable[..., float]


def options_of(config: CalibrationConfig) -> dict[str, Any]:
    """What a candidate decides."""
    return {name: getattr(config, name) for name in CHOSEN}


def defaults(family: Family, asked: CalibrationConfig) -> list[CalibrationConfig]:
    """What was asked for, and beside it the other recipe's own."""
    (other,) = (recipe for recipe in RECIPES if recipe != asked.recipe)
    theirs = config_for(family, recipe=other, samples=asked.samples)
    return [asked, replace(asked, **options_of(theirs))]


def planned(family: Family, asked: CalibrationConfig) -> list[CalibrationConfig]:
    """Candidates that are tried first, in this order: defaults, the paper's recipe at other lam, and a grid of lam,
    alpha and beta of the refined one."""
    first = defaults(family, asked)
    own = {config.recipe: config for config in first}
    grid = [replace(own[PAPER], lam=lam) for lam in LAMS]
    grid += [
        replace(own[REFINED], beta=beta, alpha=alpha, lam=lam) for beta, alpha, lam in product(BETAS, ALPHAS, LAMS)
    ]
    return list(dict.fromkeys([*first, *grid]))


def parameters(options: Options) -> dict[str, Any]:
    """The same options as a study's parameters, which are named by recipe: the nearest values that it may try."""
    recipe = options["recipe"]
    found = {"recipe": recipe, f"{recipe} lam": min(max(options["lam"], _LAM[0]), _LAM[1])}
    for name in _stepped(recipe):
        low, high, step = _STEPS[name]
        found[f"{recipe} {name}"] = low + step * round((min(max(options[name], low), high) - low) / step)
    return found


def suggested(choice: Callable[[str, tuple[str, ...]], str], number: Number) -> dict[str, Any]:
    """Options that a sampler suggests.

    Args:
        choice: one of several names.
        number: a number from low to high, by its name; keywords `step` or `log`.
    """
    recipe = choice("recipe", RECIPES)
    found: dict[str, Any] = dict.fromkeys(CHOSEN, 0.0)
    found |= {"recipe": recipe, "lam": float(f"{number(f'{recipe} lam', *_LAM, log=True):.2g}")}
    for name in _stepped(recipe):
        low, high, step = _STEPS[name]
        found[name] = round(number(f"{recipe} {name}", low, high, step=step), 9)
    return found


def _stepped(recipe: str) -> tuple[str, ...]:
    return ("rho", "alpha", "beta") if recipe == REFINED else ("rho", "alpha")

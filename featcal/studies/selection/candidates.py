"""List the candidates of a choice: the recipes, the prior at some strengths, and models as they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from featcal.calibration.calibrate import config_for
from featcal.calibration.config import require_base, usable_recipes
from featcal.family.opening import Family
from featcal.session.model_names import name_calibration
from featcal.session.model_ref import resolve_model
from featcal.suite.calibration_options import (
    CAUTIOUS,
    CHOSEN,
    INFORMED,
    OPTIONS,
    OWN,
    PAPER,
    CalibrationConfig,
)
from featcal.suite.methods import REFERENCE, SAMPLES, TEST_DATA, is_method, merger_names, method
from featcal.suite.name_grammar import model_name, name_on
from featcal.system.errors import InputError

PRIORS = ((0.1, 2.0), (0.2, 1.5), (0.3, 1.0), (0.3, 2.0))
"""Values of mu and rho for further candidates of "informed"."""
DECISIONS = 0.7
"""Value of decisions for one more, which stays within noise if a task has samples enough
(`SelectionProblem.standing`)."""
MERGED = "merged"
"""Name of the suite's own merged model among the starts."""


@dataclass(frozen=True)
class CandidateModel:
    """A candidate of a choice: a start, as it is or calibrated with some options."""

    start: str
    """Name of the model to calibrate: the suite's merged one or another merge."""
    config: CalibrationConfig | None
    """Options of the calibration; None for the start as it is."""

    def name(self, family: Family) -> str:
        """Return the name by which every command knows it."""
        if self.config is None:
            return self.start
        return name_on(name_calibration(self.config, family), self.start)


def config_asked(family: Family, **chosen: Any) -> CalibrationConfig:
    """Return the options of a choice: those given (None is not), else the suite's, else its recipe's.

    Args:
        chosen: samples, seed, switches and parts, by name.

    Raises:
        InputError: as `calibration.calibrate.config_for`.
    """
    # A switch that the suite's recipe lacks is asked for under the recipe that has them all.
    return config_for(family, recipe=_default(family) if any(chosen.get(name) for name in OWN) else None, **chosen)


def _default(family: Family) -> str:
    """Return the recipe that is varied, which supports all switches that the model has."""
    return usable_recipes(family.adapter, family.is_base_known)[-1]


def candidate_options(config: CalibrationConfig) -> dict[str, Any]:
    """Return the options by which candidates differ, with this candidate's values."""
    return {name: getattr(config, name) for name in CHOSEN}


def plan_candidates(
    family: Family, asked: CalibrationConfig, starts: Sequence[str] = (), of: str = MERGED
) -> list[CandidateModel]:
    """List the candidates: first "informed" at its defaults; then the merge as it is, the other recipes at their
    defaults, "informed" with `DECISIONS`, at `PRIORS` and cautious, the requested options, and every start as it is and
    calibrated like the first. If the base is not known "refined" takes the place of "informed", without `PRIORS`. Of an
    architecture without a row of facts there is the recipe "paper" alone.

    Args:
        asked: requested options; samples, seed, switches and parts apply to all candidates, except switches that a
            recipe does not have.
        starts: names of other merges.
        of: name of the merge on which all recipes are tried.

    Raises:
        InputError: a start is not a merge, or uses samples, some of which are held out; or the requested options need a
            base that is not known.
    """
    require_base(asked, family.suite)

    def use_defaults(recipe: str) -> CalibrationConfig:
        own = config_for(family, recipe=recipe, samples=asked.samples)
        # Switches of other recipes are off in it, whatever was asked for.
        foreign = {name: getattr(own, name) for name in OWN if recipe not in OPTIONS[name].recipes}
        return replace(asked, **(candidate_options(own) | foreign))

    default, recipes = use_defaults(_default(family)), usable_recipes(family.adapter, family.is_base_known)
    repairs = [default, *(use_defaults(recipe) for recipe in recipes if recipe != INFORMED)]
    if default.recipe != PAPER:
        repairs.append(replace(default, decisions=DECISIONS))
        repairs += [replace(default, mu=mu, rho=rho) for mu, rho in PRIORS if default.recipe == INFORMED]
        repairs.append(replace(default, **dict[str, Any](CAUTIOUS)))
    repairs.append(asked)
    merge = _start(of, family)
    first, *others = (CandidateModel(merge, config) for config in repairs)
    more = [
        CandidateModel(start, config)
        for config in (None, default)
        for start in (_start(name, family) for name in starts)
    ]
    # Each once: what was asked for may be one of the others, and a cell is a name on a fold.
    return list(dict.fromkeys([first, CandidateModel(merge, None), *others, *more]))


def merges_to_try(minutes: float | None) -> list[str]:
    """Return the names of the mergers that need neither samples nor training, at their defaults, if there is a time
    limit; without one only named merges are tried.

    Raises:
        InputError: minutes must be above 0.
    """
    if minutes is None:
        return []
    if not isinstance(minutes, int | float) or not minutes > 0:
        raise InputError(f"minutes is {minutes!r}; give a number above 0")
    return [name for name in merger_names() if not method(name).about.needs]


def _start(name: str, family: Family) -> str:
    """Return the full name of a merge that uses no samples.

    Raises:
        InputError: the name is not a merge, or an option is unknown or outside its range.
    """
    part: str | None = name
    while part is not None:
        parsed = model_name(part)
        sees = not is_method(parsed.kind) or {SAMPLES, TEST_DATA} & {*method(parsed.kind).about.needs}
        if sees and parsed.kind not in (MERGED, REFERENCE):
            raise InputError(
                f"start '{name}': {parsed.kind} is not a merge without samples; name merge methods, svc or checkpoints"
            )
        part = parsed.of
    return resolve_model(name, family).name

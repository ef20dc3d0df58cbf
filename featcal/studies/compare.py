"""Measure the method table of a suite: every method on the same samples, with its cost and its requirements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from featcal.calibration.calibrate import config_for
from featcal.session.session import Session
from featcal.studies.method_lists import everything
from featcal.studies.plan import StudyPlan
from featcal.studies.study import Study, study_of
from featcal.suite.calibration_options import REFINED
from featcal.suite.methods import ALL, EXPERT


def compare_methods(session: Session, plan: StudyPlan) -> Study:
    """Measure methods by their names, with the experts; "all" means every method at its defaults.

    Raises:
        InputError: an invalid name.
    """
    full = replace(plan, methods=[EXPERT, *named_methods(session, plan.methods)])
    return study_of("compare", session, plan.on, full.run(session, full.points()))


def named_methods(session: Session, names: Sequence[str]) -> list[str]:
    """Return the names with "all" replaced by every method of the suite."""
    return [name for one in names for name in (every_method(session) if one == ALL else [one])]


def every_method(session: Session) -> list[str]:
    """Return the names of all methods at their defaults for a suite, without those that need an unknown base."""
    if not session.family.is_base_known:
        return [EXPERT, "merged", "calibrated", f"calibrated:recipe={REFINED}"]
    return everything(config_for(session.family).rho)

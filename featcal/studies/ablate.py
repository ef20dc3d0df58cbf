"""Study the value of a calibration's parts: repeat it without one of them."""

from __future__ import annotations

from dataclasses import asdict, replace

from featcal.calibration.calibrate import config_for
from featcal.calibration.config import idle_options
from featcal.session.session import Session
from featcal.studies.plan import StudyPlan, points_of
from featcal.studies.study import Study, study_of
from featcal.suite.calibration_options import INFORMED, NUMBERS, PAPER, RECIPES
from featcal.suite.methods import EXPERT
from featcal.system.formatting import exactly

_SWITCHED = (("no biases", "biases"), ("no LayerNorms", "layernorms"), ("with RMSNorm scales", "rmsnorms"))


def study_ablation(session: Session, plan: StudyPlan) -> Study:
    """Measure every recipe complete, then without one of its parts; rows of the plan's own methods come first."""
    points = plan.points([EXPERT, *plan.methods])
    for recipe in RECIPES:
        for part, name in variants(session, recipe):
            for point in points_of(name, plan.samples, plan.seeds):
                points.append(replace(point, method=f"{recipe}: {part}"))
    return study_of("ablate", session, plan.on, plan.run(session, points))


def variants(session: Session, recipe: str) -> list[tuple[str, str]]:
    """Return the changed options of a recipe, and the name of the resulting model.

    The variant "all tokens alike" gives patch tokens of the last block weight 1. Calibrating scales of RMSNorms is
    featcal's extension, off by default.
    """
    family = session.family
    idle, own = idle_options(family.adapter), config_for(family, recipe=recipe)
    changed: list[tuple[str, dict[str, str]]] = [("whole", {})]
    for what, option in _SWITCHED:
        before = getattr(own, option)
        # A switch that this architecture does not have, or that is turned already, would make the whole recipe again.
        if option not in idle and before == (option != "rmsnorms"):
            changed.append((what, {option: str(not before).lower()}))
    if "patch_weight" not in idle:
        changed.append(("all tokens alike", {"patch_weight": "1"}))
    changed += [(f"{part} alone", {"maps": part}) for part in family.adapter.parts()]
    # The prior asks for rho times an expert's change, and the anchor for rho times the merge's.
    also = ", prior at the experts" if recipe == INFORMED else ""
    changed += [
        (f"anchor at the merged model{also}", {"rho": "1"}),
        ("deployed features alone", _without_alpha(recipe)),
    ]
    changed.append(("expert features alone", {"alpha": "1"}))
    if recipe != PAPER:
        paper = asdict(config_for(family, recipe=PAPER))
        as_paper = {name: exactly(paper[name]) for name in ("lam", "rho", "alpha")}
        changed += [("refreshed, no stream targets", {"beta": "0"}), ("paper's options", {**as_paper, "beta": "0"})]
    return [(what, _name(recipe, options)) for what, options in changed]


def _without_alpha(recipe: str) -> dict[str, str]:
    """Return the options that remove the experts' features from the targets."""
    # Beta above 0 needs features of the experts.
    return {"alpha": "0", **({"beta": "0"} if "beta" in NUMBERS[recipe] else {})}


def _name(recipe: str, options: dict[str, str]) -> str:
    settings = ",".join(f"{name}={value}" for name, value in {"recipe": recipe, **options}.items())
    return f"calibrated:{settings}"

"""Study the value of the forward order: apply the same closed form to features that are not the deployed model's.

Forward order is Algorithm 1. "stale" fits every block on the output of a merged block, "parallel" fits all blocks on
the merged model's features. Proposition 8 bounds the cost block by block (`Fits.sources`); here whole models are made
and scored, and that excess is reported next to the scores.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from featcal.calibration.calibrate import calibrate_family, expert_passes
from featcal.calibration.config import resolve_options
from featcal.formats.weights import Overlay, Weights
from featcal.models.lane import WalkCache
from featcal.session.session import Session
from featcal.studies.plan import StudyPlan
from featcal.studies.runner import Point, place_points
from featcal.studies.study import Study, study_of
from featcal.suite.calibration_options import PAPER, CalibrationConfig
from featcal.suite.methods import EXPERT, PROPOSED
from featcal.suite.name_grammar import model_name
from featcal.system.errors import InputError

METHODS = ("calibrated", *PROPOSED)
FORWARD, STALE, PARALLEL = SCHEDULES = ("forward", "stale", "parallel")
EXCESS = "excess"
_SOURCE = {STALE: "stale", PARALLEL: "merged"}
"""Order of calibration → the feature source of its blocks in Prop. 8."""


def study_schedule(session: Session, plan: StudyPlan) -> Study:
    """Measure every calibration in every order.

    Raises:
        InputError: a method is not a calibration of the suite's merged model.
    """
    others = [name for name in plan.methods if model_name(name).kind != "calibrated"]
    if others:
        raise InputError(f"methods: {', '.join(others)} is not a calibration; this study needs calibrated:OPTIONS")
    if elsewhere := [name for name in plan.methods if model_name(name).of != "merged"]:
        raise InputError(
            f"methods: {', '.join(elsewhere)} calibrates another model than the suite's merged one, which this study "
            "does not do; make it the suite's `merged`, or leave out the @ and what follows it"
        )
    points = plan.points([EXPERT, "merged"])
    for order in SCHEDULES:
        here = place_points(plan.points(), schedule=order)
        points += here if order == FORWARD else [_order_point(point, order) for point in here]
    return study_of("schedule", session, plan.on, plan.run(session, points))


def _order_point(point: Point, order: str) -> Point:
    def make(session: Session, config: CalibrationConfig) -> Weights:
        return calibrate_behind(session, config, 1 if order == STALE else len(session.family.adapter.blocks()))

    def measure_beside(session: Session, config: CalibrationConfig) -> dict[str, float]:
        # Prop. 8 is about the objective of the paper's recipe alone.
        return {} if config.recipe != PAPER else {EXCESS: excess(session, config, _SOURCE[order])}

    return replace(point, made=order, make=make, beside=measure_beside)


def excess(session: Session, config: CalibrationConfig, source: str) -> float:
    """Return the excess of an order's feature source over the minimum of the local objective (Prop. 8), before any
    model is made: mean over all linear maps of the forward order's model (`SourceExcess.relative`)."""
    found = [one.relative for one in session.fit.sources(config) if one.source == source]
    return sum(found) / len(found)


def calibrate_behind(session: Session, config: CalibrationConfig, lag: int) -> Weights:
    """Return the merged model with every block fitted on features for which the `lag` blocks before it are still
    merged.

    One block is calibrated at a time, so this takes as many calibrations as there are blocks. Lag 0 is Algorithm 1.
    """
    family = session.family
    adapter, merged = family.adapter, family.merged
    config = resolve_options(config, adapter, session.tasks)
    # Once for all blocks: the experts' features do not depend on the student.
    passes = expert_passes(family, config, WalkCache.from_device(family.compute.device))
    solved: list[Mapping[str, Tensor]] = []
    for number, block in enumerate(adapter.blocks()):
        layer = adapter.name_of(block)
        if config.blocks is not None and layer not in config.blocks:
            solved.append({})
            continue
        # Blocks further back than the lag are calibrated already; those within it are still the merged ones.
        before = {name: tensor for one in solved[: max(0, number - lag)] for name, tensor in one.items()}
        student = replace(family, merged=Overlay(merged.label, merged, before))
        fitted = calibrate_family(student, replace(config, blocks=(layer,)), experts=passes).weights
        solved.append(fitted.read(block.names))
    every = {name: tensor for one in solved for name, tensor in one.items()}
    return Overlay("calibrated model", merged, every)

"""Decide which work needs its own process, by the estimates of the preflight and the size of the models."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path

import torch

from featcal.baselines.common.baseline import Sampled
from featcal.calibration.calibrate import config_for
from featcal.calibration.config import resolve_options
from featcal.calibration.precision import product_dtype
from featcal.evaluation.evaluate import BATCH_SIZE
from featcal.figures.verdict.measure import repair_of
from featcal.models.compute import DTYPES
from featcal.preflight.estimates import calibration_seconds, estimate, scoring_seconds
from featcal.preflight.samples import DrawSize
from featcal.session.model_ref import ModelId, ModelRef
from featcal.session.open_suite import ResultKind
from featcal.session.session import Session
from featcal.studies.selection.candidates import config_asked, plan_candidates
from featcal.studies.selection.choose import FEWEST
from featcal.studies.selection.held_out_samples import FOLDS
from featcal.suite.calibration_options import PARTIAL, CalibrationConfig
from featcal.suite.views import EvaluationSamples

LONG = 2.0
"""Most seconds of work that a page does itself."""
SMALL = 64 * 2**20
"""Bytes up to which a model is read in a moment."""
LONG_IF_SMALL = 60.0
"""Most seconds of work on small models that a page does itself: their estimates mostly reflect how busy the machine is,
and a separate process takes some ten seconds to begin."""
LOOKED_AT = 2
"""Number of a task's samples that determine its tokens; more for text, which is cheap and varies."""
LOOKED_AT_OF_TEXT = 16
_CALIBRATING, _SCORING = ResultKind[float]("seconds to calibrate"), ResultKind[float]("seconds to score")


def is_long(session: Session, seconds: float) -> bool:
    """Say whether work of this length on a session's suite needs its own process."""
    return seconds > (LONG if session.family.stored_bytes > SMALL else LONG_IF_SMALL)


def share_cores(session: Session) -> None:
    """Let this thread compute on all cores but one if a suite's models are tiny, and on all cores otherwise.

    Threads that synchronise after every small product all wait for the core that the browser has just taken; this loses
    more than a second core gains on tiny models.
    """
    cores = _threads_at_first()
    torch.set_num_threads(max(1, cores - 1) if session.family.is_tiny else cores)


@cache
def _threads_at_first() -> int:
    """Return torch's default number of threads."""
    return torch.get_num_threads()


def seconds_to_calibrate(session: Session, config: CalibrationConfig) -> float:
    """Estimate seconds of this machine's processor for a calibration, once for all options of equal cost.

    Raises:
        InputError: samples that cannot be drawn, or parts that do not exist.
    """
    config = resolve_options(config, session.family.adapter, session.tasks)

    def make() -> float:
        sizes = draw_sizes(session, EvaluationSamples(config.samples, "calibration", config.seed), config.augment)
        return calibration_seconds(session.family.adapter, sizes, config)

    parts = tuple(getattr(config, name) for name in PARTIAL)
    counted = config.samples, config.augment, config.batch_size
    alike = *counted, config.precision, product_dtype(DTYPES[config.precision], config), bool(config.decisions), parts
    return session.get_or_make(_CALIBRATING, alike, make)


def seconds_to_select(session: Session, config: CalibrationConfig) -> float:
    """Estimate seconds for a choice of recipe and options, by its calibrations.

    Raises:
        InputError: as `seconds_to_calibrate`.
    """
    fitted = sum(tried.config is not None for tried in plan_candidates(session.family, config))
    return ((FOLDS - 1) * fitted + 1) * seconds_to_calibrate(session, config)


def samples_to_select(session: Session, seconds: float) -> int | None:
    """Return the calibration samples per task with which a choice stays within this time: as many as the suite's
    options have, else 64 or fewer. None if even the fewest take longer for the minimum, the default on every fold and
    then on all samples.

    Raises:
        InputError: as `seconds_to_calibrate`.
    """
    most = config_asked(session.family).samples
    tried = (config_asked(session.family, samples=count) for count in (most, 64, 32, 16, FEWEST) if count <= most)
    return next((one.samples for one in tried if FOLDS * seconds_to_calibrate(session, one) <= seconds), None)


def seconds_to_make(session: Session, model: ModelId) -> float:
    """Estimate seconds for the calibrations behind a model; a baseline on samples counts as some of them
    (`Sampled.calibrations`), models made from weights alone as nothing.

    Raises:
        InputError: as `seconds_to_calibrate`, or no such model.
    """
    one: ModelRef | None = session.resolve(model)
    seconds = 0.0
    while one is not None:
        if one.config is not None:
            seconds += seconds_to_calibrate(session, one.config)
        elif isinstance(one.baseline, Sampled):
            seconds += one.baseline.calibrations * seconds_to_calibrate(session, one.baseline.counting)
        one = one.of
    return seconds


def seconds_to_compare(session: Session, models: Iterable[ModelId], view: EvaluationSamples) -> float:
    """Estimate seconds for making and scoring models."""
    return sum(seconds_to_make(session, one) + seconds_to_score(session, view) for one in models)


def seconds_to_diagnose(session: Session, model: ModelId, view: EvaluationSamples) -> float:
    """Estimate seconds for a verdict: base, experts, model and its repair are scored, the repair is made, and the drift
    is attributed to layers, which takes as long as a calibration on the same samples."""
    repair = repair_of(session, model)
    booked = seconds_to_calibrate(session, config_for(session.family, samples=view.samples, seed=view.seed))
    return booked + seconds_to_compare(session, ("base", "expert", model, *(() if repair is None else (repair,))), view)


def calibration_bytes(session: Session, config: CalibrationConfig, *, resident: bool = False) -> int:
    """Estimate the memory of a process that calibrates, from headers and the first samples.

    Args:
        resident: every tensor of every model stays in memory.
    """
    family, info = session.family, session.family.merged.info
    sizes = draw_sizes(session, EvaluationSamples(config.samples, "calibration", config.seed), config.augment)
    models = 2 + len(family.experts)
    needed = estimate(family.adapter, info, sizes, config, models, Path.cwd()).memory_bytes
    tower = sum(info[name].nbytes for name in family.adapter.tower)
    return needed + resident * models * tower


def seconds_to_score(session: Session, view: EvaluationSamples) -> float:
    """Estimate seconds for scoring one model.

    Raises:
        InputError: samples that cannot be drawn.
    """

    def make() -> float:
        family = session.family
        answers = {task: spec.max_target_length for task, spec in family.suite.tasks.items()} if session.is_text else {}
        return scoring_seconds(family.adapter, draw_sizes(session, view), BATCH_SIZE, answers)

    return session.get_or_make(_SCORING, (view.samples, view.split, view.seed), make)


def seconds_to_report(session: Session, models: int, on: EvaluationSamples) -> float:
    """Estimate seconds for a report: every model is scored on the test split, and its drift is attributed to layers,
    which takes as long as a calibration on the same samples."""
    measured = seconds_to_calibrate(session, config_for(session.family, samples=on.samples, seed=on.seed))
    scored = "test" in session.family.suite.splits()  # a report without test samples has no scores
    return models * ((seconds_to_score(session, EvaluationSamples(None, "test")) if scored else 0.0) + measured)


def draw_sizes(session: Session, view: EvaluationSamples, copies: int = 0) -> dict[str, DrawSize]:
    """Estimate the size of every task's samples in a view from the first ones, with so many varied copies of each."""
    family, split = session.family, view.split or session.split
    first = slice(0, LOOKED_AT_OF_TEXT if session.is_text else LOOKED_AT)
    found = {}
    for task in session.tasks:
        few = family.samples(task, split, view.samples, view.seed, first)
        found[task] = DrawSize.measure(family.adapter, few.inputs, len(few), few.total * (1 + copies))
    return found

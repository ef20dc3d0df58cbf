"""Record a session's measurements of a model in the history."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict

from featcal.evaluation.evaluate import Scores
from featcal.session.model_ref import ModelId, ModelRef
from featcal.session.open_suite import ResultKind
from featcal.session.session import Session
from featcal.studies.history import (
    History,
    HistoryEntry,
    How,
    RunMeasurement,
    TaskValue,
    current_maker,
    new_run,
    suite_hash,
)
from featcal.suite.calibration_options import IDLE
from featcal.suite.views import EvaluationSamples
from featcal.system.errors import InputError, NoScores, NumericalError
from featcal.system.progress import Progress, silent

_RECORDED, _SUITE_HASH = ResultKind[str]("why it is not recorded"), ResultKind[str]("hash of the suite")


def record(session: Session, model: ModelId, on: EvaluationSamples, history: History, how: How | None = None) -> str:
    """Record the session's measurements of a calibrated model; missing ones are measured first.

    Args:
        how: kind of the scores, as in `measure_model`.

    Returns:
        The reason if it could not be recorded, or "".

    Raises:
        FeatcalError: the model cannot be measured; a history that cannot be written does not raise.
    """

    def make() -> str:
        kept = history.add(run_of(session, model), measure_model(session, model, on, how))
        return "" if kept else history.problems[-1]

    key = str(history.folder), session.resolve(model).key, on, how
    if not history.has(run_of(session, model)):  # somebody deleted it
        session.forget(_RECORDED, key)
    problem = session.get_or_make(_RECORDED, key, make)
    if problem:  # a full disk may have room when somebody asks again
        session.forget(_RECORDED, key)
    return problem


@contextmanager
def count_looks(
    session: Session, models: Iterable[ModelId], on: EvaluationSamples, place: str, history: History
) -> Iterator[None]:
    """Record a use of the test split for each of the models that the body of the `with` scores on it.

    Args:
        place: where the scores are shown, such as "featcal evaluate".
    """
    # What the session has scored before is shown again, which is not another look.
    new = [model for model in models if not session.measure.has_scores(model, on)]
    try:
        yield
    finally:
        for model in new:
            if session.measure.has_scores(model, on) and (on.split or session.split) == "test":
                history.look(hash_of(session), session.resolve(model).name, place)


def hash_of(session: Session) -> str:
    """Return the suite's hash at the time of the session's first request."""
    # Files that change meanwhile are another suite's, for another session: this one has read those before.
    return session.get_or_make(_SUITE_HASH, None, lambda: suite_hash(session.family.suite, session.family.commits))


def run_of(session: Session, model: ModelId) -> HistoryEntry:
    """Return the run of a suite's model, given by its name or by the options of its calibration."""
    one = session.resolve(model)
    config = {} if one.config is None else asdict(one.config)
    # A batch size changes time, memory and rounding, so it does not make another run.
    options = {name: value for name, value in config.items() if name not in IDLE}
    suite = session.family.suite.name, hash_of(session)
    return new_run(suite, one.name, options, current_maker(session.family.compute.device.type), one.files)


def resolve_run(session: Session, run: HistoryEntry) -> ModelRef:
    """Return the model of a run of this suite.

    Raises:
        InputError: the files of the checkpoint that it is or starts from are others by now, so it cannot be made again.
    """
    model = session.resolve(run.model)
    now = run_of(session, model)
    same = now.suite_hash == run.suite_hash and now.made_by == run.made_by
    if model.files and same and now.id != run.id:
        raise InputError(
            f"{run.model}: its files have changed since run {run.id[:6]} was measured; the history shows what the "
            "earlier files gave"
        )
    return model


def kind_of_scores(session: Session) -> How:
    """Return the kind of a suite's scores: whole answers of text and the likeness of sentences, else from the features
    of the drift measurement."""
    return "answers" if session.scores_apart else "features"


def score_run(session: Session, model: ModelId, on: EvaluationSamples, how: How, progress: Progress = silent) -> Scores:
    """Score a model by whole answers, or from the features of the drift measurement.

    Raises:
        InputError: there is no head, no labels or no answers.
    """
    if how == "answers":
        return session.measure.scores(model, on, progress)
    return session.measure.quick_scores(model, on)


def measure_model(session: Session, model: ModelId, on: EvaluationSamples, how: How | None = None) -> RunMeasurement:
    """Measure a model's drift and scores on the same samples; without scores if there can be none.

    Args:
        how: kind of the scores, None for `kind_of_scores`; "features" of text are first tokens.

    Raises:
        InputError: the model does not fit the suite, or the samples cannot be used.
        NumericalError: a drift is not finite.
    """
    one, how = session.resolve(model), how or kind_of_scores(session)
    try:
        scores = score_run(session, one, on, how).to_json()["tasks"]
    except NoScores:
        scores = {}
    drift = {}
    if not one.is_every_expert:  # which has none
        features = session.measure.features(one, on)
        drift = {task: found.layers[-1].relative_drift for task, found in features.tasks.items()}
    for task, value in drift.items():
        if not math.isfinite(value):
            raise NumericalError(
                f"task '{task}': the relative final drift of {one.label} is {value}: the mean norm of the "
                "expert's final features is 0 or not finite; see its checkpoint and samples"
            )
    took = {} if one.config is None else session.fit.calibrate(one).record["seconds"]
    seconds, cpu = took.get("total"), took.get("processor")  # folders of earlier versions do not say the second
    values = {task: TaskValue(**score) for task, score in scores.items()}
    return RunMeasurement(how, on.split or session.split, on.samples, on.seed, values, drift, seconds, cpu)

"""Measure models of a suite in the same way, one after the other; finished measurements are reused."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import torch

from featcal.session.model_ref import ModelRef
from featcal.session.session import Session
from featcal.studies.history import History, TaskValue, current_maker
from featcal.studies.maker import Cost, Make, Maker, measure_cost
from featcal.studies.recording import hash_of
from featcal.studies.requirements import needs
from featcal.studies.store import RowResult, Rows, StageSeconds, round_found
from featcal.suite.calibration_options import IDLE, CalibrationConfig
from featcal.suite.views import EvaluationSamples
from featcal.system.errors import FeatcalError, NoScores, NumericalError
from featcal.system.progress import Progress, silent

Beside = Callable[[Session, CalibrationConfig], Mapping[str, float]]


class Views(NamedTuple):
    """The samples of the measurements; those of scores are never used for calibration."""

    scores: EvaluationSamples = EvaluationSamples(None, "test")
    features: EvaluationSamples = EvaluationSamples(64)


@dataclass(frozen=True)
class Point:
    """One model of a study."""

    method: str
    """Name of the method, without samples and seed."""
    model: str
    """Full name of the model, as for `--model`."""
    seed: int | None = None
    """None if it uses no seed."""
    at: Mapping[str, str | int | float] = field(default_factory=dict)
    """Place in the study, such as the number of samples."""
    of: Session | None = None
    """Suite from which the model is made, if it differs from the one on which it is measured."""
    made: str = ""
    """Name of a special way to make it; then `make` makes it."""
    make: Make | None = None
    beside: Beside | None = None
    """Function for further measurements; `made` must identify that too."""


@dataclass(frozen=True)
class Row:
    """A point and its measurements."""

    point: Point
    needs: tuple[str, ...]
    found: RowResult

    @property
    def method(self) -> str:
        return self.point.method

    @property
    def mean(self) -> float:
        """Return the unweighted mean score over tasks, 0-1; NaN without scores."""
        return _mean([one.value for one in self.found.scores.values()])

    def to_json(self) -> dict[str, Any]:
        """Return one entry of `rows` in the document of a study."""
        point = self.point
        entry = {"method": point.method, "model": point.model, "seed": point.seed, "at": dict(point.at)}
        return {**entry, "needs": list(self.needs), **asdict(self.found)}


def run(
    session: Session,
    points: Sequence[Point],
    on: Views = Views(),  # noqa: B008 - a tuple
    *,
    rows: Rows | None = None,
    history: History | None = None,
    progress: Progress = silent,
) -> list[Row]:
    """Make every model and measure it; each row is saved before the next one begins. If a method cannot be used, its
    row has the reason.

    Args:
        rows: store of finished rows; by default in the user's cache folder.
        history: records uses of the test split; by default the user's own.
        progress: called with the number of finished rows; it may raise to end the work.
    """
    rows, history = rows or Rows(), history or History()
    found: dict[int, Row] = {}
    wanted: dict[int, tuple[Point, ModelRef]] = {}
    for number, point in enumerate(points):
        try:
            wanted[number] = point, (point.of or session).resolve(point.model)
        except FeatcalError as error:
            found[number] = Row(point, _needs(session, point), _failure(str(error)))
    maker = Maker((point.of or session, named) for point, named in wanted.values())
    for number in _order(session, points):
        progress("models", len(found), len(points))
        if number in wanted:
            found[number] = _row(session, *wanted[number], on, rows, history, maker)
    progress("models", len(points), len(points))
    return [found[number] for number in range(len(points))]


def _order(session: Session, points: Sequence[Point]) -> list[int]:
    """Return the numbers of points in the order in which they are made: points that share
    the most work are adjacent.
    """
    suites = list({id(point.of or session): None for point in points})

    def place(number: int) -> tuple[int, bool, int]:
        point = points[number]
        # First what no seed has a part in, on which others act; then seed by seed, since samples are drawn by it.
        return suites.index(id(point.of or session)), point.seed is not None, point.seed or 0

    return sorted(range(len(points)), key=place)


def _row(session: Session, point: Point, named: ModelRef, on: Views, rows: Rows, history: History, maker: Maker) -> Row:
    # By the resolved model, so that a default that is spelt out and one that is left out share a row.
    identity = _identity(session, point, named, on)
    known = rows.get(hash_of(session), identity)
    if known is None:
        known, final = _measure(session, point, named, on, maker)
        if known.scores and on.scores.split == "test":
            history.look(hash_of(session), named.name, "a study")
        # What changed meanwhile, or was fetched, has another identity.
        if final and identity == _identity(session, point, named, on):
            rows.put(hash_of(session), identity, known)
    maker.forget(point.of or session, named)
    return Row(point, _needs(session, point), known)


def _needs(session: Session, point: Point) -> tuple[str, ...]:
    return needs(point.model, session.family.adapter.modality)


def _identity(session: Session, point: Point, named: ModelRef, on: Views) -> dict[str, Any]:
    """Return the identity of a row among those of a suite: the model with all its options, the samples, and the
    versions."""
    family = (point.of or session).family
    model: Any = named.name
    if named.calibration is not None:
        model = {name: value for name, value in asdict(named.calibration).items() if name not in IDLE}
    views = [[one.split or session.split, one.samples, one.seed] for one in on]
    device = family.compute.device.type
    of = None if point.of is None else hash_of(point.of)
    identity = {
        "model": model,
        "files": named.files,
        "made": point.made,
        "of": of,
        "views": views,
        "by": current_maker(device),
    }
    # Kept rows are read from JSON, so what is asked for has to look as it does there.
    tuples_as_lists: dict[str, Any] = _plain(identity)
    return tuples_as_lists


def _measure(session: Session, point: Point, named: ModelRef, on: Views, maker: Maker) -> tuple[RowResult, bool]:
    """Return the measurements of a model, and whether another attempt would give the same (and so may be stored)."""
    try:
        weights, making, stages = maker.make(point.of or session, named, point.make)
        scores, scoring = _score(session, weights, on.scores)
        drift, cosine, walking = _measure_distance(session, weights, on.features)
        beside = _measure_beside(session, point, named)
    except FeatcalError as error:
        # A failure of the method itself lasts. A disk that is full or a file that is missing may be there later.
        return _failure(str(error)), isinstance(error, NumericalError | NoScores)
    except (MemoryError, torch.OutOfMemoryError) as error:
        return _failure(f"it needs more memory than there is: {error}"), False
    seconds = {"make": making, "score": scoring, "drift": walking}
    spent = {stage: StageSeconds(cost.wall, cost.cpu) for stage, cost in seconds.items()}
    return round_found(RowResult(scores, drift, cosine, spent, stages, making.peak_bytes, beside)), True


def _failure(why: str) -> RowResult:
    return RowResult({}, {}, {}, {}, {}, None, {}, why)


def _measure_beside(session: Session, point: Point, named: ModelRef) -> Mapping[str, float]:
    if point.beside is None:
        return {}
    assert named.calibration is not None
    return point.beside(point.of or session, named.calibration)


def _score(session: Session, model: ModelRef, view: EvaluationSamples) -> tuple[dict[str, TaskValue], Cost]:
    """Return scores by task; none if the samples have no labels."""
    with measure_cost() as cost:
        try:
            scores = session.measure.scores(model, view).tasks
        except NoScores:
            scores = {}
    return {task: TaskValue(one.metric, one.value, one.n) for task, one in scores.items()}, cost


def _measure_distance(
    session: Session, model: ModelRef, view: EvaluationSamples
) -> tuple[dict[str, float], dict[str, float], Cost]:
    """Return relative final drift and mean cosine by task; 0 and 1 for the experts themselves.

    Raises:
        NumericalError: a drift or a cosine is not finite.
    """
    if model.is_every_expert:
        return dict.fromkeys(session.tasks, 0.0), dict.fromkeys(session.tasks, 1.0), Cost()
    with measure_cost() as cost:
        tasks = session.measure.features(model, view).tasks
    drift = {task: one.layers[-1].relative_drift for task, one in tasks.items()}
    cosine = {task: float(one.cosine.mean()) for task, one in tasks.items()}
    for task, value in drift.items():
        if not (math.isfinite(value) and math.isfinite(cosine[task])):
            raise NumericalError(f"task '{task}': the relative final drift is {value}, the cosine {cosine[task]}")
    return drift, cosine, cost


def _plain(value: Any) -> Any:
    """Return a value converted to what JSON can hold."""
    if isinstance(value, Mapping):
        return {str(name): _plain(one) for name, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def place_points(points: Sequence[Point], **place: str | int | float) -> list[Point]:
    """Return the points moved to another place in a study."""
    return [replace(point, at={**point.at, **place}) for point in points]

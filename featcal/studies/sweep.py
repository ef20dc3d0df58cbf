"""Sweep many calibrations of one suite, measured in the same way, with models that need no calibration."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from featcal.family.opening import Family
from featcal.session.model_ref import MERGED, ModelRef
from featcal.session.session import Session, ensure_session
from featcal.studies.history import History, HistoryEntry, RunMeasurement
from featcal.studies.recording import hash_of, kind_of_scores, measure_model, run_of
from featcal.suite.calibration_options import CalibrationConfig
from featcal.suite.methods import EXPERT
from featcal.suite.name_grammar import model_name, name_on
from featcal.suite.schema import Suite
from featcal.suite.views import EvaluationSamples
from featcal.system.errors import InputError
from featcal.system.formatting import exactly
from featcal.system.progress import Progress, silent

MOST = 500
"""Largest number of calibrations in one sweep."""
SCALES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0)
"""Scales of Task Arithmetic among the baselines."""
SWEEP = "sweep"
"""Label of the progress."""
KINDS = ("calibrated", "anchor", "merger", "merged", "base", "expert")
"""Kinds of the points of a sweep; "merger" is another merge of the same experts."""
_VIEW = EvaluationSamples()


@dataclass(frozen=True)
class Grid:
    """All combinations of these values, over the other options of one calibration.

    Raises:
        InputError: no value, one outside its range, or more than `MOST` combinations.

    >>> import featcal
    >>> grid = featcal.Grid((0.01, 0.1), (0.5,), (0.0, 0.2), options=featcal.CalibrationConfig(samples=8))
    >>> [(one.lam, one.alpha) for one in grid.configs()]
    [(0.01, 0.0), (0.01, 0.2), (0.1, 0.0), (0.1, 0.2)]
    """

    lam: tuple[float, ...]
    rho: tuple[float, ...]
    alpha: tuple[float, ...]
    options: CalibrationConfig
    """Samples, seed and switches of all calibrations; its own lam, rho and alpha are ignored."""
    of: str = MERGED.name
    """Name of the model to calibrate."""

    def __post_init__(self) -> None:
        sizes = {name: len(set(getattr(self, name))) for name in ("lam", "rho", "alpha")}
        empty = [name for name, size in sizes.items() if not size]
        if empty:
            raise InputError(f"{', '.join(empty)}: a sweep needs at least one value of each")
        if math.prod(sizes.values()) > MOST:
            sizes_text = " × ".join(f"{size} {name}" for name, size in sizes.items())
            raise InputError(f"{sizes_text} are more than {MOST} calibrations; give fewer values")
        # Made once here, so that a value outside its range is an error before anything is computed.
        self.configs()

    def configs(self) -> list[CalibrationConfig]:
        """Return one set of options per combination, with alpha changing fastest; repeated values are used once."""
        values = product(*(dict.fromkeys(one) for one in (self.lam, self.rho, self.alpha)))
        return [replace(self.options, lam=lam, rho=rho, alpha=alpha) for lam, rho, alpha in values]


@dataclass(frozen=True)
class SweepPoint:
    """A model and its measurements on the samples of the sweep.

    >>> import featcal
    >>> from featcal.studies.history import RunMeasurement, TaskValue
    >>> entry = featcal.HistoryEntry("0123456789abcdef", "mini", "0" * 16, "anchor:rho=2", {}, {}, "2026-01-01T00:00Z")
    >>> scores = {"a": TaskValue("accuracy", 0.5, 64), "b": TaskValue("accuracy", 0.75, 64)}
    >>> point = featcal.SweepPoint(entry, RunMeasurement("whole", "test", 64, 42, scores, {}))
    >>> point.kind, point.found.mean, point.found.worst_task
    ('anchor', 0.625, 'a')
    """

    run: HistoryEntry
    found: RunMeasurement

    @property
    def kind(self) -> str:
        """Return one of `KINDS`."""
        return kind_of(self.run.model)


def kind_of(model: str) -> str:
    """Return the kind, one of `KINDS`, of a model by its name."""
    kind = model_name(model).kind
    return kind if kind in KINDS else "merger"


def numbers(text: str, name: str) -> tuple[float, ...]:
    """Read the values of a list such as "0.01, 0.05".

    Raises:
        InputError: not finite numbers between commas.

    >>> numbers("0.01, 0.05,", "lam")
    (0.01, 0.05)
    """
    try:
        values = tuple(float(word) for word in text.replace(";", ",").split(",") if word.strip())
    except ValueError:
        raise InputError(f"{name}: give numbers between commas, such as 0.01, 0.05") from None
    if not all(map(math.isfinite, values)):
        raise InputError(f"{name}: every value must be finite")
    return values


def run_sweep(
    suite: Suite | Family | Session,
    grid: Grid,
    progress: Progress = silent,
    *,
    on: EvaluationSamples = _VIEW,
    history: History | None = None,
    device: str = "auto",
) -> list[SweepPoint]:
    """Calibrate with every combination and measure it on the same samples; baselines first.

    Points that the history has for the same suite, versions and samples are not computed again; every finished point is
    added to it, so an interrupted sweep continues where it stopped. Each point equals a single calibration with these
    options to the last bit.

    Args:
        progress: called with the number of finished points, and for every block within a point, so that it can end the
            work.
        on: the samples to measure on; validation if the suite has it. On calibration samples the numbers flatter.
        history: by default the user's own.
        device: "auto", "cpu", "cuda" or "mps", for a suite.

    Raises:
        InputError: a combination that the recipe does not allow, before anything is computed; samples have no labels,
            or a model cannot be scored.
        NumericalError: a calibration has no trustworthy solution.

    >>> import copy, featcal, tempfile, torch, transformers
    >>> from pathlib import Path
    >>> sizes = {"vocab_size": 32, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    >>> base = transformers.BertForSequenceClassification(transformers.BertConfig(**sizes, num_attention_heads=2))
    >>> experts = {task: copy.deepcopy(base) for task in ("a", "b")}
    >>> trained = [torch.nn.init.normal_(one.classifier.weight) for one in experts.values()]
    >>> samples = dict.fromkeys(experts, (torch.arange(32).reshape(4, 8), torch.tensor([0, 1, 0, 1])))
    >>> suite = featcal.Suite.of(base=base, experts=experts, samples=samples, test=samples)
    >>> grid = featcal.Grid((0.01, 1.0), (1.0,), (0.1,), options=featcal.CalibrationConfig())
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     on, history = featcal.EvaluationSamples(4, "test"), featcal.History(Path(folder))
    ...     points = featcal.run_sweep(suite, grid, on=on, history=history)
    >>> [point.run.options["lam"] for point in points if point.kind == "calibrated"]
    [0.01, 1.0]
    >>> points[0].run.model, points[0].found.scores["a"].n
    ('base', 4)
    """
    session, history = ensure_session(suite, device), history or History()
    models = sweep_models(session, grid)
    # Read once: files of points that other processes add meanwhile are never rewritten, so nothing is lost.
    known = {run.id: run for run in history.runs(hash_of(session))}
    points = []
    for done, model in enumerate(models):
        progress(SWEEP, done, len(models))
        run = run_of(session, model)
        found = _find_recorded(session, known[run.id], on) if run.id in known else None
        if found is None:
            found = _measure(session, model, on, _report_points(progress, done, len(models)))
            history.add(run, found)
        # The recorded run has the name and the notes that a person gave it.
        points.append(SweepPoint(known.get(run.id, run), found))
    progress(SWEEP, len(models), len(models))
    return points


def sweep_models(session: Session, grid: Grid) -> list[ModelRef]:
    """Return all models of a sweep, baselines first."""
    return [*map(session.resolve, baselines(grid, session.family.is_base_known)), *calibrations(session, grid)]


def calibrations(session: Session, grid: Grid) -> list[ModelRef]:
    """Return the calibrated models of a sweep, one per combination."""
    return [session.resolve(config, grid.of) for config in grid.configs()]


def baselines(grid: Grid, has_base: bool) -> list[str]:
    """Return the comparison models of a sweep: base, merged model and experts, the calibrated model if it is another
    one, the mean of the experts, Task Arithmetic at other scales, and the calibration's anchors without any data;
    without a base only merged model, experts and calibrated model."""
    if not has_base:
        return list(dict.fromkeys(["merged", EXPERT, grid.of]))
    rhos = [rho for rho in dict.fromkeys(grid.rho) if rho != 1]  # 1 is what is calibrated
    anchors = [name_on(f"anchor:rho={exactly(rho)}", grid.of) for rho in rhos]
    scales = [f"task-arithmetic:scale={exactly(scale)}" for scale in SCALES]
    return list(dict.fromkeys(["base", "merged", EXPERT, grid.of, "simple-averaging", *scales, *anchors]))


def sweep_json(session: Session, points: Sequence[SweepPoint], on: EvaluationSamples) -> dict[str, Any]:
    """Return the document of `featcal study sweep --json`: every point with its run, ids of the Pareto front."""
    return {
        "suite": session.family.suite.name,
        "split": on.split or session.split,
        "samples": on.samples,
        "points": [{**replace(p.run, measured=(p.found,)).to_json(), "kind": p.kind} for p in points],
        "front": [point.run.id for point in front(points)],
    }


def missing(
    session: Session, grid: Grid, on: EvaluationSamples, runs: Sequence[HistoryEntry]
) -> tuple[list[ModelRef], list[ModelRef]]:
    """Return the calibrations of a sweep, and its other models, that have no run measured on these samples."""
    known = {run.id for run in runs if _find_recorded(session, run, on) is not None}
    left = [model for model in sweep_models(session, grid) if run_of(session, model).id not in known]
    return [one for one in left if one.config is not None], [one for one in left if one.config is None]


def comparable_points(session: Session, on: EvaluationSamples, runs: Sequence[HistoryEntry]) -> list[SweepPoint]:
    """Return the runs of the suite with scores on these samples, from any source."""
    return [SweepPoint(run, found) for run in runs if (found := _find_recorded(session, run, on)) is not None]


def front(points: Sequence[SweepPoint]) -> list[SweepPoint]:
    """Return the Pareto front of mean and worst task: the runs that no other run equals or beats in both, by rising
    mean; of equal points all. Experts are left out, because they are one model per task.
    """
    models = [point for point in points if point.kind != "expert"]
    best = [one for one in models if not any(_beats(other.found, one.found) for other in models)]
    return sorted(best, key=lambda point: (point.found.mean, -point.found.worst))


def _beats(one: RunMeasurement, other: RunMeasurement) -> bool:
    return one.mean >= other.mean and one.worst >= other.worst and (one.mean, one.worst) != (other.mean, other.worst)


def _find_recorded(session: Session, run: HistoryEntry, on: EvaluationSamples) -> RunMeasurement | None:
    """Return the measurement in the history of a run on these samples, if it has scores of every task."""
    found = run.find_measured(kind_of_scores(session), on.split or session.split, on.samples, on.seed)
    return found if found is not None and set(found.scores) == set(session.tasks) else None


def _measure(session: Session, model: ModelRef, on: EvaluationSamples, progress: Progress) -> RunMeasurement:
    """Calibrate a model, if it is a calibration, and measure it.

    Raises:
        InputError: it cannot be scored.
    """
    if model.config is not None:
        session.fit.calibrate(model, progress)
    session.measure.features(model, on, progress)
    session.measure.answer_scores(model, on)  # says why there are none
    return measure_model(session, model, on)


def _report_points(progress: Progress, done: int, total: int) -> Progress:
    """Return a progress that reports the finished points whenever work on the next one advances."""

    def report(label: str, blocks: int, of: int) -> None:
        progress(SWEEP, done, total)

    return report

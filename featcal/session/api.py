"""Define the public measurements of a suite, each a question to its session."""

from __future__ import annotations

from typing import Any, Unpack

from featcal.calibration.calibrate import CalibrationResult
from featcal.calibration.calibrate import calibrate_family as calibrate_suite
from featcal.drift.ledger import DriftLedger
from featcal.evaluation.comparison import Comparison
from featcal.evaluation.evaluate import Scores
from featcal.family.opening import Calibrated, Family
from featcal.formats.weights import Weights
from featcal.session.session import Session, ensure_session
from featcal.suite.calibration_options import CalibrationConfig
from featcal.suite.objects import SuiteObjects
from featcal.suite.schema import Suite
from featcal.suite.views import DriftKeywords, DriftOptions, EvaluationSamples
from featcal.system.errors import InputError
from featcal.system.formatting import shorten
from featcal.system.progress import Progress, silent

WHOLE_TEST = EvaluationSamples(None, "test")


def measure_drift(
    suite: Suite | Family | Session,
    model: str | Weights | Calibrated = "merged",
    *,
    device: str = "auto",
    max_memory: int | None = None,
    progress: Progress = silent,
    **options: Unpack[DriftKeywords],
) -> DriftLedger:
    """Measure the drift of a model of the suite from its experts, layer by layer and task by task.

    Args:
        suite: a session caches the result; a suite or a family does not.
        model: a name ("merged", "base", "expert:TASK", "calibrated:lam=0.1", "anchor:rho=2", "ties:scale=1"), a
            checkpoint folder or Hub id, a `CalibrationResult`, or weights.
        device: "auto", "cpu", "cuda" or "mps", for a suite; an opened one stays on its device.
        max_memory: bytes of resident memory to stay within, for a suite or a family; a session has its own.
        options: samples, split, seed, tokens, sublayers, attribution and output, as `DriftOptions` has them.

    Raises:
        InputError: the model does not fit the suite, or necessary samples, labels or heads are missing.
        NumericalError: final features are not finite.

    >>> import featcal
    >>> ledger = featcal.measure_drift(featcal.load_suite("lm-mini"), "merged", samples=8)
    >>> {task: round(one.layers[-1].relative_drift, 1) for task, one in ledger.tasks.items()}
    {'sentiment': 0.6, 'entailment': 0.7, 'correct': 0.2, 'rewrite': 0.4}
    """
    asked = DriftOptions(**options)  # before anything is opened
    session = ensure_session(suite, device, one_shot=True, max_memory=max_memory)
    return session.measure.drift(model, asked, progress)


def evaluate(
    suite: Suite | Family | Session,
    model: str | Weights | Calibrated = "merged",
    *,
    split: str = "test",
    samples: int | None = None,
    seed: int = 42,
    device: str = "auto",
    progress: Progress = silent,
) -> Scores:
    """Score a model on every task of the suite: zero-shot accuracy of pictures, generated answers of text.

    Args:
        suite, device: as in `measure_drift`.
        model: as in `measure_drift`, or "expert": every expert on its own task.
        samples: per task; None takes the whole split.

    Raises:
        InputError: there is no such split, no labels, answers or class names, or no text tower in the base.
        NumericalError: features are not finite.

    >>> import featcal
    >>> session = featcal.open_session("lm-mini")
    >>> for model in ("base", "merged", "expert"):
    ...     print(model, round(featcal.evaluate(session, model, samples=32).average, 2))
    base 0.48
    merged 0.58
    expert 0.98
    """
    session = ensure_session(suite, device, one_shot=True)
    return session.measure.scores(model, EvaluationSamples(samples, split, seed), progress)


def calibrate(
    model: Any,
    config: CalibrationConfig | None = None,
    *,
    device: str = "auto",
    progress: Progress = silent,
    **objects: Unpack[SuiteObjects],
) -> CalibrationResult:
    """Calibrate the merged model of a suite, or a given one with its base, experts and samples (Algorithm 1).

    Args:
        model: a suite or a session, or a merged model in any form that `Suite.of` takes: in memory, a reference, a
            recipe, or the result of `merge`.
        config: by default the options that the suite recommends, else the paper's for the architecture.
        device: "auto", "cpu", "cuda" or "mps", for a suite; an opened one stays on its device.
        objects: keywords of `Suite.of` besides the merged model; none with a suite, which has them.

    Raises:
        InputError: the suite, its models or its samples are not usable.
        NumericalError: the closed form has no trustworthy solution with these options.

    >>> import featcal
    >>> session = featcal.open_session("lm-mini")
    >>> calibrated = featcal.calibrate(session, featcal.CalibrationConfig(samples=8))
    >>> for model in ("merged", calibrated):
    ...     print(round(featcal.measure_drift(session, model, samples=8).macro_cosine, 2))
    0.86
    0.92
    """
    model = model.family if isinstance(model, Session) else model
    if isinstance(model, Suite | Family):
        if objects:
            raise InputError(f"calibrate: give a suite, or {', '.join(objects)} with a merged model, not both")
        return calibrate_suite(model, config, device=device, progress=progress)
    if "merged" in objects:
        raise InputError("calibrate: the merged model is the first argument; leave merged= out")
    if not {"base", "experts"} <= objects.keys():
        what = repr(model) if isinstance(model, str) else f"a {type(model).__name__}"
        raise InputError(
            f"calibrate: {shorten(what)} is not a suite; read one with featcal.load_suite, or give a merged model with "
            "base=, experts= and samples="
        )
    suite = Suite.of(**{**objects, "merged": model})
    return calibrate_suite(suite, config, device=device, progress=progress)


def compare(
    suite: Suite | Family | Session,
    a: str | Weights | Calibrated,
    b: str | Weights | Calibrated,
    *,
    on: EvaluationSamples = WHOLE_TEST,
    device: str = "auto",
    progress: Progress = silent,
) -> Comparison:
    """Compare two models on the same samples: the difference B - A, its uncertainty, and the changed answers.

    Args:
        suite, device: as in `measure_drift`.
        a, b: as `model` of `evaluate`.
        on: samples per task (None takes all), split and seed.

    Raises:
        InputError, NumericalError: a model cannot be scored; `evaluate` lists the reasons.

    >>> import featcal
    >>> on = featcal.EvaluationSamples(32, "test")
    >>> found = featcal.compare(featcal.load_suite("lm-mini"), "base", "merged", on=on)
    >>> round(found.average.difference, 2), round(found.average.low, 2), round(found.average.high, 2)
    (0.09, 0.03, 0.16)
    """
    session = ensure_session(suite, device, one_shot=True)
    return session.measure.compare(a, b, on, progress)

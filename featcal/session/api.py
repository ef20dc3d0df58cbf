"""The public measurements of a suite: one question to its session each."""

from __future__ import annotations

from typing import Unpack

from featcal.drift.ledger import DriftLedger
from featcal.evaluation.evaluate import Scores
from featcal.evaluation.paired import Comparison
from featcal.family.opening import Calibrated, Family, ensure_family
from featcal.formats.weights import Weights
from featcal.session.session import Session
from featcal.suite.schema import Suite
from featcal.suite.views import DriftKeywords, DriftOptions, View
from featcal.system.errors import InputError
from featcal.system.progress import Progress, silent

WHOLE_TEST = View(None, "test")


def measure_drift(
    suite: Suite | Family | Session,
    model: str | Weights | Calibrated = "merged",
    *,
    device: str = "auto",
    max_memory: int | None = None,
    progress: Progress = silent,
    **options: Unpack[DriftKeywords],
) -> DriftLedger:
    """Decompose the drift of a model of the suite, layer by layer and task by task.

    Args:
        suite: a session keeps the result; of a suite or a family nothing stays.
        model: a name ("merged", "base", "expert:TASK", "calibrated:lam=0.1", "anchor:rho=2", "ties:scale=1"), a
            checkpoint folder or Hub id, a `CalibrationResult`, or weights.
        device: "auto", "cpu" or "cuda", for a suite; what is open stays where it is.
        max_memory: bytes of resident memory to stay within, for a suite or a family; a session has its own.
        options: samples, split, seed, tokens, sublayers, attribution and output, as `DriftOptions` has them.

    Raises:
        InputError, NumericalError: as `Measurements.drift`.
    """
    asked = DriftOptions(**options)  # before anything is opened
    session = _session(suite, device, max_memory)
    return session.measure.drift(session.resolve(model), asked, progress)


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
        InputError, NumericalError: as `Measurements.scores`.
    """
    session = _session(suite, device)
    return session.measure.scores(session.resolve(model), View(samples, split, seed), progress)


def compare(
    suite: Suite | Family | Session,
    a: str | Weights | Calibrated,
    b: str | Weights | Calibrated,
    *,
    view: View = WHOLE_TEST,
    device: str = "auto",
    progress: Progress = silent,
) -> Comparison:
    """Score two models on the same samples: how much better B is than A, how sure that is, which samples turned.

    Args:
        suite, device: as in `measure_drift`.
        a, b: as `model` of `evaluate`.
        view: samples per task (None takes all), split and seed.

    Raises:
        InputError, NumericalError: as `Measurements.scores`.
    """
    session = _session(suite, device)
    return session.measure.compare(session.resolve(a), session.resolve(b), view, progress)


def _session(suite: Suite | Family | Session, device: str, max_memory: int | None = None) -> Session:
    """The session itself, or one for a single measurement."""
    if isinstance(suite, Session):
        if max_memory is not None:
            raise InputError("max_memory: an open session has a limit of its own; open it with one")
        return suite
    return Session(ensure_family(suite, device), one_shot=True, max_memory=max_memory)

"""Name tables and pictures by their measurement, and add it to the tables themselves."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import pandas as pd

from app import opening
from app.selection import file_words
from featcal.evaluation.evaluate import Scores
from featcal.figures import tables
from featcal.figures.commands import ChartSource
from featcal.session.model_ref import ModelRef
from featcal.session.session import Session
from featcal.suite.views import DriftOptions, EvaluationSamples
from featcal.system.formatting import how_many

LONGEST = 40
"""Largest number of characters of the calibrated model in the name of a file."""
USUAL = ("merged", "base", "expert")
"""Models that every suite has, which a file's name leaves out."""


@dataclass(frozen=True)
class Origin:
    """The suite, samples and models of some numbers.

    Args:
        counts: number of measured samples of the split, per task.
        models: full names of the models by what tables call them (`featcal.session.model_ref.ModelRef.name`).
        made: the part of a file's name that tells the models from others of the suite; "" for the merged one alone.
        on: the requested samples; for a ledger, also the measured parts of the drift.
        task: the task of the numbers; None for all tasks.
    """

    suite: str
    split: str
    counts: Mapping[str, int]
    models: Mapping[str, str] = field(default_factory=dict)
    made: str = ""
    on: EvaluationSamples = field(default_factory=EvaluationSamples)
    task: str | None = None

    @property
    def samples(self) -> str:
        """Return the samples per task, as "64" or "40 to 64"; "" if none were needed."""
        return how_many(self.counts.values()) if self.counts else ""

    def with_task(self, task: str) -> Origin:
        """Return the origin of the numbers of one task."""
        return replace(self, counts={task: self.counts[task]}, task=task)


@dataclass(frozen=True)
class Numbers:
    """The table of a chart.

    Args:
        what: short and in words, such as "drift per layer"; part of the file's name.
        units: of the columns.
        digits: shown on the screen; the file has all of them.
        kind: of the measurement (`featcal.figures.commands.KINDS`); "" if no command gives these numbers.
        layer: of the features; None for all layers.
        sample: the shown one; None for all samples.
    """

    what: str
    frame: pd.DataFrame
    units: str
    origin: Origin
    digits: int = 3
    kind: str = ""
    layer: str | None = None
    sample: int | None = None

    def measurement(self, reference: str) -> ChartSource | None:
        """Return the measurement behind the numbers, for the suite with this reference; None if no command gives
        them."""
        if not self.kind:
            return None
        origin, on = self.origin, self.origin.on
        # Drift is measured from the experts, so they have none.
        every = self.kind in ("scores", "answers", "differences")
        models = tuple(dict.fromkeys(one for one in origin.models.values() if every or one != "expert"))
        drawn = EvaluationSamples(on.samples, origin.split, on.seed)
        measured = ChartSource(
            self.kind, reference, models, drawn, task=origin.task, layer=self.layer, sample=self.sample
        )
        return replace(measured, tokens=on.tokens, sublayers=on.sublayers) if isinstance(on, DriftOptions) else measured

    @property
    def name(self) -> str:
        """Return the file name without its ending: content, suite, model, samples."""
        return download_name(self.what, self.origin)

    def csv(self) -> bytes:
        """Write the table as CSV with columns for suite, split, samples per task, units, and the full names of its
        models: the row's own if a row is about a single model, else all."""
        origin, frame = self.origin, self.frame
        counts = origin.counts
        per_task = [counts.get(task, origin.samples) for task in frame["task"]] if "task" in frame else origin.samples
        table = frame.assign(suite=origin.suite, split=origin.split if counts else "", samples_per_task=per_task)
        table = table.assign(units=self.units)
        if "model" in frame:
            table["model_name"] = [origin.models.get(model, "") for model in frame["model"]]
        else:
            table["models"] = "; ".join(dict.fromkeys(origin.models.values()))
        return bytes(table.to_csv(index=False).encode())


def download_name(what: str, origin: Origin) -> str:
    """Make a file name from words and origin, in letters, digits, hyphens and full stops.

    >>> download_name("drift per layer", Origin("a b/c", "validation", {"x": 64, "y": 40}))
    'drift-per-layer-a-b-c-40-to-64-validation'
    >>> download_name("margins", Origin("mini", "test", {"x": 64}, made="lam0.05-n8"))
    'margins-mini-lam0.05-n8-64-test'
    """
    parts = [what, origin.suite, origin.made, origin.samples, origin.split if origin.samples else None]
    return "-".join(re.sub(r"[^\w.]+", "-", part).strip("-.") for part in parts if part)


def sample_origin(
    session: Session, on: EvaluationSamples, models: Mapping[str, ModelRef], over: str = tables.ALL_TASKS
) -> Origin:
    """Return the origin of features measured on a view; a task may have fewer samples than requested.

    Args:
        over: a task, or all of them.
    """
    origin = _origin(session, on.split or session.split, session.counts(on), models, on)
    return origin if over == tables.ALL_TASKS else origin.with_task(over)


def score_origin(session: Session, scores: Scores, models: Mapping[str, ModelRef]) -> Origin:
    """Return the origin (suite, samples and models) of a table of scores."""
    counts = {task: one.n for task, one in scores.tasks.items()}
    return _origin(session, scores.split, counts, models, EvaluationSamples(None, scores.split))


def _origin(
    session: Session, split: str, counts: Mapping[str, int], models: Mapping[str, ModelRef], on: EvaluationSamples
) -> Origin:
    names = {str(shown): model.name for shown, model in models.items()}
    made = "-".join(model_words(shown, model, session) for shown, model in models.items() if model.name not in USUAL)
    return Origin(session.family.suite.name, split, counts, names, made, on)


def samples_of_calibration(model: ModelRef) -> EvaluationSamples:
    """Return the calibration samples of a calibrated model."""
    config, _ = model.require_calibration()
    return EvaluationSamples(config.samples, "calibration", config.seed)


def model_words(shown: str, model: ModelRef, session: Session) -> str:
    """Return words for a model in the name of a file: for a calibration its options, and its start if that is not the
    suite's own merge."""
    if model.config is None or model.of is None:
        return shown
    words = file_words(model.config, opening.defaults(session))
    return words if model.of.kind == "merged" else f"{Path(model.of.name).name[:LONGEST]}-{words}"

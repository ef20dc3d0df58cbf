"""Tables and pictures that say, in their name and in themselves, what they were measured on."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import pandas as pd

from app import opening
from app.selection import made_with
from featcal.calibration.config import CalibrationConfig
from featcal.evaluation.evaluate import Scores
from featcal.figures import tables
from featcal.session import Session
from featcal.views import View


@dataclass(frozen=True)
class Origin:
    """The suite, samples and calibrated model that numbers are about.

    Args:
        counts: how many samples of the split were measured, per task.
        config: None where no calibrated model takes part.
        made: the part of a file's name that tells the calibrated model from others of the suite; "" without one.
    """

    suite: str
    split: str
    counts: Mapping[str, int]
    config: CalibrationConfig | None = None
    made: str = ""

    @property
    def samples(self) -> str:
        """How many samples of every task, as "64", or "40 to 64" where tasks differ; "" where none were needed."""
        return tables.how_many(self.counts.values()) if self.counts else ""

    def of_task(self, task: str) -> Origin:
        """The same for numbers of one task."""
        return replace(self, counts={task: self.counts[task]})


@dataclass(frozen=True)
class Numbers:
    """The table of a chart.

    Args:
        what: short and in words, such as "drift per layer"; part of the file's name.
        units: of its columns.
        digits: shown on the screen; the file has all of them.
    """

    what: str
    frame: pd.DataFrame
    units: str
    origin: Origin
    digits: int = 3

    @property
    def name(self) -> str:
        """File name without its ending: what, suite, model, samples."""
        return file_name(self.what, self.origin)

    def csv(self) -> bytes:
        """The table with columns for suite, split, samples per task, units and the calibration's settings.

        A row that says of which model it is has settings only if that is the calibrated one.
        """
        origin, frame = self.origin, self.frame
        counts = origin.counts
        per_task = [counts.get(task, origin.samples) for task in frame["task"]] if "task" in frame else origin.samples
        said = frame.assign(suite=origin.suite, split=origin.split if counts else "", samples_per_task=per_task)
        said = said.assign(units=self.units)
        if origin.config is not None:
            of_it = frame["model"] == "calibrated" if "model" in frame else pd.Series(True, index=frame.index)
            for name, value in origin.config.settings().items():
                if name == "batch_size":
                    continue
                column = "calibration_samples" if name == "samples" else name
                said[column] = pd.Series(value, index=frame.index, dtype=object).where(of_it, "")
        return bytes(said.to_csv(index=False).encode())


def file_name(what: str, origin: Origin) -> str:
    """
    >>> file_name("drift per layer", Origin("a b/c", "validation", {"x": 64, "y": 40}))
    'drift-per-layer-a-b-c-40-to-64-validation'
    >>> file_name("margins", Origin("mini", "test", {"x": 64}, CalibrationConfig(samples=8), "lam0.05-n8"))
    'margins-mini-lam0.05-n8-64-test'
    """
    parts = [what, origin.suite, origin.made, origin.samples, origin.split if origin.samples else None]
    return "-".join(re.sub(r"[^\w.]+", "-", part).strip("-.") for part in parts if part)


def of_samples(session: Session, on: View, config: CalibrationConfig | None) -> Origin:
    """What features were measured on; tasks can have fewer samples than were asked for."""
    return Origin(
        session.family.suite.name, on.split or session.split, session.counts(on), config, _made(session, config)
    )


def of_scores(session: Session, scores: Scores, config: CalibrationConfig | None) -> Origin:
    """What scores were measured on."""
    counts = {task: one.n for task, one in scores.tasks.items()}
    return Origin(scores.suite, scores.split, counts, config, _made(session, config))


def _made(session: Session, config: CalibrationConfig | None) -> str:
    return made_with(config, opening.defaults(session)) if config else ""

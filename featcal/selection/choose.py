"""Choose lam, rho, alpha, beta and recipe of a calibration without labels."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from featcal.calibration.calibrate import CalibrationResult, config_for
from featcal.calibration.config import IDLE, CalibrationConfig, settled
from featcal.errors import FeatcalError, InputError, NumericalError
from featcal.family import Family, as_family
from featcal.formats.weights import Weights, raw_bytes
from featcal.model_ids import calibrate_command, spelled
from featcal.models.adapter import Adapter
from featcal.progress import Progress, silent
from featcal.resources import cache_folder
from featcal.selection.candidates import CHOSEN, options_of, planned
from featcal.selection.held_out import HeldOut, Margin, Score, calibration_samples, margin
from featcal.selection.study import SELECT, Candidate, Study, opened
from featcal.session import Session
from featcal.suite import Suite
from featcal.tasks.sources import Samples
from featcal.versions import all_versions

FEWEST = 16
"""Samples per task below which held-out ones say too little."""
BUDGET = 24
"""Candidates, each of them one calibration."""


@dataclass(frozen=True)
class Selection:
    """The options that were chosen, and everything that speaks for them."""

    family: Family
    asked: CalibrationConfig
    """What the choice is held against."""
    config: CalibrationConfig
    """What was chosen: of all calibration samples."""
    candidates: tuple[Candidate, ...]
    """The best first; those that failed last."""
    margin: Margin | None
    """From what was asked for to what was chosen. The choice was made on these samples, so it flatters. None where
    either was not scored."""
    held_out: Mapping[str, tuple[int, ...]]
    """By task: positions, in the source of the calibration samples, of what was held out."""
    samples: Mapping[str, int]
    """By task: calibration samples that were read."""
    notes: tuple[str, ...]
    """What else should be known: that it cannot tell, and why."""
    seconds: float
    """Of all candidates, those computed earlier or by other processes too, and of the calibration that was chosen."""
    calibrated: CalibrationResult | None
    """The choice calibrated on all samples; None where nothing could be told."""

    @property
    def criterion(self) -> str | None:
        """What candidates were scored by, one of `held_out.CRITERIA`; None where none was scored."""
        return next((one.score.criterion for one in self.candidates if one.score is not None), None)

    @property
    def calibrations(self) -> int:
        """Candidates, and the one that was made of all samples."""
        return len(self.candidates) + (self.calibrated is not None)

    def command(self, suite: str | None = None, out: str = "calibrated") -> str:
        """The command that makes the model that was chosen.

        Args:
            suite: how it is to call the suite; left out, by its name.
        """
        return calibrate_command(suite or self.family.suite.name, self.config, config_for(self.family), out)

    def to_json(self, suite: str | None = None) -> dict[str, Any]:
        """The public document of `featcal select --json`; `suite` as in `command`."""
        return {
            "suite": self.family.suite.name,
            "chosen": options_of(self.config),
            "defaults": options_of(self.asked),
            "model": spelled(self.config, self.family),
            "command": self.command(suite),
            "criterion": self.criterion,
            "margin": self.margin and {**asdict(self.margin), "difference": self.margin.difference},
            "candidates": [_candidate_json(one) for one in self.candidates],
            "calibrations": self.calibrations,
            "seconds": self.seconds,
            "read": {"split": "calibration", "seed": self.config.seed, "samples": dict(self.samples)},
            "held_out": {task: list(indices) for task, indices in self.held_out.items()},
            "labels_used": False,
            "notes": list(self.notes),
        }


def select(
    suite: Suite | Family | Session,
    config: CalibrationConfig | None = None,
    *,
    budget: int = BUDGET,
    study: Path | None = None,
    device: str = "auto",
    progress: Progress = silent,
) -> Selection:
    """Choose lam, rho, alpha, beta and recipe by the drift, on held-out calibration samples, of what is fitted on the
    others. Nothing but calibration samples is read, and no label is used.

    Args:
        suite: a session keeps the chosen model.
        config: what the choice is held against; its samples, seed, switches and parts are those of all candidates. Left
            out, the suite's own, else the paper's.
        budget: candidates, at least 2: the defaults of both recipes come first. Those in the study count.
        study: the file of the study, from which a choice that was ended goes on; several processes may work on one.
            Left out, one in the user's cache folder.
        device: "auto", "cpu" or "cuda", for a suite.
        progress: told the candidates that are done.

    Raises:
        InputError: a budget below 2, a study that cannot be used, or as `calibrate`.
        NumericalError: no candidate could be calibrated.
    """
    if budget < 2:
        raise InputError(f"budget is {budget}; at least 2 candidates are needed, the defaults of both recipes")
    session = suite if isinstance(suite, Session) else Session(as_family(suite, device))
    family = session.family
    asked = settled(config or config_for(family), family.adapter, family.suite.tasks)
    drawn = calibration_samples(session, asked)
    samples = {task: len(one) for task, one in drawn.items()}
    few = [f"'{task}' ({count})" for task, count in samples.items() if count < FEWEST]
    if few:
        note = f"fewer than {FEWEST} calibration samples of {', '.join(few)}: too few to tell; defaults are kept"
        return Selection(family, asked, asked, (), None, {}, samples, (note,), 0.0, None)
    held = HeldOut(session, asked, drawn)
    name = _identity(family, asked, drawn, held)
    with opened(study or cache_folder() / "studies" / f"{name}.sqlite", name, asked.seed) as kept:
        _work(kept, held, asked, planned(family, asked)[:budget], budget, progress)
        candidates = tuple(sorted(kept.found(), key=_rank))
    best = candidates[0]
    if best.score is None:
        raise NumericalError("; ".join(f"{_said(one)}: {one.failure}" for one in candidates))
    chosen, indices = replace(asked, **best.options), {task: one.indices for task, one in held.samples.items()}
    notes = tuple(filter(None, (held.note, _ANSWERS if session.is_text else "")))
    del held  # the room is for what experts compute on all samples
    started = time.perf_counter()
    calibrated = session.calibrated(chosen, progress)
    seconds = sum(one.seconds for one in candidates) + time.perf_counter() - started
    gained = _margin(candidates, options_of(asked), best.score)
    return Selection(family, asked, chosen, candidates, gained, indices, samples, notes, seconds, calibrated)


_ANSWERS = (
    "answers of the calibration samples are tokens that the models read, as in every calibration; none is compared with"
)


def _work(
    study: Study,
    held: HeldOut,
    asked: CalibrationConfig,
    first: Sequence[CalibrationConfig],
    budget: int,
    progress: Progress,
) -> None:
    """Take candidates until all are done."""
    study.plan([options_of(config) for config in first])
    while True:
        with study.taken(budget, progress) as taken:
            if taken is None:
                return
            trial, options = taken
            done, started = min(len(study.found()), budget), time.perf_counter()

            def report(label: str, blocks: int, of: int, done: int = done) -> None:
                progress(SELECT, done, budget)

            found: Score | FeatcalError
            try:
                found = held.score(held.calibrated(replace(asked, **options), report), report)
            except FeatcalError as error:  # these options cannot be calibrated with: the table says so
                found = error
            study.put(trial, time.perf_counter() - started, found)


def _rank(candidate: Candidate) -> float:
    return float("inf") if candidate.score is None else candidate.score.value


def _margin(candidates: Sequence[Candidate], asked: Mapping[str, Any], best: Score) -> Margin | None:
    score = next((one.score for one in candidates if one.options == asked), None)
    return None if score is None else margin(score, best)


def _said(candidate: Candidate) -> str:
    return ", ".join(f"{name} {value}" for name, value in candidate.options.items())


def _candidate_json(candidate: Candidate) -> dict[str, Any]:
    score = candidate.score
    return {
        **candidate.options,
        "score": None if score is None else score.value,
        "failure": candidate.failure or None,
        "seconds": candidate.seconds,
    }


def _identity(family: Family, asked: CalibrationConfig, drawn: Mapping[str, Samples], held: HeldOut) -> str:
    """Tells studies apart: of the same models, samples, options and versions candidates have the same scores."""
    models = [family.base, family.merged, *(family.experts[task] for task in drawn)]
    said = {
        "options": {name: value for name, value in asdict(asked).items() if name not in (*CHOSEN, *IDLE)},
        "models": [_digest(model, family.adapter) for model in models],
        "samples": {task: [one.digest, held.measured[task].digest] for task, one in held.fitted.items()},
        "classes": {task: [one.class_names, family.suite.tasks[task].templates] for task, one in drawn.items()},
        "criterion": held.criterion,
        "versions": all_versions(),
    }
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:32]


def _digest(model: Weights, adapter: Adapter) -> str:
    """SHA-256 of every tensor that is computed with, wherever it lies."""
    digest = hashlib.sha256()
    for name in (*adapter.tower, *adapter.scoring):
        if name in model.info:
            digest.update(name.encode())
            digest.update(raw_bytes(model.read([name])[name]))
    return digest.hexdigest()

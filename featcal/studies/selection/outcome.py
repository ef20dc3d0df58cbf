"""Define the result of a choice: candidates, whether any start is better than every repair, and the chosen model."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from featcal.calibration.calibrate import CalibrationResult, config_for
from featcal.calibration.config import resolve_recipe
from featcal.export.merge import recipe_for
from featcal.family.opening import Family
from featcal.studies.selection.candidates import MERGED, CandidateModel, candidate_options
from featcal.studies.selection.held_out_samples import FOLDS
from featcal.studies.selection.judge import Margin, Score, margin
from featcal.suite.calibration_options import CHOSEN, NUMBERS, OWN, CalibrationConfig
from featcal.suite.command_lines import calibrate_line, shared_options
from featcal.suite.facts import parts_in_memory
from featcal.suite.methods import is_baseline, is_merger
from featcal.suite.name_grammar import model_name, reference_in
from featcal.suite.recipe import MergeRecipe
from featcal.system.drawing import Drawable
from featcal.system.paths import from_folder, local_path


@dataclass(frozen=True)
class Candidate:
    """A candidate, and its results on all folds."""

    model: str
    """Name of the candidate, by which every command makes it from all calibration samples."""
    start: str
    """Name of the model to calibrate; "merged" is the suite's own."""
    config: CalibrationConfig | None
    """None for the start without calibration."""
    score: Score | None
    """None if it failed on a fold."""
    margin: Margin | None
    """Margin from the default to this candidate; None if either has no score."""
    failure: str
    """Reason of a failure, or ""."""
    seconds: float
    """Duration of fitting and judging, all folds together."""


@dataclass(frozen=True)
class SelectionVerdict:
    """Comparison of the best start with the best repair."""

    start: Candidate
    repair: Candidate
    margin: Margin
    """Margin from the repair to the start."""

    @property
    def start_wins(self) -> bool:
        """Say whether the start is better beyond the interval."""
        return self.margin.low > 0

    @property
    def sentence(self) -> str:
        """Return the answer as one sentence."""
        one, start, repair = self.margin, self.start.model, self.repair.model
        by = f"({one.difference:+.4f} [{one.low:+.4f}, {one.high:+.4f}])"
        if self.start_wins:
            return f"a start is better than any repair: {start} as it is is above the best of them, {repair} {by}"
        if one.is_within_noise:
            return f"start and repair cannot be told apart: {start} as it is against the best repair, {repair} {by}"
        return f"no start is better than its repair: the best one, {start}, is below {repair} {by}"


@dataclass(frozen=True, repr=False)
class Selection(Drawable):
    """A choice, with its evidence.

    >>> import featcal
    >>> chosen = featcal.select(featcal.open_session("lm-mini"), featcal.CalibrationConfig(samples=4))
    >>> chosen.start, chosen.config.recipe, chosen.notes[0].partition(": ")[2]
    ('merged', 'informed', 'too few to tell; the default is kept')
    """

    family: Family
    default: CalibrationConfig
    """Options with which all are compared, and which stay within noise: "informed" with errors weighed by decisions, or
    at its defaults where a model has no decisions or a task fewer than 16 samples."""
    start: str
    """Name of the chosen start, to calibrate or to leave as it is; "merged" is the suite's own."""
    config: CalibrationConfig | None
    """Chosen options, for all calibration samples. None if the start is better as it is."""
    candidates: tuple[Candidate, ...]
    """All candidates, the best first, those that failed last."""
    margin: Margin | None
    """Margin from the default to the chosen candidate; 0 if they are the same. It is optimistic, since the choice
    was made on these samples. None if either was not scored.
    """
    folds: Mapping[str, tuple[tuple[int, ...], ...]]
    """Positions of the held-out samples in the source of the calibration samples, by task and fold."""
    samples: Mapping[str, int]
    """Number of calibration samples that were read, by task."""
    notes: tuple[str, ...]
    """Warnings, such as that no candidate can be judged, and why."""
    seconds: float
    """Seconds of all candidates, including those computed earlier or by other processes,
    and of the chosen calibration.
    """
    calibrated: CalibrationResult | None
    """The choice calibrated on all samples; None if no candidate could be judged, or if a start was chosen."""
    of: str = MERGED
    """Name of the merge on which all recipes were tried; "merged" is the suite's own."""

    @property
    def model(self) -> str:
        """Return the name of the model that was chosen."""
        return CandidateModel(self.start, self.config).name(self.family)

    @property
    def criterion(self) -> str | None:
        """Return the criterion of the scores, one of `judge.CRITERIA`; None if there are no scores."""
        return next((one.score.criterion for one in self.candidates if one.score is not None), None)

    @property
    def calibrations(self) -> int:
        """Count the calibrations: those on three quarters of the samples, and the one on all of them."""
        fitted = sum(one.config is not None for one in self.candidates)
        return FOLDS * fitted + (self.calibrated is not None)

    @property
    def verdict(self) -> SelectionVerdict | None:
        """Compare the best start with the best repair; None if either was not scored."""
        scored = [one for one in self.candidates if one.score is not None]
        start = next((one for one in scored if one.config is None), None)
        repair = next((one for one in scored if one.config is not None), None)
        if start is None or repair is None or start.score is None or repair.score is None:
            return None
        return SelectionVerdict(start, repair, margin(repair.score, start.score))

    def command(self, suite: str | None = None, out: str = "calibrated") -> str:
        """Return the command that makes the chosen model; for a suite in memory, which no command can name, the Python
        call on the variable `suite`.

        Args:
            suite: word for the suite in the command; by default its name.
        """
        if any(parts_in_memory(self.family.suite)):
            return self._call(out)
        name = suite or self.family.suite.name
        if self.config is not None:
            return calibrate_line(name, self.config, config_for(self.family), out, self.start)
        merged = self.family.suite.merged
        reference = reference_in(self.start)
        if self.start == MERGED and not isinstance(merged, MergeRecipe):
            reference = str(self.family.suite.root / merged) if (self.family.suite.root / merged).exists() else merged
        if reference == self.start or (reference and self.start == MERGED):
            return shlex.join(["featcal", "export", reference, "--out", out])
        method = [] if self.start == MERGED else ["--method", self.start]
        return shlex.join(["featcal", "merge", name, *method, "--out", out])

    def _call(self, out: str) -> str:
        if self.config is not None:
            return f"featcal.open_session(suite).fit.calibrate({self.model!r}).save({out!r})"
        if is_baseline(model_name(self.start).kind):
            return f"featcal.open_session(suite).fit.baseline({self.start!r}).save({out!r})"
        if self.start == MERGED:
            merges = isinstance(self.family.suite.merged, MergeRecipe)
            return f"featcal.merge(suite).save({out!r})" if merges else "# the merged model as it was given"
        return f"featcal.merge(suite, {self.start!r}).save({out!r})"

    def suite_lines(self) -> str | None:
        """Return the sections of a suite file for the chosen merge and calibration; None if no file can hold them: for
        a suite in memory, and for a start that is neither a merger's nor a checkpoint."""
        family, sections = self.family, dict[str, Any]()
        if any(parts_in_memory(family.suite)):
            return None
        if self.start != MERGED:
            is_checkpoint = reference_in(self.start) == self.start  # in "svc@FOLDER" it is what the method works on
            if not is_checkpoint and not is_merger(model_name(self.start).kind):
                return None
            recipe = None if is_checkpoint else recipe_for(family.suite, self.start).model_dump()
            sections["merged"] = recipe or self._reference()
        if self.config is not None:
            alone = resolve_recipe(family.adapter, family.suite.tasks, {"recipe": self.config.recipe})
            numbers = {name: getattr(self.config, name) for name in ("recipe", *NUMBERS[self.config.recipe])}
            sections["calibration"] = numbers | shared_options(self.config, alone)
        return yaml.safe_dump(sections, sort_keys=False) if sections else None

    def _reference(self) -> str:
        """Return the start, a checkpoint, as a suite file names it: a folder from the file's own folder."""
        folder = local_path(self.start, Path.cwd(), "start")
        return from_folder(folder.resolve(), self.family.suite.root.resolve()) if folder.is_dir() else self.start

    def to_json(self, suite: str | None = None) -> dict[str, Any]:
        """Return the public document of `featcal select --json`; `suite` as in `command`."""
        verdict = self.verdict
        return {
            "suite": self.family.suite.name,
            "chosen": None if self.config is None else candidate_options(self.config) | _switches(self.config),
            "of": self.of,
            "start": self.start,
            "defaults": candidate_options(self.default) | _switches(self.default),
            "model": self.model,
            "command": self.command(suite),
            "suite_lines": self.suite_lines(),
            "criterion": self.criterion,
            "margin": _margin_json(self.margin),
            "start_wins": verdict and verdict.start_wins,
            "verdict": verdict and verdict.sentence,
            "candidates": [_candidate_json(one) for one in self.candidates],
            "calibrations": self.calibrations,
            "seconds": self.seconds,
            "read": {"split": "calibration", "seed": self.default.seed, "samples": dict(self.samples)},
            "folds": {task: [list(one) for one in dealt] for task, dealt in self.folds.items()},
            "labels_used": False,
            "notes": list(self.notes),
        }


def _switches(config: CalibrationConfig) -> dict[str, Any]:
    """Return the switches of some recipes that are on, which no other recipe takes over."""
    values = {name: getattr(config, name) for name in OWN if name not in CHOSEN}
    return {name: value for name, value in values.items() if value != getattr(CalibrationConfig, name)}


def _margin_json(one: Margin | None) -> dict[str, Any] | None:
    return None if one is None else {**asdict(one), "difference": one.difference}


def _candidate_json(candidate: Candidate) -> dict[str, Any]:
    options = dict.fromkeys(CHOSEN) if candidate.config is None else candidate_options(candidate.config)
    return {
        "model": candidate.model,
        "start": candidate.start,
        **options,
        "score": None if candidate.score is None else candidate.score.value,
        "margin": _margin_json(candidate.margin),
        "failure": candidate.failure or None,
        "seconds": candidate.seconds,
    }

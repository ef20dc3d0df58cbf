"""Divide calibration samples into folds: candidates are fitted on all except one of them and judged on that one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from featcal.calibration.calibrate import calibrate_family
from featcal.calibration.config import select_tasks
from featcal.family.opening import ensure_family
from featcal.models.lane import ExpertPass, WalkCache
from featcal.samples.sources import Samples
from featcal.session.session import Session
from featcal.studies.selection.candidates import DECISIONS, CandidateModel
from featcal.studies.selection.judge import Criterion, Judge
from featcal.suite.calibration_options import INFORMED, CalibrationConfig
from featcal.suite.views import EvaluationSamples
from featcal.system.fingerprints import seed_from_text
from featcal.system.progress import Progress, silent

FOLDS = 4
FEWEST_WEIGHED = 16
"""Smallest number of samples per task with which errors weighed by decisions are the default."""


def folds(count: int, seed: int, task: str) -> list[list[int]]:
    """Divide positions into folds of nearly equal size, each in rising order, depending only on seed and task. Whole
    samples are held out, never tokens.

    >>> [len(one) for one in folds(10, 42, "digits")]
    [3, 3, 2, 2]
    """
    drawn = torch.Generator().manual_seed(seed_from_text(f"{seed}:{task}:folds"))
    order = torch.randperm(count, generator=drawn).tolist()
    return [sorted(order[number::FOLDS]) for number in range(FOLDS)]


def draw_unlabelled_samples(session: Session, config: CalibrationConfig) -> dict[str, Samples]:
    """Draw the calibration samples of every task that takes part, only their inputs: no labels, no right answers."""
    drawn = session.samples(EvaluationSamples(config.samples, "calibration", config.seed))
    return {task: _take(one, range(len(one))) for task, one in select_tasks(config, drawn).items()}


@dataclass(frozen=True)
class SelectionProblem:
    """A selection problem: the candidates to compare, and the samples."""

    session: Session
    asked: CalibrationConfig
    """Samples, seed, switches, batch size, precision and parts that apply to all candidates."""
    drawn: Mapping[str, Samples]
    """Drawn calibration samples; a task needs at least `FOLDS`."""
    plan: Sequence[CandidateModel]
    """The candidates, in the order of `plan_candidates`."""
    criterion: Criterion

    @cached_property
    def names(self) -> list[str]:
        """Return the names of the candidates."""
        return [tried.name(self.session.family) for tried in self.plan]

    @property
    def standing(self) -> list[int]:
        """Return the numbers of the candidates that stay within noise, if they have a score: first the recipe with
        decisions, which was above the plain one wherever a task had 16 samples or more, then the plain one."""
        first, fewest = self.plan[0], min(map(len, self.drawn.values()))
        if first.config is None or first.config.recipe != INFORMED or fewest < FEWEST_WEIGHED:
            return [0]
        weighed = CandidateModel(first.start, replace(first.config, decisions=DECISIONS))
        return [*(number for number, one in enumerate(self.plan) if one == weighed), 0]

    @property
    def positions(self) -> dict[str, tuple[tuple[int, ...], ...]]:
        """Return, by task and fold, the positions of the held-out samples in the source."""
        return {
            task: tuple(tuple(one.indices[at] for at in fold) for fold in folds(len(one), self.asked.seed, task))
            for task, one in self.drawn.items()
        }


class Fold:
    """One fold held out: the experts' activations on the others, and their decisions on it, cached for every candidate.

    Args:
        number: of the fold, from 0 on.
    """

    def __init__(self, contest: SelectionProblem, number: int) -> None:
        self._session, config = contest.session, contest.asked
        self._precision, family, drawn = config.precision, contest.session.family, contest.drawn
        dealt = {task: folds(len(one), config.seed, task) for task, one in drawn.items()}
        room, fast = WalkCache.from_device(family.compute.device), ensure_family(family, precision=config.precision)
        self.fitted: dict[str, ExpertPass] = {}
        for task, own in dealt.items():
            rest = sorted(position for other, one in enumerate(own) if other != number for position in one)
            whole, copies = drawn[task], range(1 + config.augment)
            if config.augment:  # varied copies stand after all pictures, and what is held out has none
                whole = family.samples(task, "calibration", config.samples, config.seed, copies=config.augment)
            several = [copy * len(drawn[task]) + position for copy in copies for position in rest]
            self.fitted[task] = fast.expert_pass(_take(whole, several), config.batch_size, room, in_order=False)
        self.held = {task: _take(drawn[task], own[number]) for task, own in dealt.items()}
        """Held-out samples, by task."""
        self._judge = Judge(family, self.held, contest.criterion)

    def values(self, tried: CandidateModel, progress: Progress = silent) -> dict[str, tuple[float, ...]]:
        """Fit a candidate on the other folds and return its nearness to the experts, by task and held-out sample.

        Raises:
            InputError, NumericalError: the start has maps or heads of its own, or cannot be calibrated.
        """
        family = self._session.fit.family_with(tried.start)
        if tried.config is None:
            return self._judge.values(family.merged)
        fast = ensure_family(family, precision=self._precision)
        return self._judge.values(calibrate_family(fast, tried.config, experts=self.fitted, progress=progress).weights)


def _take(drawn: Samples, positions: range | list[int]) -> Samples:
    """Select some of the samples, only their inputs."""
    chosen = list(positions)
    inputs = {name: tensor[chosen] for name, tensor in drawn.inputs.items()}
    indices = tuple(drawn.indices[position] for position in chosen)
    bare = replace(drawn, labels=None, images=None, texts=None, targets=None, second=None)
    return replace(bare, inputs=inputs, indices=indices, total=len(indices))

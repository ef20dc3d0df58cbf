"""Calibration samples that are held out, and how far a model is from the experts on them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch

from featcal.calibration.calibrate import calibrate, taking_part
from featcal.calibration.config import CalibrationConfig
from featcal.calibration.moments import FirstBlock
from featcal.drift.decomposition import follow
from featcal.drift.ledger import TaskFeatures
from featcal.drift.output import divergence
from featcal.errors import InputError
from featcal.evaluation.judges import pairs_of_heads
from featcal.evaluation.paired import DRAWS, SEED, drawn_ratios, generator, interval
from featcal.family import as_family
from featcal.formats.weights import Weights
from featcal.models.lane import ExpertPass, Kept
from featcal.models.model import Head
from featcal.progress import Progress, silent
from featcal.session import BATCH_SIZE, Session
from featcal.tasks.sources import Samples
from featcal.views import View

SHARE = 8
"""One sample in so many is held out."""
DRIFT, KL = CRITERIA = ("drift", "kl")
"""Final relative drift, or Kullback-Leibler divergence of a model's class or token probabilities from the expert's."""
ENOUGH_FOR_KL = 64
"""Held-out samples per task from which on candidates are told apart by `KL`; probabilities need more of them."""
Heads = Mapping[str, tuple[Head, Head]]


@dataclass(frozen=True)
class Score:
    """How far a model is from the experts, sample by sample; lower is better."""

    criterion: str
    distances: Mapping[str, tuple[float, ...]]
    """By task and held-out sample: the final drift ||h_model - h_expert||, or the divergence in nats."""
    sizes: Mapping[str, tuple[float, ...]]
    """By task: ||h_expert||, or 1."""

    @property
    def value(self) -> float:
        """Mean over tasks of a task's mean distance over its mean size."""
        return float(np.mean([np.sum(self.distances[task]) / np.sum(self.sizes[task]) for task in self.distances]))


@dataclass(frozen=True)
class Margin:
    """Score of B minus score of A on the same held-out samples; below 0, B is better."""

    a: float
    b: float
    low: float
    """2.5th percentile of the difference over bootstrap draws, within tasks (`evaluation.paired`)."""
    high: float
    """97.5th percentile."""
    n: int
    """Samples of all tasks."""

    @property
    def difference(self) -> float:
        return self.b - self.a

    @property
    def within_noise(self) -> bool:
        return self.low <= 0 <= self.high


def margin(a: Score, b: Score, draws: int = DRAWS, seed: int = SEED) -> Margin:
    """How much better B is than A, with a paired interval: both are scored on the same draws."""
    spreads = []
    for task, sizes in a.sizes.items():
        change = np.array(b.distances[task]) - np.array(a.distances[task])
        spreads.append(drawn_ratios(change, np.array(sizes), draws, generator(seed, task)))
    low, high = interval(np.mean(spreads, axis=0))
    return Margin(a.value, b.value, low, high, sum(map(len, a.sizes.values())))


def apart(count: int, seed: int, task: str) -> tuple[list[int], list[int]]:
    """Positions of the samples that are fitted on and of those that are held out, each in rising order.

    Whole samples are held out, never tokens: one in `SHARE` of every task, decided by seed and task alone.

    >>> [len(part) for part in apart(64, 42, "digits")]
    [56, 8]
    """
    digest = hashlib.sha256(f"{seed}:{task}:held out".encode()).digest()
    drawn = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    order = torch.randperm(count, generator=drawn).tolist()
    return sorted(order[count // SHARE :]), sorted(order[: count // SHARE])


def calibration_samples(session: Session, config: CalibrationConfig) -> dict[str, Samples]:
    """The calibration samples of every task that takes part, without their labels."""
    drawn = session.samples(View(config.samples, "calibration", config.seed))
    return {task: replace(one, labels=None) for task, one in taking_part(config, drawn).items()}


class HeldOut:
    """Calibration samples in two parts, with what experts compute on them: kept from candidate to candidate.

    Args:
        config: samples, seed, batch size, precision and tasks of all candidates.
        drawn: as `calibration_samples` gives them; a task needs `SHARE` at least.
    """

    def __init__(self, session: Session, config: CalibrationConfig, drawn: Mapping[str, Samples]) -> None:
        family, self._run = as_family(session.family, precision=config.precision), session.family.run
        parts = {task: apart(len(one), config.seed, task) for task, one in drawn.items()}
        fitted = {task: _only(one, parts[task][0]) for task, one in drawn.items()}
        self.samples = {task: _only(one, parts[task][1]) for task, one in drawn.items()}
        """What is held out, by task."""
        rooms = [Kept.on(family.compute.device) for _ in range(2)]
        self.fitted: dict[str, ExpertPass] = {
            task: family.expert_pass(one, config.batch_size, rooms[0]) for task, one in fitted.items()
        }
        self.measured: dict[str, ExpertPass] = {
            task: session.family.expert_pass(one, BATCH_SIZE, rooms[1]) for task, one in self.samples.items()
        }
        self._family, self._first = family, FirstBlock()
        self._heads, self.note = _heads(session, self.samples)

    @property
    def criterion(self) -> str:
        """What candidates are scored by."""
        return DRIFT if self._heads is None else KL

    def calibrated(self, config: CalibrationConfig, progress: Progress = silent) -> Weights:
        """The merged model calibrated on what is not held out.

        Raises:
            InputError, NumericalError: as `calibrate`.
        """
        first = self._first
        return calibrate(self._family, config, experts=self.fitted, first=first, progress=progress).weights

    def score(self, model: Weights, progress: Progress = silent) -> Score:
        """How far a model is from the experts on what is held out.

        Raises:
            NumericalError: final features that are not finite.
        """
        features = follow(self._run(progress), model, self.measured)
        return by_drift(features) if self._heads is None else by_divergence(features, self._heads)


def by_drift(features: Mapping[str, TaskFeatures]) -> Score:
    """The final relative drift."""
    last = {task: found.layers[-1] for task, found in features.items()}
    return Score(
        DRIFT,
        {task: tuple(layer.drift.tolist()) for task, layer in last.items()},
        {task: tuple(layer.expert_norm.tolist()) for task, layer in last.items()},
    )


def by_divergence(features: Mapping[str, TaskFeatures], heads: Heads) -> Score:
    """KL from the expert's probabilities to the model's.

    Args:
        heads: the expert's and the model's, by task.
    """
    distances = {}
    for task, found in features.items():
        expert, own = heads[task]
        apart = divergence(expert.scores(found.expert_features.double()), own.scores(found.model_features.double()))
        distances[task] = tuple(apart.tolist())
    return Score(KL, distances, {task: (1.0,) * len(of) for task, of in distances.items()})


def _heads(session: Session, held_out: Mapping[str, Samples]) -> tuple[Heads | None, str]:
    """Heads for `KL`, where enough samples are held out, and why there are none; calibration leaves heads alone."""
    if min(map(len, held_out.values())) < ENOUGH_FOR_KL:
        return None, ""
    try:
        return pairs_of_heads(session.family, session.family.merged, held_out), ""
    except InputError as error:
        return None, f"scored by drift, not by divergence: {error}"


def _only(drawn: Samples, positions: list[int]) -> Samples:
    """Some of the samples, as inputs alone."""
    inputs = {name: tensor[positions] for name, tensor in drawn.inputs.items()}
    indices = tuple(drawn.indices[position] for position in positions)
    bare = replace(drawn, labels=None, images=None, texts=None, targets=None)
    return replace(bare, inputs=inputs, indices=indices, total=len(indices))

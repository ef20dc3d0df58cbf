"""Measure the probability of the experts' decisions under a model on held-out samples, and the difference of two
models.

The criterion is the probability that a model gives the expert's decision, averaged over a task's held-out samples and
then over tasks. A decision is the class with the expert's largest score (scores are multiplied by a factor,
`sharpness`, that makes the expert's own decisions probable), or the answer that the expert itself writes, whose
probability is the product over its tokens (with teacher forcing). No label is read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from featcal.evaluation.comparison import DRAWS, SEED, drawn_changes, generator, interval
from featcal.evaluation.generation_check import TOGETHER
from featcal.evaluation.scoring_heads import answers_of, pairs_of_heads
from featcal.family.opening import Family, batches_of
from featcal.formats.weights import Weights
from featcal.models.adapter import Batch
from featcal.models.features import expert_features
from featcal.models.generation import TextAnswerer, prompt_batch
from featcal.models.lane import ExpertPass, WalkCache
from featcal.models.model import Head, tasks_with_own_modules
from featcal.samples.sources import Samples
from featcal.session.open_suite import BATCH_SIZE
from featcal.system.errors import NoScores, NumericalError

DECISION, DRIFT = CRITERIA = ("decision", "drift")
"""DECISION: probability of the expert's decision, 0-1. DRIFT: if there are no heads, 1 minus the relative drift of the
final features, at most 1. Higher is better in both."""
SURE = 0.95
"""Mean probability that an expert should give to its own decisions, to which `sharpness` raises it. Values from 0.9
to 0.99 rank candidates alike (docs/theory/selection.md).
"""
Heads = Mapping[str, tuple[Head, Head]]
"""Heads of the expert and of the model, by task."""


@dataclass(frozen=True)
class Score:
    """Nearness of a model to the experts; higher is better."""

    criterion: str
    values: Mapping[str, tuple[float, ...]]
    """Values by task, one for each held-out sample, fold after fold."""

    @property
    def value(self) -> float:
        """Return the mean over tasks of a task's mean."""
        return float(np.mean([np.mean(one) for one in self.values.values()]))


@dataclass(frozen=True)
class Margin:
    """Score of B minus score of A on the same held-out samples; B is better if it is above 0."""

    a: float
    b: float
    low: float
    """2.5th percentile of the difference over bootstrap draws, within tasks (`evaluation.comparison`)."""
    high: float
    """97.5th percentile."""
    n: int
    """Samples of all tasks."""

    @property
    def difference(self) -> float:
        return self.b - self.a

    @property
    def is_within_noise(self) -> bool:
        return self.low <= 0 <= self.high


def margin(a: Score, b: Score, draws: int = DRAWS, seed: int = SEED) -> Margin:
    """Compare B with A, with a paired interval: both are scored on the same bootstrap draws."""
    spreads = [
        drawn_changes(np.array(b.values[task]) - np.array(own), draws, generator(seed, task))
        for task, own in a.values.items()
    ]
    low, high = interval(np.mean(spreads, axis=0))
    return Margin(a.value, b.value, low, high, sum(map(len, a.values.values())))


@dataclass(frozen=True)
class Criterion:
    """Criterion by which all candidates of a choice are scored."""

    name: str
    """One of `CRITERIA`."""
    heads: Heads | None
    """Heads of all models of the family; None if models may have different heads, or if none are needed."""
    note: str
    """Reason why the criterion is not `DECISION`; else ""."""


def criterion_of(family: Family, drawn: Mapping[str, Samples]) -> Criterion:
    """Return the criterion: the experts' decisions, if they are available.

    Raises:
        InputError: heads that do not fit the classes. (Without heads the criterion is drift.)
    """
    try:
        speaking = _generative_tasks(family, drawn)
        heads = pairs_of_heads(
            family, family.merged, {task: one for task, one in drawn.items() if task not in speaking}
        )
        for model in (family.merged, *(family.experts[task] for task in speaking)):
            if tasks_with_own_modules(model) & speaking:
                raise NoScores(f"{model.label} has maps of its own, with which the library cannot generate")
    except NoScores as error:
        return Criterion(DRIFT, None, f"scored by drift, not by decisions: {error}")
    shared = not family.adapter.reads_prompts and not tasks_with_own_modules(family.merged)
    return Criterion(DECISION, heads if shared else None, "")


def _generative_tasks(family: Family, drawn: Mapping[str, Samples]) -> set[str]:
    """Return the tasks whose decisions are generated text."""
    return {task for task in drawn if answers_of(family, family.merged, task) == "text"}


@dataclass(frozen=True)
class _Asked:
    """Prompts of one task with the expert's own answers."""

    batches: list[Batch]
    answers: list[Tensor]
    """Token ids `[tokens]`, prompt by prompt."""
    ends: frozenset[int]


class Judge:
    """The experts' decisions on some samples, and the comparison of models with them.

    Args:
        criterion: from `criterion_of`.
    """

    def __init__(self, family: Family, samples: Mapping[str, Samples], criterion: Criterion) -> None:
        self._family, self._criterion = family, criterion
        speaking = _generative_tasks(family, samples) if criterion.name == DECISION else set()
        self._samples = {task: one for task, one in samples.items() if task not in speaking}
        # Nothing is kept of a walk: every candidate walks these passes with weights of its own.
        self._passes = {task: family.expert_pass(one, BATCH_SIZE, WalkCache(0)) for task, one in self._samples.items()}
        self._experts = self._features(self._passes)
        self._asked = {task: self._ask(samples[task]) for task in samples if task in speaking}

    def values(self, model: Weights) -> dict[str, tuple[float, ...]]:
        """Return a model's nearness to the experts, by task and sample.

        Raises:
            NumericalError: features or scores that are not finite.
        """
        found = self._judge_features(model) | self._judge_answers(model)
        for task, values in found.items():
            if not bool(torch.isfinite(values).all()):
                raise NumericalError(f"{model.label}, task '{task}': final features are not finite")
        return {task: tuple(values.tolist()) for task, values in found.items()}

    def _judge_features(self, model: Weights) -> dict[str, Tensor]:
        passes = {task: replace(one, weights=model) for task, one in self._passes.items()}
        reached = self._features(passes)
        if self._criterion.name == DRIFT:
            return {task: 1 - relative_drift(own, reached[task]) for task, own in self._experts.items()}
        heads = self._criterion.heads or pairs_of_heads(self._family, model, self._samples)
        return {
            task: decision_probability(
                heads[task][0].scores(own.double().cpu()), heads[task][1].scores(reached[task].double().cpu())
            )
            for task, own in self._experts.items()
        }

    def _features(self, passes: Mapping[str, ExpertPass]) -> dict[str, Tensor]:
        return expert_features(self._family.run(), passes) if passes else {}

    def _judge_answers(self, model: Weights) -> dict[str, Tensor]:
        if not self._asked:
            return {}
        whole, found = self._family.generator(model), {}
        for task, one in self._asked.items():
            pupil = TextAnswerer(whole, one.batches, self._longest(task))
            pairs = zip(one.answers, pupil.log_probabilities(one.answers), strict=True)
            found[task] = torch.stack([answer_probability(answer, along, one.ends) for answer, along in pairs]).cpu()
        return found

    def _ask(self, drawn: Samples) -> _Asked:
        """Let a task's expert generate its answers."""
        family = self._family
        batches = [*map(prompt_batch, batches_of(drawn, TOGETHER, family.compute.device))]
        teacher = TextAnswerer(family.generator(family.experts[drawn.task]), batches, self._longest(drawn.task))
        return _Asked(batches, teacher.answers, teacher.ends)

    def _longest(self, task: str) -> int:
        """Return the largest number of tokens of an answer, as in scoring."""
        return self._family.suite.task(task).max_target_length


def decision_probability(expert: Float[Tensor, "n c"], model: Float[Tensor, "n c"]) -> Float[Tensor, " n"]:
    """Return the probability that the softmax of a model's scores gives to the expert's largest class, both multiplied
    by the same factor (`sharpness`).

    >>> decision_probability(torch.tensor([[2.0, 1.0]]), torch.tensor([[0.0, 0.0]])).tolist()
    [0.5]
    """
    chances = torch.softmax(sharpness(expert) * model.double(), dim=1)
    return chances.gather(1, expert.argmax(1, keepdim=True)).flatten()


def sharpness(expert: Float[Tensor, "n c"], sure: float = SURE) -> float:
    """Return the factor on scores, 1 to 2^16, at which an expert gives its own decisions probability `sure` on average;
    1 if it already does.

    Decisions do not depend on the scale of scores, but their probabilities do: with an untrained temperature the
    softmax is so flat that a model with a few large margins ranks above one that decides like the expert.

    >>> round(sharpness(torch.tensor([[1.0, 0.0]]), sure=0.5), 3), round(sharpness(torch.tensor([[1.0, 0.0]])), 3)
    (1.0, 2.944)
    """
    scores, least, most = expert.double(), 1.0, 2.0**16

    def is_sure(factor: float) -> bool:
        return float(torch.softmax(factor * scores, dim=1).amax(1).mean()) >= sure

    if is_sure(least):
        return least
    while most / least > 1 + 1e-9:
        middle = math.sqrt(least * most)
        least, most = (least, middle) if is_sure(middle) else (middle, most)
    return most


def answer_probability(
    answer: Tensor, along: Float[Tensor, "tokens vocabulary"], ends: frozenset[int]
) -> Float[Tensor, ""]:
    """Return the probability of an answer: the product over its tokens, `[tokens]`.

    An answer that was cut off is not a decision, and its product would mostly depend on its length, so the geometric
    mean is returned instead.

    Args:
        along: a model's log-probabilities at every token of the answer.
        ends: tokens that end an answer.
    """
    nats = along.double().gather(1, answer[:, None]).sum()
    # Of a text that was cut off, the product would say no more than how long it is.
    whole = not ends or int(answer[-1]) in ends
    return (nats if whole else nats / len(answer)).exp()


def relative_drift(expert: Float[Tensor, "n k"], model: Float[Tensor, "n k"]) -> Float[Tensor, " n"]:
    """Return ||h_model - h_expert|| / ||h_expert||, sample by sample."""
    expert = expert.double()
    apart: Tensor = ((model.double() - expert).norm(dim=1) / expert.norm(dim=1)).cpu()
    return apart

"""Check whether a model still generates: its own continuations, and the likelihood of the experts' answers.

A repair can move features closer to the experts' under teacher forcing, where all previous tokens are right, and yet
leave a model that repeats itself for ever. So a calibrated model that generates is compared with the merged model
before it, on prompts from the calibration samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import count
from typing import Any

import torch
from torch import Tensor

from featcal.family.opening import Family, batches_of
from featcal.formats.weights import Weights
from featcal.models.adapter import Batch
from featcal.models.generation import Generator, TextAnswerer, answer_together, prompt_batch
from featcal.models.model import answers_apart, task_weights
from featcal.samples.sources import Samples
from featcal.system.errors import InputError, NumericalError
from featcal.system.progress import Progress, silent

PROMPTS, TOKENS = 16, 64
"""Prompts per task, and new tokens at most for each."""
GRAM = 4
"""Number of tokens in a run that counts as repeated."""
LOOP = 0.4
"""Share of repeated runs from which on an answer counts as a loop."""
MORE = 0.2
"""Allowed increase of loops and empty answers, and allowed decrease of ended answers, as a share of a task's answers,
relative to both the merged model and the expert: three of 16 prompts."""
UNLIKELIER = 1.25
"""Factor by which the perplexity of the expert's answers may exceed that of the merged model."""
ERRORS = 2.0
"""Standard errors of a perplexity's logarithm that are allowed for chance."""
FARTHER = 0.05
"""Amount by which the distance of next-token distributions (0-1) to the expert's may exceed that of the merged
model."""
TOGETHER = 8
"""Prompts in one batch, whose scores of all tokens of the vocabulary are in memory at once."""
JOINED = 4096
"""Most tokens of prompts and answers that one model writes at once, whose keys and values are in memory."""
ROOM = 2**30
"""Bytes of experts' distributions from which on the tasks so far are finished first, with models loaded for them."""
_LARGEST = 700.0
"""Nats per token whose exponential is still a number."""


@dataclass(frozen=True)
class Reading:
    """Measurements of one model on the prompts of one task."""

    repetition: float
    """Mean share, 0-1, of an answer's runs of `GRAM` tokens that occurred in it before."""
    loops: float
    """Share of answers, 0-1, that repeat at least `LOOP` of their runs."""
    ended: float | None
    """Share of answers, 0-1, that the model ends by itself; None if it has no end token."""
    perplexity: float
    """Perplexity of the expert's own answers, at least 1: exp of their mean negative log-probability per token."""
    distance: float
    """Total variation distance between the next-token distributions of model and expert along the expert's answers,
    0-1, mean over tokens."""
    error: float = 0.0
    """Standard error of the logarithm of `perplexity` over prompts. With one-word answers, one or two confident
    mistakes of 16 already change the perplexity by a factor of 1.3."""
    empty: float = 0.0
    """Share of answers, 0-1, whose first token is the end token."""


@dataclass(frozen=True)
class TaskCanary:
    """Measurements of one task: of its expert, of the reference model, and of the model."""

    prompts: int
    expert: Reading
    against: Reading
    model: Reading

    @property
    def reasons(self) -> tuple[str, ...]:
        """Return the reasons why generation counts as broken; none if it does not."""
        expert, before, after = self.expert, self.against, self.model
        found = []
        if after.loops > max(before.loops, expert.loops) + MORE:
            found.append(f"{after.loops:.0%} of the answers are loops, {before.loops:.0%} before")
        if after.empty > max(before.empty, expert.empty) + MORE:
            found.append(f"{after.empty:.0%} of the answers are empty, {before.empty:.0%} before")
        if after.ended is not None and after.ended < min(one.ended or 0.0 for one in (before, expert)) - MORE:
            found.append(f"{after.ended:.0%} of the answers end, {before.ended or 0.0:.0%} before")
        if math.log(after.perplexity) - ERRORS * after.error > math.log(UNLIKELIER * before.perplexity):
            found.append(f"the expert's answers have perplexity {after.perplexity:.4g}, {before.perplexity:.4g} before")
        if after.distance > before.distance + FARTHER:
            found.append(f"next tokens are {after.distance:.3f} from the expert's, {before.distance:.3f} before")
        return tuple(found)


@dataclass(frozen=True)
class Canary:
    """Generation of one model compared with a reference model's, task by task."""

    suite: str
    model: str
    against: str
    tasks: Mapping[str, TaskCanary]

    @property
    def reasons(self) -> tuple[str, ...]:
        """Return the reasons why generation counts as broken, task by task; none if it does not."""
        return tuple(f"{task}: {reason}" for task, one in self.tasks.items() for reason in one.reasons)

    @property
    def is_broken(self) -> bool:
        return bool(self.reasons)

    def to_json(self) -> dict[str, Any]:
        """Return the public document of `featcal study canary --json`, which is also the entry `canary` of a record."""
        return {
            "suite": self.suite,
            "model": self.model,
            "against": self.against,
            "tokens": TOKENS,
            "tasks": {task: asdict(one) for task, one in self.tasks.items()},
            "broken": self.is_broken,
            "reasons": list(self.reasons),
        }


def compare_generation(
    family: Family, model: Weights, against: Weights | None = None, *, seed: int = 42, progress: Progress = silent
) -> Canary:
    """Let the experts, the model and the reference model answer the same prompts.

    Decoding is greedy, on tasks with calibration samples. Prompt and answer together have at most as many tokens as the
    model's configuration has positions, also for rotary ones, because every model errs beyond them. One whole model is
    in memory at a time, in the compute dtype, with the experts' distributions over their answers (`ROOM`).

    Args:
        against: the reference model; by default the suite's merged model.
        seed: decides which calibration samples give the prompts.

    Raises:
        InputError: models that generate no text, a suite without calibration samples, or a model with a map or a head
            of its own, which the library's `generate` would ignore.
        NumericalError: scores that are not finite.
    """
    if not family.adapter.generates:
        raise InputError(f"{family.suite.name}: {family.adapter.family} models generate no text, so there is no canary")
    held = against or family.merged
    for one in (model, held, *family.experts.values()):
        if any(answers_apart(one, task) for task in family.suite.tasks):
            raise InputError(f"{one.label} has maps or heads of its own, with which the library cannot generate")
    experts = {task: one for task, one in family.experts.items() if task not in unchecked_tasks(family)}
    if not experts:
        raise InputError(f"{family.suite.name}: no task has calibration samples, so there are no prompts")
    models = (model,) if held is model else (held, model)  # checked against itself, a model is run once
    total, done = len(experts) * (1 + len(models)), count(1)

    def step() -> None:
        progress("generation", next(done), total)

    progress("generation", 0, total)
    found: dict[str, TaskCanary] = {}
    rest = dict(experts)
    while rest:
        lessons: dict[str, _Lesson] = {}
        while rest and (not lessons or sum(one.nbytes for one in lessons.values()) < ROOM):
            task = next(iter(rest))
            drawn = family.samples(task, "calibration", PROMPTS, seed)
            lessons[task] = _hear_expert(family, task, rest.pop(task), drawn)
            step()
        for one in models:
            _examine(family, one, lessons, step)
        for task, lesson in lessons.items():
            readings = lesson.readings
            found[task] = TaskCanary(len(lesson.answers), readings[0], readings[1], readings[-1])
    return Canary(family.suite.name, model.label, held.label, found)


@dataclass(frozen=True)
class _Lesson:
    """Prompts of a task with its expert's answers, and what was read of the expert and of models so far."""

    batches: Sequence[Batch]
    answers: Sequence[Tensor]
    distributions: Sequence[Tensor]
    """Probabilities of the next token along the answers, `[tokens, vocabulary]` each."""
    readings: list[Reading]

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in self.distributions)


def _hear_expert(family: Family, task: str, expert: Weights, drawn: Samples) -> _Lesson:
    """Let an expert answer prompts of its task."""
    whole = _keep_within(family.generator(expert))
    longest = _longest_prompt(whole)
    batches = [prompt_batch(one, longest) for one in batches_of(drawn, TOGETHER, family.compute.device)]
    answers = [one for some in answer_together(whole, batches, TOKENS, JOINED) for one in some]
    teacher = TextAnswerer(whole, batches, TOKENS, answers)
    lesson = _Lesson(batches, answers, [one.exp() for one in teacher.log_probabilities(answers)], [])
    lesson.readings.append(_read(family, task, teacher, lesson))
    return lesson


def _examine(family: Family, model: Weights, lessons: Mapping[str, _Lesson], step: Callable[[], None]) -> None:
    """Read a model on the prompts of tasks, all at once where it has the same weights for them."""
    rest = dict(lessons)
    while rest:
        weights = task_weights(model, next(iter(rest)))
        own = {task: rest.pop(task) for task in [*rest] if task_weights(model, task) is weights}
        whole = _keep_within(family.generator(weights))
        batches = [batch for lesson in own.values() for batch in lesson.batches]
        answered = iter(answer_together(whole, batches, TOKENS, JOINED))
        for task, lesson in own.items():
            answers = [one for _ in lesson.batches for one in next(answered)]
            lesson.readings.append(_read(family, task, TextAnswerer(whole, lesson.batches, TOKENS, answers), lesson))
            step()
        del whole  # one whole model at a time


def _read(family: Family, task: str, pupil: TextAnswerer, lesson: _Lesson) -> Reading:
    """Measure a model on a lesson, and name the task in errors."""
    try:
        return _reading(pupil, lesson.answers, lesson.distributions)
    except NumericalError as error:
        raise NumericalError(f"{family.suite.name}, task '{task}': {error}") from error


def unchecked_tasks(family: Family) -> list[str]:
    """Return the tasks without calibration samples, which give no prompts."""
    return [task for task, spec in family.suite.tasks.items() if spec.calibration is None]


def canary_warnings(record: Mapping[str, Any]) -> list[str]:
    """Return the reasons in a record's canary as warnings."""
    return [f"generation is broken: {reason}" for reason in record.get("canary", {}).get("reasons", ())]


def note_unchecked(family: Family) -> list[str]:
    """Return a note on the tasks without prompts; none if every task has some."""
    left = ", ".join(f"'{task}'" for task in unchecked_tasks(family))
    return [f"generation was not checked on {left}: no calibration samples, so no prompts"] if left else []


def _keep_within(generator: Generator) -> Generator:
    """Return the generator with answers that end at the last position of the model's configuration."""
    return replace(generator, positions=generator.stated)


def _longest_prompt(generator: Generator) -> int | None:
    """Return the tokens of the longest prompt that leaves space for an answer, or half of all positions; None for any
    number."""
    rows = generator.positions
    return None if rows is None else max(rows - TOKENS, rows // 2, 1)


def _reading(pupil: TextAnswerer, answers: Sequence[Tensor], theirs: Sequence[Tensor]) -> Reading:
    """Measure a model on the expert's answers, compared with the expert's distributions along them."""
    repeated = [repetition(one.tolist()) for one in pupil.answers]
    nats, apart = [], []
    for answer, distribution, log_probabilities in zip(answers, theirs, pupil.log_probabilities(answers), strict=True):
        nats.append(-log_probabilities.gather(1, answer[:, None]).flatten())
        apart.append((log_probabilities.exp() - distribution).abs().sum(1) / 2)
    mean, distance = float(torch.cat(nats).double().mean()), float(torch.cat(apart).double().mean())
    if not math.isfinite(mean + distance):
        raise NumericalError("a model's scores of the next token are not finite")
    answered = [float(one.double().sum()) for one in nats]
    return Reading(
        sum(repeated) / len(repeated),
        sum(one >= LOOP for one in repeated) / len(repeated),
        sum(int(one[-1]) in pupil.ends for one in pupil.answers) / len(answers) if pupil.ends else None,
        # A mean above it would overflow; so large a perplexity counts as broken all the same.
        math.exp(min(mean, _LARGEST)),
        distance,
        _error(answered, [len(one) for one in nats]),
        sum(int(one[0]) in pupil.ends for one in pupil.answers) / len(answers),
    )


def _error(sums: Sequence[float], counts: Sequence[int]) -> float:
    """Return the standard error of `sum(sums) / sum(counts)`, whose terms come in pairs; 0 for a single pair.

    >>> _error([1.0, 3.0], [1, 1])
    1.0
    """
    pairs, ratio = len(sums), sum(sums) / sum(counts)
    squares = sum((one - ratio * count) ** 2 for one, count in zip(sums, counts, strict=True))
    return math.sqrt(squares * pairs / max(pairs - 1, 1)) / sum(counts)


def repetition(answer: Sequence[int]) -> float:
    """Return the share of an answer's runs of `GRAM` tokens that occurred in it before; 0 if there are none.

    >>> repetition([1, 2, 1, 2, 1, 2, 1])
    0.5
    """
    runs = [tuple(answer[i : i + GRAM]) for i in range(len(answer) - GRAM + 1)]
    return 1 - len(set(runs)) / len(runs) if runs else 0.0

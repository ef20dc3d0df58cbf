"""Score a model of a suite on its tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from featcal.evaluation.language import METRICS, generate_answers, note_unreachable, right_numbers, writable_targets
from featcal.evaluation.scoring_heads import (
    answers_of,
    check_classes,
    head_of,
    no_class_names,
    prompt_heads,
    right_answers,
)
from featcal.family.opening import Family, batches_by_length
from featcal.formats.weights import Weights
from featcal.models.adapter import Batch
from featcal.models.compute import widen
from featcal.models.features import final_features
from featcal.models.lane import WalkCache
from featcal.models.model import Head, map_features, own_head, task_weights
from featcal.samples.sources import Samples, name_problems, open_scored_pool
from featcal.system.drawing import Drawable
from featcal.system.errors import NoScores, NumericalError

if TYPE_CHECKING:
    import pandas as pd

BATCH_SIZE = 128
CHUNK = 8
Reach = Callable[[Family, Weights, Samples], Tensor]
"""Function that returns the final features of weights on samples, before any map, as `reach_features` does."""


@dataclass(frozen=True)
class TaskScore:
    """The score of one task: `value` in 0-1, the answers of the model and the right ones.

    >>> import featcal
    >>> found = featcal.evaluate(featcal.load_suite("lm-mini"), "merged", samples=8).tasks["sentiment"]
    >>> found.metric, found.n, found.value
    ('exact_match', 8, 0.875)
    >>> found.answers()[0]
    {'said': 'positive', 'right': 'positive'}
    """

    metric: str
    value: float
    predictions: Tensor | tuple[str, ...]
    """`[n]` class indices, or a language model's answers."""
    labels: Tensor | tuple[str, ...]
    notes: tuple[str, ...] = field(default=(), repr=False)
    """Remarks on the samples: classes that were matched by position, files that were left out."""

    @property
    def n(self) -> int:
        return len(self.labels)

    def answers(self) -> list[dict[str, int | str]]:
        """Return one row per sample, in their order: the model's answer and the right one."""
        answers, right = (
            one.tolist() if isinstance(one, Tensor) else list(one) for one in (self.predictions, self.labels)
        )
        return [{"said": a, "right": b} for a, b in zip(answers, right, strict=True)]

    @property
    def right(self) -> Bool[Tensor, " n"] | None:
        """Say for every answer whether it is right, ignoring blanks around a text; None if the metric judges no single
        answers (a rank correlation)."""
        if self.metric == "spearman":
            return None
        if isinstance(self.predictions, Tensor):
            assert isinstance(self.labels, Tensor)
            return self.predictions == self.labels
        pairs = zip(self.predictions, map(str, self.labels), strict=True)
        return torch.tensor([answer.strip() == label.strip() for answer, label in pairs], dtype=torch.bool)


@dataclass(frozen=True, repr=False)
class Scores(Drawable):
    """Scores of one model on every task of a suite.

    >>> import featcal
    >>> scores = featcal.evaluate(featcal.load_suite("lm-mini"), "merged", samples=64)
    >>> {task: round(one.value, 2) for task, one in scores.tasks.items()}
    {'sentiment': 0.83, 'entailment': 0.66, 'correct': 0.22, 'rewrite': 0.61}
    >>> round(scores.average, 2)
    0.58
    """

    suite: str
    model: str
    split: str
    tasks: Mapping[str, TaskScore]

    @property
    def average(self) -> float:
        """Return the unweighted mean over tasks."""
        return sum(score.value for score in self.tasks.values()) / len(self.tasks)

    @property
    def notes(self) -> list[str]:
        """Return remarks on the samples of every task."""
        return [f"task '{task}': {note}" for task, score in self.tasks.items() for note in score.notes]

    def to_json(self) -> dict[str, Any]:
        """Return the public document of `featcal evaluate --json`."""
        return {
            "suite": self.suite,
            "model": self.model,
            "split": self.split,
            "tasks": {t: {"metric": s.metric, "value": s.value, "n": s.n} for t, s in self.tasks.items()},
            "average": self.average,
        }

    def to_frame(self) -> pd.DataFrame:
        """Return one row per task: task, metric, value, n."""
        import pandas as pd

        return pd.DataFrame(
            [{"task": t, "metric": s.metric, "value": s.value, "n": s.n} for t, s in self.tasks.items()]
        )


def scoring_heads(family: Family, split: str, models: Mapping[str, Weights]) -> dict[str, Head]:
    """Make the heads of models by task, if class prompts make them; none if every model has its own.

    Raises:
        InputError: class names or a text tower are missing.
    """
    if family.adapter.scores_with != "prompts":
        return {}
    return prompt_heads(family, {task: class_names(family, task, split) for task in models}, models)


def heads_of(family: Family, models: Mapping[str, Weights], split: str) -> dict[str, Head | None]:
    """Return by task the head that turns a model's features into scores; None for its own vocabulary, which is a part
    of the tower.

    Args:
        models: by task.
        split: the one whose source names the classes.

    Raises:
        InputError: class names, a text tower or a head are missing.
    """
    needed = {task: model for task, model in models.items() if own_head(model, task) is None}
    shared = scoring_heads(family, split, needed)
    vocabulary = {*needed} if family.adapter.scores_with == "vocabulary" else set()
    return {
        task: None if task in vocabulary else head_of(family, model, task, shared.get(task))
        for task, model in models.items()
    }


def reach_features(
    family: Family, weights: Weights, drawn: Samples, checked: WalkCache | None = None
) -> Float[Tensor, "n k"]:
    """Return the final features of weights on samples, on the compute device.

    Args:
        checked: records the batches that were checked against the library's own forward.
    """
    batches, places = batches_by_length(drawn, BATCH_SIZE, family.compute.device)
    head, found = family.head(), []
    for start in range(0, len(batches), CHUNK):  # states of one chunk are in memory at a time
        name = f"{drawn.split} samples of {drawn.task} from {drawn.indices[0]} on, batch {start}"
        some = batches[start : start + CHUNK]
        found.append(final_features(family.adapter, weights, head, some, family.compute, checked, name))
    return torch.cat(found)[places.to(family.compute.device)]


def score_model(
    family: Family, model: Weights, parts: Iterable[Samples], head: Head | None, reach: Reach = reach_features
) -> TaskScore:
    """Score a model on samples with known answers, part by part: top-1 accuracy of classes, a text's own metric.

    Args:
        head: from `scoring_heads`; a model's own head for the task takes precedence.
        reach: returns the features to score.

    Raises:
        NoScores: labels, answers or a head are missing.
        NumericalError: features that are not finite, which have no largest score.
    """
    return concat_scores([_note_cuts(_score(family, model, part, head, reach), part) for part in parts])


def _note_cuts(found: TaskScore, drawn: Samples) -> TaskScore:
    note = "some texts are longer than the task's limits and are cut; featcal check counts them and names the limits"
    return replace(found, notes=(*found.notes, note)) if drawn.truncated else found


def _score(family: Family, model: Weights, drawn: Samples, shared: Head | None, reach: Reach) -> TaskScore:
    if drawn.second is not None:
        return likeness(family, model, drawn, drawn.second)
    if answers_of(family, model, drawn.task) == "classes":
        return accuracy(family, model, drawn, head_of(family, model, drawn.task, shared), reach)
    task = family.suite.task(drawn.task)
    if drawn.targets is None:
        raise NoScores(f"task '{drawn.task}', {drawn.split} samples: no answers to score against; give 'target'")
    source = task.source(drawn.split)
    if source is not None and source.self_generated is not None:
        raise NoScores(
            f"task '{drawn.task}', {drawn.split} samples: texts that its expert wrote have no right answers; add "
            "'test:' samples with a 'target' to the task, or name a suite that has them"
        )
    metric = "exact_match" if task.metric == "accuracy" else task.metric
    if metric == "spearman":
        with name_problems(f"task '{drawn.task}', {drawn.split} samples"):
            right_numbers(drawn.targets)  # before a model has written all its answers
    predicted = generate_answers(family, model, drawn, task.max_target_length)
    right, notes = (drawn.targets, ()) if metric == "spearman" else writable_targets(family, drawn)
    notes = (*drawn.notes, *note_unreachable(family, drawn, task.max_target_length), *notes)
    return TaskScore(metric, METRICS[metric](predicted, right), predicted, right, notes)


def accuracy(family: Family, model: Weights, drawn: Samples, head: Head, reach: Reach = reach_features) -> TaskScore:
    """Measure how often the largest score is that of the right class, or of the first token of the right answer.

    Raises:
        InputError: labels or answers are missing, or do not fit the head's classes.
        NumericalError: features that are not finite, which have no largest score.
    """
    labels = right_answers(family, model, drawn)
    check_classes(head.classes, drawn)
    predictions = []
    # In parts of a fixed size: a vocabulary has many scores of every sample.
    for part in torch.split(reach(family, task_weights(model, drawn.task), drawn), CHUNK * BATCH_SIZE):
        features = map_features(model, drawn.task, part).float().cpu()
        if not bool(torch.isfinite(features).all()):
            raise NumericalError(f"{model.label}, task '{drawn.task}': final features are not finite")
        predictions.append(head.scores(features).argmax(1))
    predicted = torch.cat(predictions)
    return TaskScore("accuracy", float((predicted == labels).double().mean()), predicted, labels, drawn.notes)


def likeness(family: Family, model: Weights, drawn: Samples, second: Mapping[str, Tensor]) -> TaskScore:
    """Measure the rank correlation between the cosines of two texts' embeddings and their rated similarity.

    Args:
        drawn: the first texts, with the ratings as answers.
        second: inputs of the second texts.

    Raises:
        InputError: an answer that is not a number, or all of them equal.
        NumericalError: embeddings that are not finite.
    """
    assert drawn.targets is not None

    def embed(one: Samples) -> Tensor:
        batches, places = batches_by_length(one, BATCH_SIZE, family.compute.device)
        chunks = (batches[start : start + CHUNK] for start in range(0, len(batches), CHUNK))
        return widen(torch.cat([task_features(family, model, drawn.task, chunk) for chunk in chunks])[places])

    apart = embed(drawn), embed(replace(drawn, inputs=second))
    cosines = torch.nn.functional.cosine_similarity(apart[0], apart[1])
    if not bool(torch.isfinite(cosines).all()):
        raise NumericalError(f"{model.label}, task '{drawn.task}': embeddings are not finite")
    # Answers are texts everywhere, also these: the metric reads them as numbers again.
    answers = tuple(f"{cosine:.9f}" for cosine in cosines.tolist())
    return TaskScore("spearman", METRICS["spearman"](answers, drawn.targets), answers, drawn.targets, drawn.notes)


def task_features(family: Family, model: Weights, task: str, batches: Sequence[Batch]) -> Float[Tensor, "n k"]:
    """Return the input features of a model's head for a task, float32 on the CPU."""
    features = final_features(family.adapter, task_weights(model, task), family.head(), batches, family.compute)
    return map_features(model, task, features).float().cpu()


def concat_scores(parts: Sequence[TaskScore]) -> TaskScore:
    """Combine the scores of all parts of a split."""
    if len(parts) == 1:
        return parts[0]
    metric, notes = parts[0].metric, tuple(dict.fromkeys(note for part in parts for note in part.notes))
    if isinstance(parts[0].predictions, Tensor):
        predictions, labels = (torch.cat([getattr(part, name) for part in parts]) for name in ("predictions", "labels"))
        return TaskScore(metric, float((predictions == labels).double().mean()), predictions, labels, notes)
    answered = tuple(text for part in parts for text in part.predictions)
    right = tuple(str(text) for part in parts for text in part.labels)
    # Scored anew: a rank correlation of a whole is not the mean of its parts'.
    return TaskScore(metric, METRICS[metric](answered, right), answered, right, notes)


def class_names(family: Family, task: str, split: str) -> tuple[str, ...]:
    """Return the task's class names from the suite file or its source; InputError if there are none."""
    spec = family.suite.task(task)
    if spec.classes is not None:
        return spec.classes
    names = open_scored_pool(family.suite, task, split).class_names
    if names is None:
        raise no_class_names(task)
    return names

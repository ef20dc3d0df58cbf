"""Score a model of a suite on its tasks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from featcal.errors import InputError, NumericalError
from featcal.evaluation.language import METRICS, answers
from featcal.evaluation.zero_shot import ZeroShotHead, zero_shot_heads
from featcal.family import Family, batches_of
from featcal.formats.weights import Weights
from featcal.models.features import final_features
from featcal.models.language import LanguageModel
from featcal.tasks.sources import Samples, open_pool

if TYPE_CHECKING:
    import pandas as pd

BATCH_SIZE = 128
CHUNK = 8


@dataclass(frozen=True)
class TaskScore:
    """One task: `value` in 0-1, what the model said and what was right."""

    metric: str
    value: float
    predictions: Tensor | tuple[str, ...]
    """`[n]` class indices, or a language model's answers."""
    labels: Tensor | tuple[str, ...]

    @property
    def n(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class Scores:
    """Scores of one model on every task of a suite."""

    suite: str
    model: str
    split: str
    tasks: Mapping[str, TaskScore]

    @property
    def average(self) -> float:
        """Unweighted mean over tasks."""
        return sum(score.value for score in self.tasks.values()) / len(self.tasks)

    def to_json(self) -> dict[str, Any]:
        """The public document of `featcal evaluate --json`."""
        return {
            "suite": self.suite,
            "model": self.model,
            "split": self.split,
            "tasks": {t: {"metric": s.metric, "value": s.value, "n": s.n} for t, s in self.tasks.items()},
            "average": self.average,
        }

    def to_frame(self) -> pd.DataFrame:
        """One row per task: task, metric, value, n."""
        import pandas as pd

        return pd.DataFrame(
            [{"task": t, "metric": s.metric, "value": s.value, "n": s.n} for t, s in self.tasks.items()]
        )


def scoring_heads(family: Family, split: str) -> dict[str, ZeroShotHead]:
    """Zero-shot heads of all tasks of pictures; a language model needs none.

    Raises:
        InputError: class names or a text tower are missing.
    """
    if isinstance(family.adapter, LanguageModel):
        return {}
    return heads_for(family, {task: class_names(family, task, split) for task in family.suite.tasks})


def score(family: Family, model: Weights, parts: Iterable[Samples], head: ZeroShotHead | None) -> TaskScore:
    """One model on samples with known answers, part by part: top-1 accuracy with a head, the task's own metric without.

    Raises:
        InputError: labels or answers are missing.
        NumericalError: features that are not finite, which have no largest score.
    """
    return joined([_score(family, model, part, head) for part in parts])


def _score(family: Family, model: Weights, drawn: Samples, head: ZeroShotHead | None) -> TaskScore:
    if head is not None:
        return _accuracy(family, model, require_labels(drawn), head)
    task = family.suite.task(drawn.task)
    if drawn.targets is None:
        raise InputError(f"task '{drawn.task}', {drawn.split} samples: no answers to score against; give 'target'")
    predicted = answers(family, model, drawn, task.max_target_length)
    metric = "exact_match" if task.metric == "accuracy" else task.metric
    return TaskScore(metric, METRICS[metric](predicted, drawn.targets), predicted, drawn.targets)


def _accuracy(family: Family, model: Weights, drawn: Samples, head: ZeroShotHead) -> TaskScore:
    batches = batches_of(drawn, BATCH_SIZE, family.compute.device)
    own_head = family.head()
    predictions = []
    for start in range(0, len(batches), CHUNK):  # states of one chunk are in memory at a time
        chunk = batches[start : start + CHUNK]
        features = final_features(family.adapter, model, own_head, chunk, family.compute).float().cpu()
        if not bool(torch.isfinite(features).all()):
            raise NumericalError(f"{model.label}, task '{drawn.task}': final features are not finite")
        predictions.append(head.logits(features).argmax(1))
    assert drawn.labels is not None
    predicted = torch.cat(predictions)
    return TaskScore("accuracy", float((predicted == drawn.labels).double().mean()), predicted, drawn.labels)


def joined(parts: Sequence[TaskScore]) -> TaskScore:
    """The score of all parts of a split together."""
    if len(parts) == 1:
        return parts[0]
    metric = parts[0].metric
    if isinstance(parts[0].predictions, Tensor):
        predictions, labels = (torch.cat([getattr(part, name) for part in parts]) for name in ("predictions", "labels"))
        return TaskScore(metric, float((predictions == labels).double().mean()), predictions, labels)
    answered = tuple(text for part in parts for text in part.predictions)
    right = tuple(str(text) for part in parts for text in part.labels)
    return TaskScore(metric, METRICS[metric](answered, right), answered, right)


def require_labels(drawn: Samples) -> Samples:
    """The samples themselves; InputError if they have no labels or no class names."""
    if drawn.labels is None:
        raise InputError(
            f"task '{drawn.task}', {drawn.split} samples: no labels to score against; name them in the source"
        )
    if drawn.class_names is None:
        raise InputError(
            f"task '{drawn.task}': no class names for the zero-shot head; give 'classes' in the suite file"
        )
    return drawn


def class_names(family: Family, task: str, split: str) -> tuple[str, ...]:
    """The task's class names from the suite file or its source; InputError if there are none."""
    spec = family.suite.task(task)
    source = spec.source(split)
    if spec.classes is not None:
        return spec.classes
    if source is None:
        raise InputError(f"task '{task}', {split} samples: the suite file gives none; add '{split}:' to the task")
    names = open_pool(source, split, family.suite.root, f"task '{task}', {split} samples").class_names
    if names is None:
        raise InputError(f"task '{task}': no class names for the zero-shot head; give 'classes' in the suite file")
    return names


def heads_for(family: Family, names: Mapping[str, Sequence[str]]) -> dict[str, ZeroShotHead]:
    """Zero-shot heads from the class names of tasks and the templates of the suite."""
    prompts = {task: (own, family.suite.tasks[task].templates) for task, own in names.items()}
    return zero_shot_heads(family.origin, prompts)

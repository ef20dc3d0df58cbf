"""Score a model of a suite on its tasks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from featcal.errors import InputError
from featcal.evaluation.zero_shot import ZeroShotHead, zero_shot_heads
from featcal.family import Family, as_family, batches_of
from featcal.models.features import final_features
from featcal.models.weights import Weights
from featcal.progress import Progress, silent
from featcal.suite import Suite
from featcal.tasks.sources import Samples

if TYPE_CHECKING:
    import pandas as pd

BATCH_SIZE = 128


@dataclass(frozen=True)
class TaskScore:
    """One task: `value` in 0-1, what the model said and what was right."""

    metric: str
    value: float
    predictions: Tensor
    """`[n]` class indices."""
    labels: Tensor

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


def evaluate(
    suite: Suite | Family,
    model: str | Weights = "merged",
    *,
    split: str = "test",
    samples: int | None = None,
    seed: int = 42,
    device: str = "auto",
    progress: Progress = silent,
) -> Scores:
    """Accuracy of a model on every task of the suite.

    Args:
        model: "base", "merged", "expert" (every expert on its own task), a checkpoint folder, or weights such
            as `CalibrationResult.weights`.
        samples: per task; None takes the whole split.

    Raises:
        InputError: no such split, no labels or class names, or a base without a text tower.
    """
    family = as_family(suite, device)
    weights = None if model == "expert" else family.model(model) if isinstance(model, str) else model
    data = {task: labelled(family, task, split, samples, seed) for task in family.suite.tasks}
    heads = heads_for(family, data)
    scores = {}
    for done, (task, drawn) in enumerate(data.items()):
        progress("evaluating", done, len(data))
        scores[task] = score(family, weights or family.experts[task], drawn, heads[task])
    progress("evaluating", len(data), len(data))
    label = model if isinstance(model, str) else model.label
    return Scores(family.suite.name, label, split, scores)


def score(family: Family, model: Weights, drawn: Samples, head: ZeroShotHead) -> TaskScore:
    """Top-1 accuracy of one model on labelled samples."""
    batches = batches_of(drawn, BATCH_SIZE, family.compute.device)
    features = final_features(family.adapter, model, family.head(), batches, family.compute).float().cpu()
    predictions = head.logits(features).argmax(1)
    assert drawn.labels is not None
    value = float((predictions == drawn.labels).double().mean())
    return TaskScore("accuracy", value, predictions, drawn.labels)


def labelled(family: Family, task: str, split: str, samples: int | None, seed: int) -> Samples:
    """Samples that can be scored; InputError if labels or class names are missing."""
    return require_labels(family.samples(task, split, samples, seed))


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


def heads_for(family: Family, data: Mapping[str, Samples]) -> dict[str, ZeroShotHead]:
    """Zero-shot heads of the tasks in `data`."""
    prompts = {task: (drawn.class_names or (), family.suite.tasks[task].templates) for task, drawn in data.items()}
    return zero_shot_heads(family.base_folder, prompts)

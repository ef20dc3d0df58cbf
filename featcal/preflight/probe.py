"""Find swapped experts by scoring every expert on every task, on a few samples each."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from featcal.evaluation.evaluate import accuracy
from featcal.evaluation.scoring_heads import class_names_by_task, head_of, prompt_heads, right_answers
from featcal.family.opening import Family
from featcal.samples.sources import Samples
from featcal.suite.schema import expert_role
from featcal.system.assignment import assign_columns
from featcal.system.errors import InputError, NoScores
from featcal.system.formatting import how_many, some

PROBE_SAMPLES = 64
DEVIATIONS = 3.0
"""Standard deviations by which another order of the experts must be better. The difference of two accuracies on n
samples has at most sqrt(0.5 / n): 0.27 is needed with 64 samples, 0.61 with 12."""


@dataclass(frozen=True)
class Diagonal:
    """Share of right first answers of every expert on every task."""

    accuracy: Mapping[str, Mapping[str, float]]
    """Shares, 0-1, by expert, then by task."""
    counts: Mapping[str, int]
    """Samples of every task."""
    splits: Mapping[str, str] = field(default_factory=dict)
    """Split of every task's samples."""

    @property
    def samples(self) -> int:
        """Return the fewest samples of a task."""
        return min(self.counts.values(), default=0)

    @property
    def test_looks(self) -> int:
        """Count the tasks whose test split was scored: each is a use of the final table's samples."""
        return sum(split == "test" for split in self.splits.values())

    @property
    def split_words(self) -> str:
        """Name the splits in words, such as "validation", or "validation (cars) and test (dogs)"."""
        tasks: dict[str, list[str]] = {}
        for task, split in self.splits.items():
            tasks.setdefault(split, []).append(task)
        if len(tasks) == 1:
            return next(iter(tasks))
        return " and ".join(f"{split} ({', '.join(names)})" for split, names in tasks.items())

    def to_json(self) -> dict[str, Any]:
        """Return the samples of the scores, for the document of `featcal check --json`."""
        return {"samples": self.samples, "scored_on": dict(self.splits), "test_looks": self.test_looks}

    def findings(self) -> tuple[list[str], list[str]]:
        """Return (problems, notes): swapped experts, and tasks on which another expert is better."""
        problems, notes, mixed = list[str](), self._looks(), set[str]()
        for cycle in self._cycles():
            gains = [self._gain(task, expert) for task, expert in cycle.items()]
            # Every swap must help, and all together by a clear margin: a single task may be won by chance.
            if min(gains) > 0 and sum(gains) > self._clear_margin(len(cycle)):
                mixed |= set(cycle)
                problems.append(self._describe_cycle(cycle))
        for task in self.accuracy:
            best = max(self.accuracy, key=lambda expert: self.accuracy[expert][task])
            if task not in mixed and self._gain(task, best) > self._clear_margin(1):
                notes.append(
                    f"{expert_role(task)}: the expert of '{best}' does its task better ({self._compare(task, best)} of "
                    f"{self.counts[task]} samples right); is it the right file?"
                )
        return problems, notes

    def _looks(self) -> list[str]:
        looked = [task for task, split in self.splits.items() if split == "test"]
        if not looked:
            return []
        size = how_many(self.counts[task] for task in looked)
        return [
            f"experts were scored on {size} test samples of {some(looked)}, for want of labels in "
            "validation and calibration samples: that is a look at the test split; --no-probe leaves it out"
        ]

    def _cycles(self) -> list[dict[str, str]]:
        """Find the differences between the suite and the assignment of experts with most right answers: {task: expert}
        of every set of experts that change places."""
        names = list(self.accuracy)
        wrong = [[1 - self.accuracy[expert][task] for expert in names] for task in names]
        best = {task: names[expert] for task, expert in zip(names, assign_columns(wrong), strict=True)}
        cycles = []
        while best:
            task = next(iter(best))
            cycle = {}
            while task in best:
                cycle[task] = best.pop(task)
                task = cycle[task]
            if len(cycle) > 1:
                cycles.append(cycle)
        return cycles

    def _describe_cycle(self, cycle: Mapping[str, str]) -> str:
        names = [f"'{task}'" for task in cycle]
        how = "; ".join(f"on '{task}' {self._compare(task, expert)}" for task, expert in cycle.items())
        what = "probably swapped" if len(cycle) == 2 else "probably mixed up"
        order = ", ".join(f"the expert of '{expert}' belongs to '{task}'" for task, expert in cycle.items())
        size = how_many(self.counts[task] for task in cycle)
        return f"experts {' and '.join(names)} are {what}: {order} ({how} of {size} samples right)"

    def _compare(self, task: str, expert: str) -> str:
        return f"{self.accuracy[expert][task]:.0%} against its own expert's {self.accuracy[task][task]:.0%}"

    def _gain(self, task: str, expert: str) -> float:
        return self.accuracy[expert][task] - self.accuracy[task][task]

    def _clear_margin(self, tasks: int) -> float:
        return DEVIATIONS * math.sqrt(0.5 * tasks / self.samples)


def measure_diagonal(family: Family, seed: int) -> Diagonal | None:
    """Score the experts of a family on each other's tasks; None with fewer than two tasks that have labels here.

    Raises:
        InputError, NumericalError: labels that do not fit a head, features that are not finite.
    """
    drawn = {task: one for task in family.experts if (one := _draw_labelled(family, task, seed)) is not None}
    if len(drawn) < 2:
        return None
    names = class_names_by_task(drawn)
    shared = {} if family.adapter.reads_prompts else prompt_heads(family, names, dict.fromkeys(names, family.merged))
    right: dict[str, dict[str, float]] = {}
    for expert in drawn:
        weights, right[expert] = family.experts[expert], {}
        # Every expert has a text tower of its own, so class prompts are encoded anew for each.
        if family.adapter.reads_prompts:
            shared = prompt_heads(family, names, dict.fromkeys(names, weights))
        for task, samples in drawn.items():
            head = head_of(family, weights, task, shared.get(task))
            right[expert][task] = accuracy(family, weights, samples, head).value
    splits = {task: one.split for task, one in drawn.items()}
    return Diagonal(right, {task: len(one) for task, one in drawn.items()}, splits)


def _draw_labelled(family: Family, task: str, seed: int) -> Samples | None:
    """Draw samples with answers; from the test split only if no other split has them."""
    # Experts are scored as they are, untouched by calibration, so its samples are as good as others.
    for split in ("validation", "calibration", "test"):
        if family.suite.task(task).source(split) is None:
            continue
        try:
            drawn = family.samples(task, split, PROBE_SAMPLES, seed)
            right_answers(family, family.experts[task], drawn)
        except NoScores:
            continue
        except InputError:  # the check of the samples says why
            return None
        return drawn
    return None

"""Check the sources of every task: whether they open, fit the model and their limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from featcal.evaluation.language import note_unreachable, right_numbers
from featcal.evaluation.scoring_heads import answers_of, check_classes, right_answers
from featcal.family.opening import Family
from featcal.models.adapter import Adapter, Batch
from featcal.preflight.models import CheckFindings
from featcal.preflight.places import Places
from featcal.preflight.remote_data import DrawnRows
from featcal.samples.pool import Pool
from featcal.samples.sources import Samples, drawn_rows, longest_text, name_problems, open_pool, rows_in_order
from featcal.suite.calibration_options import CalibrationConfig
from featcal.suite.schema import SPLITS, Suite, Task
from featcal.suite.source import SelfGenerated, Source
from featcal.system.errors import InputError, NoScores
from featcal.system.formatting import some

PICTURES = 2
"""Pictures that are decoded to see that they can be; text is cheap, so all that calibration would draw is read."""


@dataclass(frozen=True)
class DrawSize:
    """Size of what calibration would draw of a task."""

    samples: int
    tokens: float
    """Tokens of a sample in all stages together, padding included."""
    bytes: float
    """Bytes of a sample's inputs to the model."""

    @classmethod
    def measure(cls, adapter: Adapter, inputs: Batch, few: int, samples: int) -> DrawSize:
        """Estimate the inputs of a draw, given its number of samples, from the inputs of a few of them."""
        return cls(samples, adapter.tokens(inputs) / few, sum(one.nbytes for one in inputs.values()) / few)


def check_samples(
    suite: Suite, family: Family | None, places: Places, config: CalibrationConfig
) -> tuple[dict[str, CheckFindings], Mapping[str, DrawSize]]:
    """Open every source and draw some samples; return the findings by task, and the size of the draws.

    Args:
        family: None if the models cannot be opened; then sources are opened, but nothing is drawn.
    """
    reports = {task: CheckFindings() for task in suite.tasks}
    sizes: dict[str, DrawSize] = {}
    for task, report in reports.items():
        for split in SPLITS:
            try:
                notes, drawn = _check_source(suite, family, places, config, task, split)
            except InputError as error:
                report.problems += error.problems
                continue
            report.notes += notes
            if drawn is not None:
                sizes[task] = drawn
    return reports, sizes


def _check_source(
    suite: Suite, family: Family | None, places: Places, config: CalibrationConfig, task: str, split: str
) -> tuple[list[str], DrawSize | None]:
    """Return notes on one source of a task, and the size of its calibration draw; nothing if there is no source.

    Raises:
        InputError: it cannot be opened, or does not fit the model.
    """
    spec, label = suite.tasks[task], f"task '{task}', {split} samples"
    source = spec.source(split)
    if source is None:
        return [], None
    if source.self_generated is not None:
        if family is None:
            return [], None
        drawn = _plan_writing(family, task, source.self_generated, config.samples)
        return _few(label, source.self_generated.count, config.samples), drawn
    if not places.has_data(source, label, _plan_draw(source, split, config, task)):
        return [], None
    pool = open_pool(source, split, suite.root, label)
    if family is None:
        return [f"{label}: {note}" for note in pool.notes], None
    available = min(source.limit or pool.size, pool.size)
    few, copies = PICTURES, config.augment if split == "calibration" else 0
    seen = family.samples(
        task, split, min(config.samples, available) if pool.is_text else few, config.seed, copies=copies
    )
    classes = family.head_classes(task)
    is_regression = len(classes) == 1
    # Drawing does not ask for labels that fit the head; scores do, which a regression does not get.
    if not is_regression:
        check_classes(classes or None, seen)
    own = family.adapter.sentence_text
    notes = [f"{label}: {note}" for note in seen.notes]
    notes += [_note_truncation(label, seen, spec, longest_text(spec, own))] if seen.truncated else []
    if own is not None and own.max_seq_length not in (None, longest_text(spec, own)):
        notes.append(
            f"{label}: texts are cut at {spec.max_length} tokens, the suite file's max_length; the model's own files "
            f"say {own.max_seq_length}, which encode() of sentence-transformers takes"
        )
    if split != "calibration" and is_regression:
        return [*notes, f"{label}: the expert's head has one output, a regression, which is not scored"], None
    if split != "calibration":
        return [*notes, *_check_answers(family, task, pool, seen)], None
    drawn = DrawSize.measure(family.adapter, seen.inputs, len(seen), min(config.samples, available) * (1 + copies))
    return [*notes, *_few(label, available, config.samples)], drawn


def _check_answers(family: Family, task: str, pool: Pool, seen: Samples) -> list[str]:
    """Return notes on the right answers of a split that is scored.

    Args:
        seen: some of its samples.

    Raises:
        InputError: labels without a class, or texts or answers that cannot be read.
    """
    label, spec = f"task '{task}', {seen.split} samples", family.suite.task(task)
    scored, names = family.head_classes(task) or spec.classes, pool.class_names
    if isinstance(pool.labels, np.ndarray) and len(pool.labels):
        most, classes = int(pool.labels.max()), names or scored
        if classes and most >= len(classes):
            raise InputError(f"{label}: label {most} has no class, there are {len(classes)} ({some(classes)})")
    if task not in family.experts:
        return []
    is_ranked = seen.second is not None or spec.metric == "spearman"
    try:
        if seen.second is None:
            right_answers(family, family.experts[task], seen)
    except NoScores as error:
        return [f"{error}; it cannot be scored"]
    source = spec.source(seen.split)
    if pool.texts is None or pool.prepare is not None or source is None:
        return []
    with name_problems(label):
        every = pool.texts(drawn_rows(pool.size, source.limit, None, 0, task))
        if is_ranked:
            right_numbers([one.target or "" for one in every])
    if is_ranked or answers_of(family, family.experts[task], task) == "classes":
        return []
    return [f"{label}: {note}" for note in note_unreachable(family, seen, spec.max_target_length)]


def _plan_draw(source: Source, split: str, config: CalibrationConfig, task: str) -> DrawnRows | None:
    """Return a function that gives the rows of a calibration draw, the rows of smaller draws first; None for a split to
    score, which uses all rows."""
    if split != "calibration":
        return None
    return lambda size: rows_in_order(size, source.limit, config.samples, config.seed, task)


def _plan_writing(family: Family, task: str, source: SelfGenerated, wanted: int) -> DrawSize:
    """Return the largest size of an expert's texts, without generating them.

    Raises:
        InputError: prompts that cannot be read.
    """
    longest = max(len(prompt) for prompt in family.prompts(task, "calibration")) + source.tokens
    return DrawSize(min(wanted, source.count), longest, 3 * 8 * longest)  # ids, mask and the mask of the answer


def _note_truncation(label: str, drawn: Samples, spec: Task, longest: int) -> str:
    limits = f"max_length {longest}"
    if "labels" in drawn.inputs:
        limits += f", max_target_length {spec.max_target_length}"
    return (
        f"{label}: {drawn.truncated} of {len(drawn)} are longer than the task's limits ({limits} tokens) and are cut; "
        "raise the limits to keep them whole"
    )


def _few(label: str, available: int, wanted: int) -> list[str]:
    """Note where a task has fewer samples than calibration asks for."""
    note = f"{label}: all {available} will be used, fewer than the {wanted} of this suite's options"
    return [] if available >= wanted else [note]

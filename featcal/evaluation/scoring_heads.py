"""Choose the head that scores a model on a task, and the right answers.

A model's own head for the task comes first, else the head of its architecture (`Adapter.scores_with`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from featcal.evaluation.heads import CosineHead, LinearHead, stored_head
from featcal.evaluation.language import first_answers
from featcal.family.opening import Family
from featcal.formats.located_model import Located
from featcal.formats.weights import Weights
from featcal.models.adapter import Adapter, Answers
from featcal.models.model import Head, own_head
from featcal.samples.class_names import ClassList, match_names
from featcal.samples.prompts import class_prompts
from featcal.samples.sources import Samples
from featcal.system.errors import InputError, NoScores
from featcal.system.formatting import some


def judges(family: Family, model: Weights, drawn: Mapping[str, Samples]) -> dict[str, tuple[Head, Head, Tensor]]:
    """Return, for every task, the expert's head, the model's head and the right class or first token of every sample.

    Raises:
        NoScores: labels, answers, class names, a text tower or a head are missing, or a task has fewer than two
            classes.
        InputError: the two heads score different classes, or classes that do not fit the labels.
    """
    right = {task: right_answers(family, model, one) for task, one in drawn.items()}
    return {task: (*both, right[task]) for task, both in pairs_of_heads(family, model, drawn).items()}


def require_one_scale(task: str, expert: Head, own: Head) -> None:
    """Raise NoScores for heads whose scores cannot be subtracted: a map that was folded into class prompts has left out
    the division by the norm, which changes no decision."""
    if isinstance(expert, CosineHead) != isinstance(own, CosineHead):
        raise NoScores(
            f"task '{task}': the model's head is a table that a map was folded into, without the norm that the "
            "expert's cosines are divided by, so their scores cannot be subtracted; measure the model by its name, "
            "such as react@calibrated"
        )


def pairs_of_heads(family: Family, model: Weights, drawn: Mapping[str, Samples]) -> dict[str, tuple[Head, Head]]:
    """Return the expert's head and the model's head for every task; labels are not needed.

    Raises:
        InputError: class names, a text tower or a head are missing, a task has fewer than two classes, or the two
            heads score different ones.
    """
    experts = family.experts
    complete = {task for task in drawn if own_head(model, task) and own_head(experts[task], task)}
    names = class_names_by_task({task: one for task, one in drawn.items() if task not in complete})
    # With a text tower of its own, each model makes its own prompts' features; otherwise all share the base's.
    of_model = prompt_heads(family, names, dict.fromkeys(names, model))
    of_experts = prompt_heads(family, names, experts) if family.adapter.reads_prompts else of_model
    found: dict[str, tuple[Head, Head]] = {}
    for task, one in drawn.items():
        expert = head_of(family, experts[task], task, of_experts.get(task))
        own = head_of(family, model, task, of_model.get(task))
        counts = [None if head.classes is None else len(head.classes) for head in (expert, own)]
        if counts[0] != counts[1]:
            raise InputError(f"task '{task}': the head of {model.label} does not score the classes of the expert's")
        if counts[0] is not None and counts[0] < 2:
            raise NoScores(f"task '{task}': a margin needs at least two classes")
        for head in (expert, own):
            check_classes(head.classes, one)
        found[task] = expert, own
    return found


def head_of(family: Family, model: Weights, task: str, prompted: Head | None = None) -> Head:
    """Return the head that turns a model's final features into scores of a task.

    Args:
        model: any of the family; an expert may be asked for the task of another.
        prompted: from `prompt_heads`, for a task that has one.

    Raises:
        NoScores: there is no head for the task.
    """
    own, scores_with = own_head(model, task), family.adapter.scores_with
    if own is not None:
        return own
    if scores_with == "vocabulary":
        return vocabulary_head(family.adapter, model)
    if scores_with == "prompts":
        if prompted is None:
            raise no_class_names(task)
        return prompted
    theirs = experts_head(family, task)
    if theirs is None:
        maps = f" (no {' and '.join(family.adapter.classifier)} in its files)" if family.adapter.classifier else ""
        raise NoScores(
            f"task '{task}': {model.label} has no head for it, nor has the task's expert{maps}; "
            f"give Model(weights, heads={{'{task}': ClassificationHead(weight, bias)}})"
        )
    return theirs


def experts_head(family: Family, task: str) -> Head | None:
    """Return the head of a task's expert: its own as a model, else one in its files; None if it has none.

    Raises:
        NoScores: a head with one output, which cannot distinguish classes.
    """
    expert, maps = family.experts[task], family.adapter.classifier
    own = own_head(expert, task)
    if own is not None or not maps:
        return own
    stored = stored_head(family.adapter, expert, family.head_classes(task))
    if stored is not None and len(stored.classes or ()) < 2:
        raise NoScores(f"task '{task}': the expert's {maps[-1]} has one output, a regression, which is not scored")
    return stored


def answers_of(family: Family, model: Weights, task: str) -> Answers:
    """Return the kind of a model's decisions on a task: classes or text."""
    own = own_head(model, task)
    if own is None:
        return family.adapter.answers
    return "text" if own.classes is None else "classes"


def prompt_heads(family: Family, names: Mapping[str, Sequence[str]], models: Mapping[str, Weights]) -> dict[str, Head]:
    """Make heads from class prompts, if the architecture has them; models share them unless each has a text tower.

    Args:
        names: of the classes, by task; prompts combine these with the suite's templates.
        models: the models of the heads, by task.

    Raises:
        NoScores: the base has no text tower, or no tokenizer.
        InputError: a tokenizer that cannot be used.
    """
    adapter, found = family.adapter, dict[str, Head]()
    if adapter.scores_with != "prompts" or not names:
        return found
    prompts = {task: (own, family.suite.tasks[task].templates) for task, own in names.items()}
    if not adapter.reads_prompts:
        return {**zero_shot_heads(adapter, family.origin, prompts)}
    # One encoder per model, not per task: opening a text tower takes longer than its prompts.
    for model in {id(models[task]): models[task] for task in names}.values():
        of_model = {task: prompts[task] for task in names if models[task] is model}
        found |= zero_shot_heads(adapter, family.origin, of_model, model)
    return found


@torch.no_grad()
def zero_shot_heads(
    adapter: Adapter,
    base: Located,
    tasks: Mapping[str, tuple[Sequence[str], Sequence[str]]],
    model: Weights | None = None,
) -> dict[str, CosineHead]:
    """Make heads from (class names, templates): fill all, encode, normalise, average over templates, normalise.

    Args:
        model: its text tower makes them, if text towers are merged too; otherwise the base's does.

    Raises:
        NoScores: the base has no text tower, or no tokenizer.
        InputError: a tokenizer that cannot be used.
    """
    encode, scale = adapter.prompt_encoder(base) if model is None else adapter.prompt_encoder_of(base, model)
    heads = {}
    for task, (class_names, templates) in tasks.items():
        texts = class_prompts(class_names, templates)
        unit = torch.nn.functional.normalize(encode(texts), dim=-1)
        mean = unit.reshape(len(class_names), len(templates), -1).mean(1)
        heads[task] = CosineHead(torch.nn.functional.normalize(mean, dim=-1), scale, tuple(class_names))
    return heads


def vocabulary_head(adapter: Adapter, model: Weights) -> LinearHead:
    """Return the language-modelling head of one model, which may be tied to its embedding."""
    (name,) = adapter.scoring
    return LinearHead(lambda: model.read([name])[name], adapter.scale, adapter.softcap)


def class_names_by_task(drawn: Mapping[str, Samples]) -> dict[str, tuple[str, ...]]:
    """Return class names by task, of the tasks whose samples have them."""
    return {task: one.class_names for task, one in drawn.items() if one.class_names is not None}


def right_answers(family: Family, model: Weights, drawn: Samples) -> Int[Tensor, " n"]:
    """Return the right class of every sample, or the first token of its answer if the model answers with text.

    Raises:
        NoScores: no labels, no answers, or no class names for prompts.
    """
    if answers_of(family, model, drawn.task) == "text":
        return first_answers(drawn)
    if drawn.second is not None:
        raise NoScores(f"task '{drawn.task}': pairs of texts have no classes; all of them together are scored by rank")
    if drawn.labels is None:
        why = f" ({'; '.join(drawn.notes)})" if drawn.notes else ""
        raise NoScores(
            f"task '{drawn.task}', {drawn.split} samples: no labels to score against; name them in the source{why}"
        )
    prompted = family.adapter.scores_with == "prompts" and own_head(model, drawn.task) is None
    if prompted and drawn.class_names is None:
        raise no_class_names(drawn.task)
    return drawn.labels


def no_class_names(task: str) -> NoScores:
    """Make the error for a task without class names for prompts."""
    return NoScores(f"task '{task}': no class names for the zero-shot head; give 'classes' in the suite file")


def check_classes(scored: Sequence[str] | None, drawn: Samples) -> None:
    """Raise InputError if the classes of the labels differ from those of the scores, are in another order, or if there
    is a single one.

    Args:
        scored: names of the classes in the order of the scores; None for scores of tokens.
    """
    if drawn.labels is None or scored is None:
        return
    task = f"task '{drawn.task}'"
    if len(scored) < 2:
        raise InputError(
            f"{task}: {some(scored)} is its only class, and every answer would be right; if its classes are folders in "
            "it, give that folder as the source"
        )
    if len(drawn) and int(drawn.labels.max()) >= len(scored):
        raise InputError(f"{task}: label {int(drawn.labels.max())} has no class, the head scores {len(scored)}")
    classes = drawn.classes()
    if classes is None:
        return
    found = match_names(classes, ClassList(tuple(scored), "the head"))
    if found.problem:
        raise InputError(f"{task}: {found.problem}")
    if found.places != tuple(range(len(found.places))):
        raise InputError(
            f"{task}: labels count {some(classes.names)}, the head scores {some(scored)}: the same classes in another "
            "order; give 'classes' and the rows of the head the same order"
        )

"""Describe Python objects (models and samples in memory, or references) as a suite file would."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypedDict

from featcal.suite.held_samples import COLUMN_OPTIONS, read_samples
from featcal.suite.methods import is_merger, merger_names
from featcal.suite.name_grammar import model_name
from featcal.suite.recipe import MergeRecipe
from featcal.system.errors import InputError
from featcal.system.formatting import did_you_mean, shorten
from featcal.system.in_memory import register_object

DEFAULT_MERGE = "task-arithmetic"
WHERE = "Suite.of"
"""Name of a suite of objects in messages."""


class SuiteOptions(TypedDict, total=False):
    """Keywords of `Suite.of` beside models, samples and classes."""

    name: str
    """Name of the suite in tables and cards; "suite" by default."""
    description: str
    validation: Mapping[str, Any] | None
    """Task → samples to measure on while options are chosen."""
    columns: Mapping[str, Any]
    """Meaning of the columns of rows, with the keys of a suite file: `{"input": "Is '{text}' good?", "target":
    "{answer}"}`; or a mapping from tasks to these."""
    task_options: Mapping[str, Mapping[str, Any]]
    """Task → its other keys in a suite file: templates, metric, max_length, max_target_length."""
    tokenizer: Any
    """Needed for a base in memory that reads texts, or whose classes are named by prompts."""
    processor: Any
    """Needed for a base in memory that reads pictures: an image processor, or a processor that holds one."""
    calibration: Mapping[str, Any]
    """Options of a calibration that the suite recommends."""
    vocabulary: str
    text_tower: str


class SuiteObjects(SuiteOptions, total=False):
    """All keywords of `Suite.of`."""

    base: Any
    experts: Mapping[str, Any]
    merged: Any
    samples: Mapping[str, Any] | None
    test: Mapping[str, Any] | None
    classes: Mapping[str, Any] | None


def describe_objects(given: SuiteObjects) -> tuple[dict[str, Any], tuple[Any, ...]]:
    """Return the content of a suite file for some objects (`Suite.of`), and the objects that must stay alive while the
    suite is used.

    Raises:
        InputError: objects of another kind.
    """
    _require_known("keyword", given, SuiteObjects.__annotations__)
    if not isinstance(given.get("experts"), Mapping) or not given["experts"]:
        raise InputError(f"{WHERE}: experts is a mapping from tasks to models, as in experts={{'cars': model}}")
    held: list[Any] = []
    tools, without_base = _tools(given), "base" in given and given["base"] is None
    experts = {str(task): model for task, model in given["experts"].items()}
    content: dict[str, Any] = {
        "name": given.get("name", "suite"),
        "base": None if without_base else _refer(given.get("base"), "base", held, tools),
        "tasks": {task: {"expert": _refer(one, f"expert '{task}'", held)} for task, one in experts.items()},
    }
    merged = given.get("merged", DEFAULT_MERGE)
    content["merged"] = _describe_merged(merged, content["tasks"], held, tools if without_base else ())
    for option in ("description", "calibration", "vocabulary", "text_tower"):
        content |= {option: given[option]} if option in given else {}
    for split, samples in _splits(given):
        for task in _known_tasks(samples, content["tasks"], f"{split} samples"):
            label = f"task '{task}', {split} samples"
            source, thing = read_samples(samples[task], _columns_of(given, task, experts), label)
            content["tasks"][task][split] = source
            held.append(thing)
    classes = given.get("classes") or {}
    for task in _known_tasks(classes, content["tasks"], "classes"):
        if isinstance(classes[task], str) or not isinstance(classes[task], Iterable):
            raise InputError(f"{WHERE}: classes of '{task}' are {shorten(repr(classes[task]))}; give a list of names")
        content["tasks"][task]["classes"] = [str(name) for name in classes[task]]
    for task in _known_tasks(given.get("task_options"), content["tasks"], "task_options"):
        options = _require_mapping(given["task_options"][task], f"task_options of '{task}'", "{'max_length': 64}")
        if twice := sorted(options.keys() & content["tasks"][task].keys()):
            raise InputError(f"{WHERE}: task_options of '{task}': {twice[0]} is a separate keyword; leave it out here")
        content["tasks"][task] |= options
    return content, tuple(held)


def _refer(given: Any, label: str, held: list[Any], tools: tuple[Any, ...] = ()) -> str:
    """Return the reference to a model; one in memory is kept alive from now on."""
    if given is None:
        raise InputError(f"{WHERE}: {label} is needed: a PreTrainedModel, a folder or an id on the Hub")
    if isinstance(given, str | Path):
        if tools:
            raise InputError(
                f"{WHERE}: tokenizer and processor are for a base in memory; '{given}' has its own beside it, so leave "
                "them out"
            )
        return str(given)
    # Imported here alone: the module needs torch, which reading a suite file does not.
    from featcal.formats.in_memory import HeldModel

    model = HeldModel(given, label, tools)
    held.append(model)
    return register_object(model)


def _tools(given: SuiteObjects) -> tuple[Any, ...]:
    """Return tokenizer and processor, in an order in which a separate tokenizer replaces the processor's."""
    own = (given.get("processor"), given.get("tokenizer"))
    return tuple(one for one in own if one is not None)


def _describe_merged(
    given: Any, tasks: Mapping[str, Mapping[str, Any]], held: list[Any], tools: tuple[Any, ...]
) -> Any:
    """Describe the merged model as a suite file would: a reference or a recipe.

    Raises:
        InputError: an object of another kind, or the result of a `merge` of other experts.
    """
    recipe = getattr(given, "recipe", given)
    if isinstance(recipe, MergeRecipe):
        of = {} if given is recipe else {task: spec.expert for task, spec in given.family.suite.tasks.items()}
        # The recipe is run on the experts given here, and would make another model of others.
        if of and of != {task: spec["expert"] for task, spec in tasks.items()}:
            raise InputError(
                f"{WHERE}: merged: it was merged from other experts ({', '.join(of)}), or under other names; "
                "give its to_model(), or the recipe alone"
            )
        return recipe.model_dump()
    if isinstance(given, Mapping):
        return dict(given)
    kind = given.partition(":")[0] if isinstance(given, str) else ""
    if kind and not is_merger(kind) and not Path(given).exists() and (near := did_you_mean(kind, merger_names())):
        raise InputError(f"{WHERE}: merged: '{shorten(given)}' is neither a folder nor a merge method.{near}")
    if is_merger(kind):
        name = model_name(given)
        return {"method": name.kind, **dict(name.options)}
    return _refer(given, "merged", held, tools)


def _splits(given: SuiteObjects) -> Iterator[tuple[str, Mapping[str, Any]]]:
    named = {"calibration": given.get("samples"), "validation": given.get("validation"), "test": given.get("test")}
    yield from ((split, samples) for split, samples in named.items() if samples is not None)


def _known_tasks(given: Any, tasks: Mapping[str, Any], what: str) -> list[str]:
    """Return the tasks of a mapping.

    Raises:
        InputError: it is not a mapping, or has a task without an expert.
    """
    if given is None:
        return []
    _require_mapping(given, what, f"{{'{next(iter(tasks))}': …}}")
    unknown = [task for task in given if task not in tasks]
    if unknown:
        raise InputError(
            f"{WHERE}: {what} of '{unknown[0]}', for which there is no expert; there are {', '.join(tasks)}."
            f"{did_you_mean(str(unknown[0]), tasks)}"
        )
    return list(given)


def _require_mapping(given: Any, what: str, example: str) -> Mapping[str, Any]:
    if not isinstance(given, Mapping):
        raise InputError(f"{WHERE}: {what} is a {type(given).__name__}; give a mapping, such as {example}")
    return given


def _require_known(what: str, given: Iterable[str], known: Collection[str]) -> None:
    unknown = [str(name) for name in given if name not in known]
    if unknown:
        raise InputError(
            f"{WHERE}: there is no {what} '{unknown[0]}', only {', '.join(known)}.{did_you_mean(unknown[0], known)}"
        )


def _columns_of(given: SuiteObjects, task: str, tasks: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the meaning of the columns of a task's rows: its own, or those of all tasks.

    Raises:
        InputError: an option that columns do not have.
    """
    columns = _require_mapping(given.get("columns") or {}, "columns", "{'input': '{text}'}")
    if columns and all(isinstance(one, Mapping) and name in tasks for name, one in columns.items()):
        columns = columns.get(task, {})
    _require_known("option of columns", columns, COLUMN_OPTIONS)
    return columns

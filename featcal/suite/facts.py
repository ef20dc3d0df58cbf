"""Describe the origin of a suite, for records that other people read."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from featcal.formats.hub import RECIPE_FILE
from featcal.suite.schema import SPLITS, Suite, load_suite, references
from featcal.system.errors import InputError
from featcal.system.fingerprints import json_digest
from featcal.system.in_memory import is_held
from featcal.system.resources import embedded_suites, ready_suites


def shipped_suites() -> list[dict[str, Any]]:
    """Return the suites that come with featcal, as `featcal suite list --json` prints them: embedded ones, with their
    models and samples, and those of the Hub."""
    files = {"embedded": embedded_suites(), "hub": ready_suites()}
    loaded = [(where, load_suite(name)) for where, names in files.items() for name in names]
    return [
        {"name": one.name, "where": where, "description": one.description, "tasks": list(one.tasks)}
        for where, one in loaded
    ]


def suite_facts(suite: Suite) -> dict[str, Any]:
    """Return facts that identify a suite: `shipped`, its name if it comes with featcal, else None; `name`, that of its
    file; `sha256` of each of its parts; and `in_memory`, the models and samples that were given as Python objects.

    No folder is named, so a record can be published. Hashes cover the meaning of a suite file, not its layout: comments
    and the order of options do not change them.
    """
    content = suite.model_dump(mode="json", exclude_none=True)
    tasks = content.pop("tasks")
    parts = content | {f"tasks.{name}": task for name, task in tasks.items()}
    hashes = {name: json_digest(part) for name, part in parts.items()}
    found: dict[str, Any] = {"shipped": _find_shipped_name(suite), "sha256": hashes}
    found |= {"name": suite.file_name} if suite.file_name else {}
    return found | ({"in_memory": held} if (held := list(parts_in_memory(suite))) else {})


def ask_for_suite(name: str, file_name: str | None) -> str:
    """Return a sentence that asks for the suite of a record, if it does not come with featcal.

    Args:
        name: the suite's own name.
        file_name: that of its file, if the record has it.
    """
    if file_name == RECIPE_FILE:
        return (
            f"it was merged by the recipe {RECIPE_FILE} beside it; make a suite file of that with "
            f"`featcal suite import {RECIPE_FILE} --out suite.yaml`, and name it with --suite"
        )
    file = f" {file_name}" if file_name else ""
    if name in {**embedded_suites(), **ready_suites()}:
        return (
            f"its suite is a file{file} of its own, and not the suite '{name}' that comes with featcal; name that file "
            "with --suite"
        )
    return f"its suite '{name}' does not come with featcal; name its file{file} with --suite"


def parts_in_memory(suite: Suite) -> Iterator[str]:
    """Yield the models and samples of a suite that were given as Python objects, as messages name them."""
    yield from (role for role, reference in references(suite).items() if is_held(reference))
    for name, task in suite.tasks.items():
        sources = {split: task.source(split) for split in SPLITS}
        held = [split for split, one in sources.items() if one is not None and is_held(getattr(one, one.kind))]
        yield from (f"task '{name}', {split} samples" for split in held)


def _find_shipped_name(suite: Suite) -> str | None:
    for name in (suite.name, *embedded_suites(), *ready_suites()):
        file = {**ready_suites(), **embedded_suites()}.get(name)
        # The same text in another folder is another suite: its relative paths lead elsewhere.
        if file is None or file.resolve().parent != suite.root:
            continue
        try:
            if _shipped_content(name) == suite.model_dump():
                return name
        except InputError:  # another one than this
            continue
    return None


@cache
def _shipped_content(name: str) -> dict[str, Any]:
    return load_suite(name).model_dump()

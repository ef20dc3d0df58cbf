"""A suite file in the making: out of a few fields, or of another file; it is text until it is written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from featcal.authoring.common import write_new
from featcal.authoring.recipes import import_recipe
from featcal.suite.schema import SPLITS, Suite, parse_yaml, read_yaml, suite_from_dict
from featcal.system.errors import InputError
from featcal.system.formatting import some

SPLIT_BY_NAME = ("hub", "arrays")
"""Kinds of samples whose one place holds all splits; of the others every split has a place of its own."""
KINDS = ("imagefolder", "parquet", "jsonl", "hub", "arrays", "catalogue")
"""Where samples of a drafted task may lie: in a folder or file of that kind, or where the task catalogue says."""


@dataclass(frozen=True)
class DraftTask:
    """One line of a form. Empty texts are what was not filled in.

    Args:
        where: the folder, file or Hub id of the samples; of the catalogue the entry's name.
        calibration, validation, test: of `SPLIT_BY_NAME` the split's name there, else the path below `where`.
        input, target: templates of text over the columns, such as `Is '{sentence}' positive?`; empty for pictures.
    """

    task: str
    expert: str
    kind: str = "imagefolder"
    where: str = ""
    calibration: str = ""
    validation: str = ""
    test: str = ""
    input: str = ""
    target: str = ""

    def content(self) -> dict[str, Any]:
        """The task as a suite file has it."""
        if self.kind == "catalogue":
            return {"use": self.where, "expert": self.expert}
        given = {split: name for split in SPLITS if (name := getattr(self, split))}
        return {"expert": self.expert, **{split: self._source(name) for split, name in given.items()}}

    def _source(self, name: str) -> dict[str, str]:
        text = {option: value for option in ("input", "target") if (value := getattr(self, option))}
        if self.kind in SPLIT_BY_NAME:
            return {self.kind: self.where, "split": name, **text}
        return {self.kind: str(Path(self.where) / name), **text}


def draft(name: str, base: str, merged: str | Mapping[str, Any], tasks: Iterable[DraftTask]) -> str:
    """The text of a suite file out of a form; lines without a task's name are passed over.

    Args:
        merged: a checkpoint, or a merge recipe's options.

    Raises:
        InputError: two lines of one task.
    """
    lines = [one for one in tasks if one.task]
    twice = {one.task for one in lines if [other.task for other in lines].count(one.task) > 1}
    if twice:
        raise InputError(f"two lines have the task {some(sorted(twice))}; give every task a name of its own")
    filled = {one.task: one.content() for one in lines}
    return format_suite({"name": name, "base": base, "merged": merged, "tasks": filled})


def format_suite(content: Mapping[str, Any]) -> str:
    """The content of a suite file as text, texts of several lines on one line in double quotes."""
    return str(yaml.dump(dict(content), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120))


class _Dumper(yaml.SafeDumper):
    def represent_str(self, data: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", data, style='"' if "\n" in data else None)


_Dumper.add_representer(str, _Dumper.represent_str)


def import_file(file: Path) -> tuple[str, list[str]]:
    """The text of a suite out of another file, and what is still to be said: a suite file as it is, a configuration of
    mergekit or a model pool of FusionBench as a suite.

    Raises:
        InputError: the file is none of them, or cannot be taken over; every reason is listed.
    """
    content = read_yaml(file)
    if isinstance(content, dict) and "tasks" in content and "base" in content:
        return file.read_text(encoding="utf-8"), []
    imported = import_recipe(file)
    return format_suite(imported.suite), [*imported.missing, *imported.notes]


def read_draft(text: str, out: Path) -> Suite:
    """The suite that a draft is so far; relative paths start from the folder of `out`, where it is to be written.

    Raises:
        InputError: no YAML, or not a valid suite file; the message says where.
    """
    content = parse_yaml(text, "draft")
    if not isinstance(content, dict):
        raise InputError("draft: a suite file is a mapping of keys to values, such as 'name: my-suite'")
    return suite_from_dict(content, out.parent, "draft")


def write_draft(text: str, out: Path) -> Suite:
    """Write a draft as a suite file and read it back as the command line will.

    Raises:
        InputError: as `read_draft`; or `out` is there already or cannot be written.
    """
    suite = read_draft(text, out)
    write_new(out, text)
    return suite

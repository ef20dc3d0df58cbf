"""Draft a suite file from a few fields, or from another file; the draft stays text until it is written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from featcal.authoring.common import write_new_file
from featcal.authoring.recipes import import_recipe
from featcal.suite.schema import SPLITS, Suite, load_suite, suite_from_dict
from featcal.system.errors import InputError
from featcal.system.formatting import some
from featcal.system.yaml_files import parse_yaml, read_yaml

SPLIT_BY_NAME = ("hub", "arrays")
"""Kinds of samples with one place for all splits; the other kinds have a place for every split."""
KINDS = ("imagefolder", "parquet", "jsonl", "hub", "arrays", "catalogue")
"""Kinds of places for the samples of a drafted task: a folder or file, the Hub, or an entry of the task catalogue."""


@dataclass(frozen=True)
class DraftTask:
    """One line of a form; empty texts are fields that were not filled in.

    Args:
        where: the folder, file or Hub id of the samples; for "catalogue" the entry's name.
        calibration, validation, test: for `SPLIT_BY_NAME` the split's name there, else the path below `where`.
        input, target: templates of text over the columns, such as `Is '{sentence}' positive?`; empty for pictures.
        conversation: the column with the turns of a conversation, in place of `input` and `target`.
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
    conversation: str = ""

    def content(self) -> dict[str, Any]:
        """Return the task in the form of a suite file."""
        if self.kind == "catalogue":
            return {"use": self.where, "expert": self.expert}
        given = {split: name for split in SPLITS if (name := getattr(self, split))}
        return {"expert": self.expert, **{split: self._source(name) for split, name in given.items()}}

    def _source(self, name: str) -> dict[str, str]:
        text = {option: value for option in ("input", "target", "conversation") if (value := getattr(self, option))}
        if self.kind in SPLIT_BY_NAME:
            return {self.kind: self.where, "split": name, **text}
        return {self.kind: str(Path(self.where) / name), **text}


def draft(name: str, base: str, merged: str | Mapping[str, Any], tasks: Iterable[DraftTask]) -> str:
    """Write the text of a suite file from a form; lines without a task's name are skipped.

    Args:
        merged: a checkpoint, or a merge recipe's options.

    Raises:
        InputError: two lines name the same task.
    """
    lines = [one for one in tasks if one.task]
    twice = {one.task for one in lines if [other.task for other in lines].count(one.task) > 1}
    if twice:
        raise InputError(f"two lines have the task {some(sorted(twice))}; give every task its own name")
    filled = {one.task: one.content() for one in lines}
    return format_suite({"name": name, "base": base, "merged": merged, "tasks": filled})


def format_suite(content: Mapping[str, Any]) -> str:
    """Write the content of a suite file as text; multi-line texts are on one line in double quotes."""
    return str(yaml.dump(dict(content), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120))


class _Dumper(yaml.SafeDumper):
    def represent_str(self, data: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", data, style='"' if "\n" in data else None)


_Dumper.add_representer(str, _Dumper.represent_str)


def import_file(file: Path, start: Path | None = None) -> tuple[str, list[str]]:
    """Convert another file into the text of a suite, with what is still to be filled in: a suite file stays unchanged,
    a configuration of mergekit or a model pool of FusionBench becomes a suite.

    Args:
        start: folder that relative paths start from; None searches them beside the file.

    Raises:
        InputError: the file is none of these, or cannot be converted; every reason is listed.
    """
    content = read_yaml(file)
    if isinstance(content, dict) and "tasks" in content and "base" in content:
        return file.read_text(encoding="utf-8"), []
    imported = import_recipe(file, start=start)
    return format_suite(imported.suite), [*imported.missing, *imported.notes]


def read_draft(text: str, out: Path) -> Suite:
    """Read an unfinished draft as a suite; relative paths start from the folder of `out`.

    Raises:
        InputError: not YAML, or not a valid suite file; the message says where.
    """
    content = parse_yaml(text, "draft")
    if not isinstance(content, dict):
        raise InputError("draft: a suite file is a mapping of keys to values, such as 'name: my-suite'")
    return suite_from_dict(content, out.parent, "draft")


def write_draft(text: str, out: Path) -> Suite:
    """Write a draft as a suite file and read it back as the command line would.

    Raises:
        InputError: not YAML, not a valid suite file, or `out` exists or cannot be written.
    """
    read_draft(text, out)
    write_new_file(out, text)
    return load_suite(out)

"""Share code between importers: reading a file, references to models, and the result type."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from featcal.system.atomic_files import put_new
from featcal.system.errors import InputError
from featcal.system.paths import local_path
from featcal.system.sandbox import require_inside, server_rules
from featcal.system.yaml_files import read_yaml


@dataclass(frozen=True)
class Imported:
    """A suite made from another tool's recipe."""

    suite: dict[str, Any]
    """Content of a suite file, keys in the usual order; it may lack entries that `missing` lists."""
    missing: tuple[str, ...]
    """Facts that a calibration needs and the recipe lacks, a line each."""
    notes: tuple[str, ...]
    """Differences of the suite from the recipe, a line each."""


def read_recipe(file: Path) -> dict[str, Any]:
    """Read a YAML file whose top level is a mapping.

    Raises:
        InputError: unreadable, not YAML, or not a single mapping.
    """
    content = read_yaml(file)
    if not isinstance(content, dict):
        raise InputError(f"{file}: the recipe of a merge is a mapping of keys to values")
    return content


def start_folders(beside: Path) -> list[Path]:
    """Return the folders in which relative paths of a recipe are searched: the working folder, as the other tools do,
    then `beside`, then the folders above it, because a recipe beside weights has paths from where its tool ran."""
    return [Path.cwd(), beside, *beside.absolute().parents]


def model_reference(path: str, revision: str | None, starts: Sequence[Path]) -> str:
    """Return a reference for a suite file: a folder as an absolute path, else unchanged, with the revision.

    Args:
        starts: folders that a relative path may start from, the first that has it counts. A shared server leaves such
            paths unchanged, so that it does not reveal where its files are.

    Raises:
        InputError: the path is impossible.
    """
    folders = (local_path(path, start, "the recipe's model") for start in ([] if server_rules() else starts))
    found = next((str(folder.resolve()) for folder in folders if folder.is_dir()), path)
    return found if revision is None else f"{found}@{revision}"


def task_names(references: Sequence[str]) -> list[str]:
    """Name every expert's task by the last part of its reference, with a number if two are equal."""
    names: list[str] = []
    for ref in references:
        last = ref.rpartition("+")[2].rstrip("/").rpartition("/")[2].partition("@")[0]
        numbered = (f"{last}-{number}" for number in range(2, len(references) + 2))
        names.append(last if last not in names else next(name for name in numbered if name not in names))
    return names


def samples_missing(tasks: Iterable[str]) -> list[str]:
    """Return the TODO line "calibration samples of …" for some tasks; an empty list for none."""
    names = ", ".join(tasks)
    ask = "say for each where they come from, such as 'calibration: {imagefolder: …}' or '{jsonl: …, input: …}'"
    return [f"calibration samples of {names}: {ask}"] if names else []


def comments(sections: Mapping[str, Sequence[str]]) -> str:
    """Write the head of a suite file as YAML comments: every title that has lines, with its lines."""
    return "".join(_comment(title, lines) for title, lines in sections.items() if lines)


def _comment(title: str, lines: Sequence[str]) -> str:
    wrapped = [textwrap.fill(line, 116, initial_indent="# - ", subsequent_indent="#   ") for line in lines]
    return "\n".join([f"# {title}", *wrapped]) + "\n"


def write_new_file(out: Path, text: str) -> None:
    """Write a file that must not exist yet.

    Raises:
        InputError: it exists, or cannot be written.
    """
    require_inside(out, "file", to_write=True)
    try:
        put_new(out, text)
    except FileExistsError as error:
        raise InputError(f"{out} already exists; choose another name or remove it") from error
    except UnicodeEncodeError as error:
        raise InputError(f"cannot write {out}: character {error.start} is not text") from error
    except OSError as error:
        raise InputError(f"cannot write {out}: {error.strerror}") from error

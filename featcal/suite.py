"""A suite: one base, one merged model, the task experts and where their samples come from.

A suite file is YAML; it is validated completely before anything is read or downloaded, unknown keys are
refused with a suggestion, and no file may name code to run.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, PrivateAttr, ValidationError, model_validator

from featcal.errors import InputError
from featcal.resources import embedded_suites

ModelRef = Annotated[str, Field(min_length=1)]
"""Folder (relative to the suite file) or Hub id, optionally with `@revision`."""

SPLITS = ("calibration", "validation", "test")
SOURCE_KINDS = ("embedded", "tensors", "arrays", "imagefolder")


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class MergeRecipe(_Strict):
    """Merge the experts on the fly instead of reading a merged checkpoint."""

    method: Literal["simple-averaging", "task-arithmetic"]
    scale: FiniteFloat | None = None
    """Factor of the summed task vectors; Task Arithmetic alone has one, 0.3 when left out."""

    @model_validator(mode="after")
    def _scale_belongs_to_task_arithmetic(self) -> MergeRecipe:
        if self.scale is not None and self.method != "task-arithmetic":
            raise ValueError(f"'scale' means nothing to {self.method}; remove it")
        return self


class Source(_Strict):
    """Where the samples of one split come from; exactly one of the four kinds is given."""

    embedded: str | None = None
    """Name of a task whose samples featcal renders itself."""
    tensors: str | None = None
    """safetensors file of preprocessed inputs `[n, 3, H, W]`; with `key`, and `labels` if it has any."""
    arrays: str | None = None
    """`.npz` with `train_x`, `train_y`, `test_x`, `test_y` (uint8 `[n, H, W, 3]`, int) and `class_names`."""
    imagefolder: str | None = None
    """Folder with one sub-folder of images per class."""

    key: str | None = None
    labels: str | None = None
    split: str | None = None
    limit: Annotated[int, Field(gt=0)] | None = None
    """Use only so many samples of the source, evenly spread over it."""

    @model_validator(mode="after")
    def _one_kind_with_its_options(self) -> Source:
        kinds = [kind for kind in SOURCE_KINDS if getattr(self, kind) is not None]
        if len(kinds) != 1:
            raise ValueError(f"give exactly one of {', '.join(SOURCE_KINDS)} (found {', '.join(kinds) or 'none'})")
        allowed = {"embedded": {"split"}, "tensors": {"key", "labels"}, "arrays": {"split"}, "imagefolder": set()}
        misplaced = {option for option in ("key", "labels", "split") if getattr(self, option) is not None}
        misplaced -= allowed[kinds[0]]
        if misplaced:
            raise ValueError(f"{', '.join(sorted(misplaced))} means nothing to a source of kind '{kinds[0]}'")
        if self.tensors is not None and self.key is None:
            raise ValueError("a 'tensors' source needs 'key', the name of the tensor in the file")
        return self

    @property
    def kind(self) -> str:
        return next(kind for kind in SOURCE_KINDS if getattr(self, kind) is not None)


class Task(_Strict):
    """One task: its expert, its samples and how its zero-shot head is built."""

    expert: ModelRef
    calibration: Source
    validation: Source | None = None
    test: Source | None = None
    classes: tuple[str, ...] | None = None
    """Class names in label order; left out, the source's own names are used."""
    templates: tuple[str, ...] = ("a photo of a {}.",)
    metric: Literal["accuracy"] = "accuracy"

    @model_validator(mode="after")
    def _templates_have_a_place(self) -> Task:
        without = [template for template in self.templates if "{}" not in template]
        if without or not self.templates:
            raise ValueError(f"templates need one {{}} where the class name goes (see {without or 'an empty list'})")
        return self

    def source(self, split: str) -> Source | None:
        """Source of `split`, one of `SPLITS`; None where the suite file gives none."""
        if split not in SPLITS:
            raise InputError(f"no split '{split}', only {', '.join(SPLITS)}.{did_you_mean(split, SPLITS)}")
        source: Source | None = getattr(self, split)
        return source


class Suite(_Strict):
    """A validated suite file. `root` is the folder that its relative paths start from."""

    name: Annotated[str, Field(min_length=1)]
    description: str = ""
    base: ModelRef
    merged: ModelRef | MergeRecipe
    tasks: Annotated[dict[str, Task], Field(min_length=1)]
    _root: Path = PrivateAttr(default=Path())

    @property
    def root(self) -> Path:
        return self._root

    def task(self, name: str) -> Task:
        """The task called `name`; InputError with a suggestion if there is none."""
        if name not in self.tasks:
            raise InputError(f"suite '{self.name}' has no task '{name}'.{did_you_mean(name, self.tasks)}")
        return self.tasks[name]

    def splits(self) -> tuple[str, ...]:
        """Splits that every task has, in the order calibration, validation, test."""
        return tuple(s for s in SPLITS if all(task.source(s) for task in self.tasks.values()))


def load_suite(name_or_path: str | Path) -> Suite:
    """Read an embedded suite by name, or a suite file by path.

    Raises:
        InputError: unknown name, unreadable or invalid YAML, unknown or missing keys (all of them at once).

    >>> load_suite("clip-mini").name
    'clip-mini'
    """
    embedded = embedded_suites()
    file = embedded.get(str(name_or_path), Path(name_or_path).expanduser())
    try:
        file = file / "suite.yaml" if file.is_dir() else file
        found = file.is_file()
    except OSError:  # not even a possible path
        found = False
    if not found:
        known = ", ".join(embedded) or "none"
        hint = did_you_mean(str(name_or_path), embedded)
        raise InputError(f"no suite '{name_or_path}': neither a file nor an embedded suite ({known}).{hint}")
    try:
        content = yaml.load(file.read_text(encoding="utf-8"), _UniqueKeyLoader)
    except (yaml.YAMLError, ValueError) as error:
        raise InputError(f"{file}: not valid YAML: {error}") from error
    except OSError as error:
        raise InputError(f"{file}: cannot be read: {error.strerror}") from error
    if not isinstance(content, dict):
        raise InputError(f"{file}: a suite file is a mapping with name, base, merged and tasks")
    return suite_from_dict(content, file.resolve().parent, str(file))


def suite_from_dict(content: dict[str, Any], root: Path, label: str = "suite") -> Suite:
    """Validate the content of a suite file; `root` anchors its relative paths, `label` names it in errors."""
    try:
        suite = Suite.model_validate(content)
    except ValidationError as error:
        problems = "\n".join(f"  {_place(e['loc'])}: {_explain(e)}" for e in error.errors())
        raise InputError(f"{label}: not a valid suite file\n{problems}") from error
    suite._root = root
    return suite


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML's safe subset, in which a key that stands twice is an error and not a silent loss of the first."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        twice = sorted({str(key) for key in keys if keys.count(key) > 1})
        if twice:
            raise yaml.YAMLError(f"'{', '.join(twice)}' stands twice{node.start_mark}")
        return super().construct_mapping(node, deep)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """' Did you mean …?' for the closest known word, or nothing."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" Did you mean '{close[0]}'?" if close else ""


def _place(loc: tuple[int | str, ...]) -> str:
    skip = {"MergeRecipe", "constrained-str"}
    return ".".join(str(part) for part in loc if str(part) not in skip) or "(top level)"


def _explain(error: Any) -> str:
    if error["type"] == "extra_forbidden":
        models: tuple[type[BaseModel], ...] = (Suite, Task, Source, MergeRecipe)
        known = sorted({field for model in models for field in model.model_fields})
        return f"unknown key.{did_you_mean(str(error['loc'][-1]), known)}"
    return str(error["msg"]).removeprefix("Value error, ")

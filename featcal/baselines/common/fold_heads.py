"""Fold maps of final features into the heads after them, so that ordinary files can hold them.

After f' = A f + b the first map of a head, W f' + c, is (W A) f + (W b + c): exactly the same scores, and no module.

- A classifier, or a pooler in front of one, is written under its own names in `heads/TASK.safetensors`, to be loaded
  over the model's; or, of one task, in a folder like that of its expert, which a library loads as it is.
- Class prompts become a table of classes, a linear classifier of final features as they are: its scores are those of
  the prompts times the norm of the mapped features, so they rank classes alike.
- Where final features are embeddings themselves, the map is a module `Dense` of sentence-transformers, with the files
  that it has, in `heads/TASK`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from featcal.baselines.react import AffineMap
from featcal.evaluation.evaluate import scoring_heads
from featcal.evaluation.heads import ClassificationHead, CosineHead, PooledHead, linear_head
from featcal.evaluation.scoring_heads import head_of
from featcal.family.opening import Family
from featcal.formats.checkpoint import SINGLE_FILE
from featcal.formats.hub import HEADS, RECORD_FILE
from featcal.formats.locate import checkpoint_folder, locate
from featcal.formats.located_model import Located
from featcal.formats.output import save_tensors, save_text
from featcal.formats.weights import Canonical, InMemory, Overlay, Stored, Weights
from featcal.models.model import FeatureMap, Head, Model
from featcal.suite.schema import expert_role
from featcal.system.errors import InputError
from featcal.system.formatting import some
from featcal.system.json_files import read_json
from featcal.system.sandbox import require_inside

_TABLE = ("classifier",)
"""Name of the linear map of a class table."""
_DENSE = "linear"


def fold_head(head: Head, one: AffineMap) -> ClassificationHead | PooledHead:
    """Return the head that gives unmapped features the scores of `head` after a map; for class prompts up to a positive
    factor, the same for all classes of a sample.

    Raises:
        InputError: a head that does not start with a linear map.

    >>> half = AffineMap(torch.eye(2) / 2, torch.ones(2))
    >>> found = fold_head(ClassificationHead(torch.tensor([[4.0, 0.0], [0.0, 2.0]])), half)
    >>> found.weight.tolist(), found.bias.tolist()
    ([[2.0, 0.0], [0.0, 1.0]], [4.0, 2.0])
    """
    match head:
        case PooledHead() | ClassificationHead():
            weight, bias = _compose(one, head.weight, head.bias)
            return replace(head, weight=weight, bias=bias)
        case CosineHead():
            # Cosine scores divide by the norm of f', which is one factor for all classes of a sample.
            return ClassificationHead(*_compose(one, head.scale * head.prompts, None), head.classes)
    raise InputError(f"a map of final features cannot be multiplied into a {type(head).__name__}")


def _compose(one: AffineMap, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return weight W A and bias W b + c of a linear map after an affine map A f + b, in the dtype of W."""
    # The product is rounded once, to the dtype of the file.
    wide, turn = weight.double(), one.weight.to(weight.device, torch.float64)
    shift = None if one.bias is None else wide @ one.bias.to(wide)
    if bias is not None:
        shift = bias.double() if shift is None else bias.double() + shift
    return (wide @ turn).to(weight.dtype), None if shift is None else shift.to(weight.dtype)


def foldable(model: Weights) -> Model | None:
    """Return the model if all its maps can be folded into heads, else None."""
    affine = isinstance(model, Model) and all(isinstance(one, AffineMap) for one in model.maps.values())
    return model if isinstance(model, Model) and affine and model.maps and not model.heads else None


def fold_heads(family: Family, model: Model, split: str) -> dict[str, ClassificationHead | PooledHead]:
    """Fold the map of every task into its head, if final features are not embeddings; return these heads.

    Args:
        split: gives the class names if the suite file has none.

    Raises:
        InputError: a task without a head, or whose head does not begin with a linear map.
    """
    shared = scoring_heads(family, split, dict.fromkeys(model.maps, model))
    return {
        task: fold_head(head_of(family, model, task, shared.get(task)), one)
        for task, one in model.maps.items()
        if isinstance(one, AffineMap)
    }


def write_heads(folder: Path, family: Family, model: Model, split: str) -> dict[str, list[str] | None]:
    """Write the files of every task below `folder`; return the names of its classes, in the order of the scores, or
    None without scores.

    Raises:
        InputError: the head of a task cannot take the map, or the disk is full or not writable.
    """
    if family.adapter.embeds:
        for task, one in model.maps.items():
            assert isinstance(one, AffineMap)
            _write_dense(folder / HEADS / task_file_name(task), one)
        return dict.fromkeys(model.maps)
    heads = fold_heads(family, model, split)
    (folder / HEADS).mkdir()
    for task, head in heads.items():
        save_tensors(_tensors(family, task, head), folder / HEADS / f"{task_file_name(task)}.safetensors")
    return {task: list(head.classes) for task, head in heads.items()}


@dataclass(frozen=True)
class _Headed(Overlay):
    """A stored model with another head."""

    under: Stored

    @property
    def leftovers(self) -> Mapping[str, Path]:
        return self.under.leftovers

    def repeats(self, stored: str, name: str) -> bool:
        return self.under.repeats(stored, name)


def locate_expert(family: Family, task: str) -> Located:
    """Return the files of a task's expert, for a replacement of its head.

    Raises:
        InputError: no such task, or an expert whose files are not a folder with a head of its own.
    """
    spec = family.suite.task(task)
    if not family.adapter.classifier:
        raise InputError(f"task '{task}': a {family.adapter.family} model has no head in its files; write all tasks")
    label = expert_role(task)
    return locate(str(checkpoint_folder(spec.expert, family.suite.root, label)), family.suite.root, label)


def locate_task(family: Family, model: Model, task: str, split: str) -> Located:
    """Return the files of a task's expert with the task's new head, for a model of this task only.

    Raises:
        InputError: no such task, an expert whose files are not a folder with a head of its own, or a head that cannot
            take the map.
    """
    located = locate_expert(family, task)
    tensors = _tensors(family, task, fold_heads(family, model, split)[task])

    def open_stored(canonical: Canonical, aliases: Mapping[str, str]) -> Stored:
        own = located.open(canonical, aliases)
        if missing := sorted(tensors.keys() - own.info.keys()):
            raise InputError(f"{located.label}: no {some(missing)} in {located.folder}, so its head has no place there")
        return _Headed(own.label, own, {name: tensor.to(own.info[name].dtype) for name, tensor in tensors.items()})

    return replace(located, open=open_stored)


def describe_heads(family: Family) -> str:
    """Describe, for a card, the files of heads and how to load them."""
    if family.adapter.embeds:
        return (
            f"Every folder in `{HEADS}` is a module Dense of sentence-transformers, to append after the pooling for "
            "texts of its task."
        )
    if family.adapter.classifier:
        return (
            f"`{HEADS}/TASK.safetensors` is the head of a task, fitted to the features of this model: "
            "`model.load_state_dict(load_file(…), strict=False)`, with as many labels as it has rows."
        )
    return (
        f"`{HEADS}/TASK.safetensors` is a linear classifier of this model's final features for a task, weight and bias "
        f"with a row per class; `{RECORD_FILE}` has the order of the classes."
    )


def with_heads(family: Family, model: Weights, located: Located) -> Weights:
    """Return a model with the heads and maps in its folder, for tasks of the suite; the model itself if there are none.

    Args:
        located: the located model.

    Raises:
        InputError: files that cannot be read.
    """
    folder = located.folder
    file = folder / RECORD_FILE
    if not (located.owns_folder and file.is_file()):
        return model
    require_inside(file, "record")
    listed: Any = read_json(file).get(HEADS)
    if not isinstance(listed, Mapping):
        return model
    heads: dict[str, Head] = {}
    maps: dict[str, FeatureMap] = {}
    for task in (task for task in family.suite.tasks if task in listed):
        if family.adapter.embeds:
            tensors = _read(folder / HEADS / task_file_name(task) / SINGLE_FILE, [f"{_DENSE}.weight", f"{_DENSE}.bias"])
            maps[task] = AffineMap(tensors[f"{_DENSE}.weight"], tensors[f"{_DENSE}.bias"])
            continue
        names = family.adapter.classifier or _TABLE
        tensors = _read(folder / HEADS / f"{task_file_name(task)}.safetensors", [f"{name}.weight" for name in names])
        found = linear_head(InMemory(str(folder), tensors), names, tuple(map(str, listed[task] or ())))
        assert found is not None
        heads[task] = found
    return Model(model, maps, heads)


def _tensors(family: Family, task: str, head: ClassificationHead | PooledHead) -> dict[str, Tensor]:
    """Return the tensors of a head by their names in files."""
    maps = [head, head.head] if isinstance(head, PooledHead) else [head]
    names = family.adapter.classifier or _TABLE
    if len(names) != len(maps):
        raise InputError(f"task '{task}': its head does not consist of {' and '.join(names)}, so no file can hold it")
    found: dict[str, Tensor] = {}
    for name, one in zip(names, maps, strict=True):
        found |= {f"{name}.{kind}": t for kind in ("weight", "bias") if (t := getattr(one, kind)) is not None}
    return found


def _write_dense(folder: Path, one: AffineMap) -> None:
    assert one.bias is not None
    outputs, inputs = one.weight.shape
    folder.mkdir(parents=True)
    activation = f"{torch.nn.Identity.__module__}.{torch.nn.Identity.__name__}"
    options = {"in_features": inputs, "out_features": outputs, "bias": True, "activation_function": activation}
    save_text(json.dumps(options, indent=2) + "\n", folder / "config.json")
    save_tensors({f"{_DENSE}.weight": one.weight.float(), f"{_DENSE}.bias": one.bias.float()}, folder / SINGLE_FILE)


def _read(file: Path, needed: list[str]) -> dict[str, Tensor]:
    """Read the tensors of a file.

    Raises:
        InputError: it cannot be read, or lacks some that are needed.
    """
    require_inside(file, "head")
    try:
        tensors: dict[str, Tensor] = load_file(file)
    except (OSError, SafetensorError) as error:
        raise InputError(f"{file} cannot be read: {error}; write the model again") from error
    if missing := [name for name in needed if name not in tensors]:
        raise InputError(f"{file} lacks {some(missing)}; write the model again")
    return tensors


def task_file_name(task: str) -> str:
    """Return a file name for a task that cannot lead out of its folder.

    >>> task_file_name("cars"), task_file_name("../cars")
    ('cars', '%2E.%2Fcars')
    """
    quoted = quote(task, safe=" ")
    return f"%2E{quoted[1:]}" if quoted.startswith(".") else quoted

"""Interpret the two files of a peft LoRA adapter: read its config and find a place for every tensor."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, FiniteFloat, PositiveInt, ValidationError, field_validator
from torch import Tensor

from featcal.formats.weights import Canonical, TensorInfo
from featcal.system.errors import InputError
from featcal.system.formatting import some
from featcal.system.json_files import read_json

CONFIG_FILE = "adapter_config.json"
WEIGHT_FILE = "adapter_model.safetensors"
PICKLED_WEIGHTS = "adapter_model.bin"
_REMEDY = "merge it into its base with peft's merge_and_unload, save that model and give its folder"
_UNKNOWN = f"tensors without a meaning in a LoRA that featcal can reproduce exactly; {_REMEDY}"
MODEL_PREFIX = "base_model.model."
"""What peft puts in front of the path of a module."""
_LINEAR = ("lora_A.weight", "lora_B.weight")
_EMBEDDING = ("lora_embedding_A", "lora_embedding_B")
_BIAS = "lora_B.bias"
_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_BASE_KEPT = (True, False, "gaussian", "eva", "orthogonal", "mica")
"""Initialisations that leave the base unchanged; with the others the adapter was trained against a changed base."""
_WITHOUT_EFFECT = {
    "task_type", "auto_mapping", "peft_version", "inference_mode", "runtime_config", "lora_dropout", "bias",
    "exclude_modules", "layers_to_transform", "layers_pattern", "ensure_weight_tying",
    "megatron_core", "qalora_group_size", "loftq_config", "eva_config", "corda_config", "lora_ga_config",
}  # fmt: skip
"""Options that do not change the meaning of the file's tensors; any other option that is set is refused."""


Number = TypeVar("Number", int, float)


class AdapterConfig(BaseModel):
    """The part of `adapter_config.json` that decides what the adapter's tensors mean."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)

    peft_type: str
    r: PositiveInt
    lora_alpha: FiniteFloat
    use_rslora: bool = False
    lora_bias: bool = False
    fan_in_fan_out: bool = False
    """Whether weights of linear maps are stored `[inputs, outputs]`, as in GPT-2."""
    init_lora_weights: bool | str = True
    rank_pattern: dict[str, PositiveInt] | None = None
    alpha_pattern: dict[str, FiniteFloat] | None = None
    target_modules: str | list[str] | None = None
    modules_to_save: list[str] | None = None
    """Modules that were trained whole, such as a classifier that the base does not have."""
    base_model_name_or_path: str | None = None
    revision: str | None = None

    @field_validator("rank_pattern", "alpha_pattern", "target_modules")
    @classmethod
    def _are_regular_expressions(cls, value: Any) -> Any:
        for pattern in [value] if isinstance(value, str) else value if isinstance(value, dict) else ():
            try:
                re.compile(_match_end(pattern))
            except re.error as error:
                raise ValueError(f"'{pattern}' is not a regular expression ({error})") from error
        return value

    def rank(self, module: str) -> int:
        """Return r of a module: that of the first pattern that matches, else the common one."""
        return _first_match(self.rank_pattern, module, self.r)

    def scale(self, module: str) -> float:
        """Return s = alpha / r, or alpha / √r for rsLoRA; both alpha and r may come from a pattern."""
        alpha, rank = _first_match(self.alpha_pattern, module, self.lora_alpha), self.rank(module)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def targets(self, module: str) -> bool:
        """Say whether `target_modules` covers a module: a regex for its whole name, or a list of endings."""
        if self.target_modules is None or self.target_modules == "all-linear":
            return True
        if isinstance(self.target_modules, str):
            return re.fullmatch(self.target_modules, module) is not None
        return any(f".{module}".endswith(f".{name}") for name in self.target_modules)

    def unsupported_options(self) -> list[str]:
        """Return every option of the config that changes what tensors mean and that is not reproduced here."""
        options = {name: value for name, value in (self.model_extra or {}).items() if name not in _WITHOUT_EFFECT}
        if self.init_lora_weights not in _BASE_KEPT:
            options["init_lora_weights"] = self.init_lora_weights
        return [f"{name} = {json.dumps(value)}" for name, value in options.items() if value]


@dataclass(frozen=True)
class Change:
    """The change that an adapter makes to one tensor; all names are those in the adapter file."""

    value: str | None = None
    """Tensor that replaces the base's."""
    factors: tuple[str, ...] = ()
    """Names of A and B, whose `scale · B A` is added, or of one tensor that is added `scale` times."""
    scale: float = 1.0
    transposed: bool = False
    """Whether the product is transposed before it is added: `[width, rows]` for an embedding `[rows, width]`, and for
    linear maps stored `[inputs, outputs]`."""

    @property
    def is_product(self) -> bool:
        """Say whether the change only adds B A to the base's own tensor."""
        return self.value is None and len(self.factors) == 2

    def stored_names(self) -> list[str]:
        return [*([] if self.value is None else [self.value]), *self.factors]

    def apply(self, start: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return `start`, the base's tensor, with the change made; all tensors have the dtype of the result."""
        if self.value is not None:
            start = tensors[self.value]
        if not self.factors:
            return start
        first, *second = (tensors[name] for name in self.factors)
        update = second[0].flatten(1) @ first.flatten(1) if second else first
        return start + self.scale * (update.T if self.transposed else update).reshape(start.shape)


def read_adapter_config(folder: Path, label: str) -> AdapterConfig:
    """Return the `adapter_config.json` of a peft folder.

    Raises:
        InputError: the file is missing or invalid, names another method than LoRA, or sets an option that is not
            reproduced.
    """
    file = folder / CONFIG_FILE
    whole = "; it is a whole model, give it without '+'" if (folder / "config.json").is_file() else ""
    missing = f"{label}: {folder} has no readable {CONFIG_FILE}, so it is not a peft adapter{whole}"
    content = read_json(file, f"{label}: {file}", missing)
    kind = content.get("peft_type")
    if kind != "LORA":
        raise InputError(f"{label}: {file} describes an adapter of type {kind}, featcal reads LORA; {_REMEDY}")
    try:
        config = AdapterConfig.model_validate(content)
    except ValidationError as error:
        where = [f"{'.'.join(map(str, e['loc']))}: {e['msg'].removeprefix('Value error, ')}" for e in error.errors()]
        raise InputError(*(f"{label}: {file}: {problem}" for problem in where)) from error
    if unsupported := config.unsupported_options():
        raise InputError(
            *(f"{label}: {file} sets {what}, which featcal cannot reproduce exactly; {_REMEDY}" for what in unsupported)
        )
    return config


def task_type(folder: Path) -> str:
    """Return what a peft folder was trained for, such as "SEQ_CLS"; "" if it does not say or cannot be read."""
    with suppress(InputError):
        return str(read_json(folder / CONFIG_FILE).get("task_type") or "")
    return ""


def weight_file(folder: Path, label: str) -> Path:
    """Return the adapter's safetensors file, else its pickle; raise InputError if there is neither."""
    for name in (WEIGHT_FILE, PICKLED_WEIGHTS):
        if (folder / name).is_file():
            return folder / name
    raise InputError(f"{label}: {folder} has no {WEIGHT_FILE}; give a folder that peft saved")


@dataclass
class Plan:
    """A plan that gives every tensor of an adapter file its place, or says why it has none."""

    header: Mapping[str, tuple[tuple[int, ...], str]]
    config: AdapterConfig
    base: Mapping[str, TensorInfo]
    canonical: Canonical
    shared: Collection[str]
    """Tensors of the base that several modules share, by canonical name."""
    changes: dict[str, Change] = field(default_factory=dict)
    added: dict[str, str] = field(default_factory=dict)
    """Canonical names of tensors that the base does not have → their names in the adapter file."""
    wrong: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    def fill(self) -> list[str]:
        """Fill `changes` and `added`, and return one message for each kind of problem."""
        modules: dict[str, dict[str, str]] = defaultdict(dict)
        whole: list[str] = []
        for key, (_, code) in self.header.items():
            # peft's state dicts carry the adapter's name, "default"; its saved files leave it out.
            plain = re.sub(r"\.default(?=\.weight$|\.bias$|$)", "", key)
            part = next((part for part in (*_LINEAR, *_EMBEDDING, _BIAS) if plain.endswith(f".{part}")), None)
            module = plain.removeprefix(MODEL_PREFIX).removesuffix(f".{part}")
            if code not in _FLOATS:
                self.wrong["adapter tensors that are not floating-point"].append(f"{key} ({code})")
            elif not key.startswith(MODEL_PREFIX) or (part and part in modules[module]):
                self.wrong[_UNKNOWN].append(key)
            elif part:
                modules[module][part] = key
            else:
                whole.append(key)
        for key in whole:
            self._replace(key, modules)
        for module, parts in modules.items():
            self._adapt(module, parts)
        return [f"{kind}: {some(keys)}" for kind, keys in self.wrong.items()]

    def _replace(self, key: str, modules: Mapping[str, Mapping[str, str]]) -> None:
        """Place a tensor that is stored whole: a bias, or part of a module in `modules_to_save`."""
        own = key.removeprefix(MODEL_PREFIX).replace(".modules_to_save.default.", ".")
        name = own.replace(".base_layer.", ".")
        if (own != name) != (name.rpartition(".")[0] in modules):  # peft would silently ignore it
            self.wrong[_UNKNOWN].append(key)
            return
        if self._is_added(name):
            self.added[str(self.canonical(name))] = key
            return
        target = self._target(name, key)
        if target and self._fits(key, self.base[target].shape):
            self._claim(target, key, Change(value=key))

    def _is_added(self, name: str) -> bool:
        """Say whether a tensor belongs to a module that was trained whole and that the base does not have."""
        saved = any(f".{module}." in f".{name}" for module in self.config.modules_to_save or ())
        target = self.canonical(name)
        return saved and target is not None and target not in self.base

    def _adapt(self, module: str, parts: Mapping[str, str]) -> None:
        """Place the low-rank update of one module."""
        pair = _EMBEDDING if _EMBEDDING[0] in parts else _LINEAR
        needed = {*pair, _BIAS} if self.config.lora_bias else {*pair}
        if parts.keys() != needed:
            found = f"{module} ({', '.join(sorted(parts))})"
            self.wrong[f"updates that are not made of {', '.join(sorted(needed))}"].append(found)
            return
        if not self.config.targets(module):
            self.wrong[f"updates of modules that target_modules in {CONFIG_FILE} does not name"].append(module)
            return
        first, second = parts[pair[0]], parts[pair[1]]
        scale = self.config.scale(module)
        if target := self._target(f"{module}.weight", first):
            weight = self.base[target].shape
            turned = pair is _EMBEDDING or (self.config.fan_in_fan_out and len(weight) == 2)
            shapes = _factor_shapes(weight, self.config.rank(module), turned)
            # A list and not `and`: both shapes are checked, so that both problems are reported.
            if all([self._fits(first, shapes[0]), self._fits(second, shapes[1])]):
                self._claim(target, first, Change(None, (first, second), scale, transposed=turned))
        bias = parts.get(_BIAS)
        if bias and (target := self._target(f"{module}.bias", bias)) and self._fits(bias, self.base[target].shape):
            self._claim(target, bias, Change(None, (bias,), scale))

    def _target(self, name: str, key: str) -> str | None:
        """Return the canonical name of the tensor that `key` changes; None if the base has none of its own for it."""
        target = self.canonical(name)
        if target is None or target not in self.base:
            self.wrong["tensors for which the base has none (another model, or a head that is tied)"].append(key)
            return None
        if target in self.shared:
            self.wrong[f"updates of an embedding that several modules share; {_REMEDY}"].append(key)
            return None
        if self.base[target].dtype not in _FLOATS.values():
            self.wrong["updates of tensors that are not floating-point in the base"].append(key)
            return None
        return target

    def _fits(self, key: str, shape: tuple[int, ...]) -> bool:
        found = self.header[key][0]
        if found != shape:
            self.wrong["tensors of the wrong shape"].append(f"{key} {list(found)}, expected {list(shape)}")
        return found == shape

    def _claim(self, target: str, key: str, change: Change) -> None:
        before = self.changes.get(target, Change())
        if before.factors or (before.value and change.value):
            self.wrong[f"tensors that change '{target}' a second time"].append(key)
        else:
            self.changes[target] = replace(change, value=before.value or change.value)


def _factor_shapes(weight: tuple[int, ...], rank: int, turned: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of A and B for a weight `[out, in]` or `[out, in, h, w]`, or, if `turned`, `[in, out]` or
    `[rows, width]`."""
    rows, *columns = weight
    if turned:
        return (rank, rows), (*columns, rank)
    return (rank, *columns), (rows, rank, *[1] * (len(columns) - 1))


def _first_match(patterns: Mapping[str, Number] | None, module: str, otherwise: Number) -> Number:
    """Return the value of the first pattern that matches a module's name, or its end after one of the dots."""
    matches = (value for pattern, value in (patterns or {}).items() if re.fullmatch(_match_end(pattern), module))
    return next(matches, otherwise)


def _match_end(pattern: str) -> str:
    return rf"(.*\.)?({pattern})"

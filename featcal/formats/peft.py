"""Interpret the two files of a peft LoRA adapter: read its configuration, and assign every
tensor to the tensor that it changes.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from pydantic import (
    BaseModel,
    ConfigDict,
    FiniteFloat,
    PositiveInt,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from torch import Tensor

from featcal.formats.conversions import untie_base
from featcal.formats.name_patterns import LONGEST, Matcher, check_pattern, match_end
from featcal.formats.weights import Canonical, TensorInfo
from featcal.system.errors import InputError
from featcal.system.formatting import some
from featcal.system.json_files import read_json

CONFIG_FILE = "adapter_config.json"
WEIGHT_FILE = "adapter_model.safetensors"
PICKLED_WEIGHTS = "adapter_model.bin"
_REMEDY = "merge it into its base with peft's merge_and_unload, save that model and give its folder"
_UNKNOWN = f"tensors without a meaning in a LoRA that featcal can reproduce exactly; {_REMEDY}"
_APART = "updates of an embedding that several modules share, but not of all of them"
_TIED = (
    "peft's merge_and_unload would tie them again and give another model; train the adapter without these modules, or "
    "with ensure_weight_tying"
)
HEADLESS = ("SEQ_CLS", "TOKEN_CLS", "QUESTION_ANS", "FEATURE_EXTRACTION")
"""Task types whose models have no head that is tied to their embedding, whatever the base has."""
MODEL_PREFIX = "base_model.model."
"""Prefix of peft for the path of a module."""
_LINEAR = ("lora_A.weight", "lora_B.weight")
_EMBEDDING = ("lora_embedding_A", "lora_embedding_B")
_BIAS = "lora_B.bias"
_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_BASE_KEPT = (True, False, "gaussian", "eva", "orthogonal", "mica")
"""Initialisations that leave the base unchanged; with any other, the adapter was trained on a changed base."""
_WITHOUT_EFFECT = {
    "task_type", "auto_mapping", "peft_version", "inference_mode", "runtime_config", "lora_dropout", "bias",
    "megatron_core", "qalora_group_size", "loftq_config", "eva_config", "corda_config", "lora_ga_config",
}  # fmt: skip
"""Options that do not change the meaning of the file's tensors; any other non-default option is refused."""
_ALL_LINEAR = "all-linear"
_HEADS = ("lm_head", "embed_out")
"""Modules that peft excludes from "all-linear", because they compute a model's scores."""


def _match_inside(pattern: str) -> str:
    """Return the pattern of a module and of all modules inside it, as peft writes it for `modules_to_save`."""
    return rf"(^|.*\.){pattern}($|\..*)"


def _match_layer(pattern: str) -> str:
    """Return the pattern of a name with the number of its layer, as peft writes it for `layers_pattern`."""
    return rf"(?:^|.*?\.){pattern}\.(?P<idx>\d+)\."


_ANY_LAYER = r".*?\.[^.]*\.(?P<idx>\d+)\."
_USES: Mapping[str, Callable[[str], str]] = {
    "rank_pattern": match_end,
    "alpha_pattern": match_end,
    "target_modules": str,
    "exclude_modules": str,
    "modules_to_save": _match_inside,
    "layers_pattern": _match_layer,
}
"""Options that are patterns, with the regular expression that peft makes of each."""

Number = TypeVar("Number", int, float)


class AdapterConfig(BaseModel):
    """The part of `adapter_config.json` that determines the meaning of the adapter's tensors."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)

    peft_type: str
    r: PositiveInt
    lora_alpha: FiniteFloat
    use_rslora: bool = False
    lora_bias: bool = False
    fan_in_fan_out: bool = False
    """True if weights of linear maps are stored `[inputs, outputs]`, as in GPT-2."""
    init_lora_weights: bool | str = True
    rank_pattern: dict[str, PositiveInt] | None = None
    alpha_pattern: dict[str, FiniteFloat] | None = None
    target_modules: str | list[str] | None = None
    exclude_modules: str | list[str] | None = None
    layers_to_transform: int | list[int] | None = None
    layers_pattern: str | list[str] | None = None
    modules_to_save: list[str] | None = None
    """Modules that were trained whole, such as a classifier that the base does not have."""
    ensure_weight_tying: bool = False
    """True if a change of an embedding also changes the head that is tied to it."""
    base_model_name_or_path: str | None = None
    revision: str | None = None

    _matcher: Matcher = PrivateAttr(default_factory=Matcher)

    @field_validator(*_USES)
    @classmethod
    def _are_patterns(cls, value: Any, info: ValidationInfo) -> Any:
        option = str(info.field_name)
        # Lists of targets and exclusions hold names, or ends of names.
        several = () if option in ("target_modules", "exclude_modules") else value or ()
        for pattern in [value] if isinstance(value, str) else several:
            check_pattern(pattern, _USES[option])
        return value

    @field_validator("layers_to_transform")
    @classmethod
    def _goes_with_a_list(cls, value: Any, info: ValidationInfo) -> Any:
        if value not in (None, []) and isinstance(info.data.get("target_modules"), str):
            raise ValueError("it needs target_modules as a list; peft refuses it with a pattern; drop it")
        return value

    def rank(self, module: str) -> int:
        """Return r of a module: that of the first pattern that matches, else the common one."""
        return self._first_match(self.rank_pattern, module, self.r)

    def scale(self, module: str) -> float:
        """Return s = alpha / r, or alpha / √r for rsLoRA; both alpha and r may come from a pattern."""
        alpha, rank = self._first_match(self.alpha_pattern, module, self.lora_alpha), self.rank(module)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def selects(self, module: str, is_linear: bool) -> bool:
        """Say whether peft builds an update for a module, by the rules of `check_target_module_exists` of peft 0.21.

        Without `target_modules` every module counts, because peft would look up defaults for the model's type.

        Args:
            is_linear: whether "all-linear" includes the module.
        """
        targets = self.target_modules
        if self._excludes(module):
            return False
        if isinstance(targets, str):
            # "all-linear" is no pattern, in whatever case it is written.
            return is_linear if targets.lower() == _ALL_LINEAR else bool(self._matcher.fullmatch(targets, module))
        # peft asks for a layer only where the end of a name was meant: a whole name is a target in any layer.
        if targets is not None and module in targets:
            return True
        return (targets is None or _ends_with_one(module, targets)) and self._is_in_chosen_layer(module)

    def saves(self, module: str) -> bool:
        """Say whether peft trains a full copy of a module, next to the module itself."""
        return any(module.endswith(name) for name in self.modules_to_save or ())

    def _excludes(self, module: str) -> bool:
        excluded = self.exclude_modules or ()
        if isinstance(excluded, str):
            named = self._matcher.fullmatch(excluded, module) is not None
        else:
            named = _ends_with_one(module, excluded)
        # What is trained whole gets no update besides.
        return named or any(self._matcher.match(_match_inside(name), module) for name in self.modules_to_save or ())

    def _is_in_chosen_layer(self, module: str) -> bool:
        chosen = self.layers_to_transform
        if chosen is None or chosen == []:
            return True
        patterns = [self.layers_pattern] if isinstance(self.layers_pattern, str) else self.layers_pattern or []
        # Without a pattern, the first number in a name is its layer.
        expressions = [_match_layer(one) for one in patterns] if self.layers_pattern else [_ANY_LAYER]
        found = (self._matcher.match(one, module) for one in expressions)
        layer = next((match.group("idx") for match in found if match), None)
        return layer is not None and int(layer) in (chosen if isinstance(chosen, list) else [chosen])

    def _first_match(self, patterns: Mapping[str, Number] | None, module: str, otherwise: Number) -> Number:
        """Return the value of the first pattern that matches a module's name, or its end after one of the dots."""
        matches = (value for pattern, value in (patterns or {}).items() if self._matcher.ends_with(pattern, module))
        return next(matches, otherwise)

    def unsupported_options(self) -> list[str]:
        """Return every option of the config that changes the meaning of tensors and is not supported."""
        options = {name: value for name, value in (self.model_extra or {}).items() if name not in _WITHOUT_EFFECT}
        if self.init_lora_weights not in _BASE_KEPT:
            options["init_lora_weights"] = self.init_lora_weights
        return [f"{name} = {json.dumps(value)}" for name, value in options.items() if value]


@dataclass(frozen=True)
class Change:
    """The change of one tensor by an adapter; all names are those in the adapter file."""

    value: str | None = None
    """Tensor that replaces the base's."""
    factors: tuple[str, ...] = ()
    """Names of A and B, whose `scale · B A` is added, or of one tensor that is added `scale` times."""
    scale: float = 1.0
    transposed: bool = False
    """True if the product is transposed before it is added: `[width, rows]` for an embedding `[rows, width]`, and for
    linear maps stored `[inputs, outputs]`."""

    @property
    def is_product(self) -> bool:
        """Say whether the only change is adding B A to the base's tensor."""
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


def explain_missing_base(adapter: Mapping[str, Any], ref: str) -> str:
    """Say how an adapter is given, of which only its own part of the reference was.

    Args:
        adapter: content of its `adapter_config.json`.
        ref: its folder or Hub id.
    """
    named = adapter.get("base_model_name_or_path")
    base = named if isinstance(named, str) and named else "BASE"
    return f"{ref} is a LoRA adapter, which is a model together with its base alone; give {base}+{ref}"


def task_type(folder: Path) -> str:
    """Return the task type of a peft folder, such as "SEQ_CLS"; "" if it is not given or cannot be read."""
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
class AdapterPlan:
    """Assignment of every tensor of an adapter file, or the reason why a tensor has none."""

    file: Path
    header: Mapping[str, tuple[tuple[int, ...], str]]
    config: AdapterConfig
    base: Mapping[str, TensorInfo]
    canonical: Canonical
    aliases: Mapping[str, str]
    """Other names of tensors that several modules share → those tensors."""
    changes: dict[str, Change] = field(default_factory=dict)
    added: dict[str, str] = field(default_factory=dict)
    """Canonical names of tensors that the base lacks → their names in the adapter file."""
    repeated: dict[str, str] = field(default_factory=dict)
    """Names in `aliases` that are stored beside the tensors they repeat → their names in the adapter file."""
    ignored_modules: list[str] = field(default_factory=list)
    """Modules that the config does not select; peft leaves their updates out."""
    wrong: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    def fill(self) -> list[str]:
        """Complete the plan, and return one message for each kind of problem."""
        try:
            self._place()
        # Nothing more can be said of a file with a pattern that takes too long to match.
        except InputError as error:
            return [f"{problem} ({self.file})" for problem in error.problems]
        remedies = {_APART: f"; {untie_base(self.aliases) or _TIED}"}
        return [f"{kind}: {some(keys)} ({self.file}){remedies.get(kind, '')}" for kind, keys in self.wrong.items()]

    def _place(self) -> None:
        """Assign every tensor, or note its problem."""
        modules, whole = self._sort_names()
        chosen = {name: parts for name, parts in modules.items() if self._is_chosen(name, parts)}
        self.ignored_modules = [name for name in modules if name not in chosen]
        if modules and not chosen:
            self.wrong[f"{CONFIG_FILE} selects none of the modules whose updates are here"] = self.ignored_modules
        for key in whole:
            self._replace(key, chosen)
        for module, parts in chosen.items():
            self._adapt(module, parts)

    def _sort_names(self) -> tuple[dict[str, dict[str, str]], list[str]]:
        """Return the parts of every module's update, part → name in the file, and the names of whole tensors."""
        modules: dict[str, dict[str, str]] = defaultdict(dict)
        whole: list[str] = []
        for key, (_, code) in self.header.items():
            # peft's state dicts carry the adapter's name, "default"; its saved files leave it out.
            plain = re.sub(r"\.default(?=\.weight$|\.bias$|$)", "", key)
            if self._repeats_whole(key):
                continue
            part = next((part for part in (*_LINEAR, *_EMBEDDING, _BIAS) if plain.endswith(f".{part}")), None)
            module = plain.removeprefix(MODEL_PREFIX).removesuffix(f".{part}")
            if code not in _FLOATS:
                self.wrong["adapter tensors that are not floating-point"].append(f"{key} ({code})")
            elif not key.startswith(MODEL_PREFIX) or len(key) > LONGEST or (part and part in modules[module]):
                self.wrong[_UNKNOWN].append(key)
            elif part:
                modules[module][part] = key
            else:
                whole.append(key)
        return {name: parts for name, parts in modules.items() if parts and not self._follows(name)}, whole

    def _repeats_whole(self, key: str) -> bool:
        """Say whether a tensor is one of the two, trained and replaced, that peft writes again beside an embedding of
        another size that is trained whole."""
        copy = r"\.(modules_to_save(\.default)?|original_module)\."
        own, replaced = (re.sub(copy, to, key) for to in (".", ".original_module."))
        return own != key and own in self.header and replaced in self.header

    def _follows(self, module: str) -> bool:
        """Say whether a module is tied to another one with its own update, so that this one only repeats it."""
        return self.config.ensure_weight_tying and f"{module}.weight" in self.aliases

    def _is_chosen(self, module: str, parts: Mapping[str, str]) -> bool:
        target = self.base.get(str(self.canonical(f"{module}.weight")))
        is_matrix = target is not None and len(target.shape) == 2 and _LINEAR[0] in parts
        return self.config.selects(module, is_matrix and module.rpartition(".")[2] not in _HEADS)

    def _replace(self, key: str, chosen: Collection[str]) -> None:
        """Assign a tensor that is stored whole: a bias, an embedding, or a part of a module in `modules_to_save`."""
        own = key.removeprefix(MODEL_PREFIX).replace(".modules_to_save.default.", ".")
        name = own.replace(".base_layer.", ".")
        module = name.rpartition(".")[0]
        if own != name and (module in self.ignored_modules or self._follows(module)):
            return
        if (own != name) != (module in chosen):  # peft would silently ignore it
            self.wrong[_UNKNOWN].append(key)
            return
        if self._is_added(name):
            self.added[str(self.canonical(name))] = key
            return
        together = self.config.ensure_weight_tying or not (module in chosen or self.config.saves(module))
        if together and name in self.aliases:
            self.repeated[name] = key
            return
        target = self._target(name, key, together)
        if target and self._fits(key, self.base[target].shape, any_rows=True):
            self._claim(target, key, Change(value=key))

    def _is_added(self, name: str) -> bool:
        """Say whether a tensor belongs to a module that was trained whole and that the base does not have."""
        saved = any(f".{module}." in f".{name}" for module in self.config.modules_to_save or ())
        target = self.canonical(name)
        return saved and target is not None and target not in self.base

    def _adapt(self, module: str, parts: Mapping[str, str]) -> None:
        """Assign the low-rank update of one module."""
        pair = _EMBEDDING if _EMBEDDING[0] in parts else _LINEAR
        needed = {*pair, _BIAS} if self.config.lora_bias else {*pair}
        if parts.keys() != needed:
            found = f"{module} ({', '.join(sorted(parts))})"
            self.wrong[f"updates that are not made of {', '.join(sorted(needed))}"].append(found)
            return
        first, second = parts[pair[0]], parts[pair[1]]
        scale = self.config.scale(module)
        if target := self._target(f"{module}.weight", first, self.config.ensure_weight_tying):
            # A vocabulary that was resized is stored with its update.
            whole = self.changes.get(target, Change()).value
            weight = self.base[target].shape if whole is None else self.header[whole][0]
            turned = pair is _EMBEDDING or (self.config.fan_in_fan_out and len(weight) == 2)
            shapes = _factor_shapes(weight, self.config.rank(module), turned)
            # A list and not `and`: both shapes are checked, so that both problems are reported.
            if all([self._fits(first, shapes[0]), self._fits(second, shapes[1])]):
                self._claim(target, first, Change(None, (first, second), scale, transposed=turned))
        bias = parts.get(_BIAS)
        if bias and (target := self._target(f"{module}.bias", bias)) and self._fits(bias, self.base[target].shape):
            self._claim(target, bias, Change(None, (bias,), scale))

    def _target(self, name: str, key: str, together: bool = False) -> str | None:
        """Return the canonical name of the tensor that `key` changes; None if the base has no separate tensor for
        `key`.

        Args:
            together: whether every module that shares the tensor changes with it.
        """
        target = self.canonical(name)
        if not together and (name in self.aliases or target in self.aliases.values()):
            self.wrong[_APART].append(key)
            return None
        if target is None or target not in self.base:
            self.wrong["tensors for which the base has none (another model, or a head that it lacks)"].append(key)
            return None
        if self.base[target].dtype not in _FLOATS.values():
            self.wrong["updates of tensors that are not floating-point in the base"].append(key)
            return None
        return target

    def _fits(self, key: str, shape: tuple[int, ...], any_rows: bool = False) -> bool:
        """Say whether a tensor has a shape, and note it if not.

        Args:
            any_rows: allow another number of rows, such as that of a resized vocabulary; the check of the whole model
                judges it.
        """
        found = self.header[key][0]
        fits = found == shape or (any_rows and len(found) == len(shape) > 0 and found[1:] == shape[1:])
        if not fits:
            self.wrong["tensors of the wrong shape"].append(f"{key} {list(found)}, expected {list(shape)}")
        return fits

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


def _ends_with_one(module: str, names: Iterable[str]) -> bool:
    return any(f".{module}".endswith(f".{name}") for name in names)

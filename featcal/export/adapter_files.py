"""Write the difference of two models as a LoRA adapter in peft's layout, and read it back.

Linear maps get a product B A of scale 1. Their biases are part of it (`lora_bias`) if all adapted maps have one, so
that the adapter can be disabled; peft has no such option for only some of the maps, so otherwise biases are stored
whole beside the maps (`bias: all`). Every other tensor is saved with its module (`modules_to_save`).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from featcal.formats.located_model import Located, explain_model_errors
from featcal.formats.lora import LoraWeights
from featcal.formats.low_rank import Factors
from featcal.formats.output import save_tensors, save_text
from featcal.formats.peft import CONFIG_FILE, MODEL_PREFIX, WEIGHT_FILE
from featcal.formats.weights import Stored, Weights
from featcal.models.adapter import Adapter
from featcal.models.linear_maps import KINDS, LinearMap
from featcal.system.errors import InputError, NumericalError
from featcal.system.formatting import some

_TASK_TYPES = {"ForCausalLM": "CAUSAL_LM", "ForConditionalGeneration": "SEQ_2_SEQ_LM"}
"""Endings of transformers' class names → peft's task type; other classes need none."""

_PUBLISH = "publish the calibrated folder"


@dataclass(frozen=True)
class LowRankDifference:
    """The difference of two models of one architecture, with its maps truncated to a low rank."""

    start: Weights
    """The model under the adapter."""
    end: Weights
    """The model that the adapter makes of it."""
    products: Mapping[str, Factors]
    """Products B A, each the whole difference of a linear map, by canonical name of its weight."""
    whole: Collection[str]
    """Names of all other tensors that differ."""


@dataclass(frozen=True)
class Written:
    """The content of an adapter's files besides products of low rank."""

    whole: list[str]
    """Paths of the modules that are saved whole."""
    switchable: bool
    """False if biases are stored whole beside the maps; peft keeps these when it disables the adapter."""


class ModuleLayout:
    """The modules of the library's class of a model, found by the canonical names of their tensors.

    Raises:
        InputError: the model is not one of transformers, or its configuration is invalid.
    """

    def __init__(self, adapter: Adapter, located: Located) -> None:
        require_adaptable(adapter)
        self.named = adapter.loader(located.config)
        self._modules = _library_modules(self.named, located)
        self._adapter = adapter
        found = {adapter.canonical(path): path for path, _ in self._modules.named_parameters()}
        self._paths = {name: path for name, path in found.items() if name is not None}

    @property
    def task_type(self) -> str | None:
        """Return peft's task type for the class."""
        return next((kind for end, kind in _TASK_TYPES.items() if self.named.endswith(end)), None)

    def map_at(self, weight: str) -> tuple[str, LinearMap]:
        """Return path and module of the linear map with this weight.

        Raises:
            InputError: it does not belong to a separate linear map.
        """
        path = self._path(weight).removesuffix(".weight")
        module = self._modules.get_submodule(path) if path != self._path(weight) else None
        if not isinstance(module, KINDS):
            raise InputError(
                f"{self.named}: '{weight}' does not belong to a separate linear map there, so peft cannot adapt it"
            )
        return path, module

    def owners(self, names: Collection[str], adapted: Collection[str]) -> list[str]:
        """Return the paths of the modules that hold some tensors; none is inside another.

        Args:
            adapted: paths of adapted maps, which such a module cannot contain.

        Raises:
            InputError: a tensor that several modules share, that belongs to the model itself, or to a module with an
                adapted map.
        """
        if shared := sorted({*names} & {*self._adapter.aliases.values()}):
            raise InputError(
                f"{self.named}: {some(shared)} is shared by several modules, and an adapter can change it for one "
                "alone; give the repair of the merge instead (--of merged), which leaves it as it is"
            )
        found = sorted({self._path(name).rpartition(".")[0] for name in names})
        own = [one for one in found if not any(one.startswith(f"{other}.") for other in found)]
        if bad := [one for one in own if not one or any(path.startswith(f"{one}.") for path in adapted)]:
            raise InputError(f"{self.named}: the tensors of {some([one or 'the model' for one in bad])} lie beside "
                             "linear maps, so peft cannot save that module whole")  # fmt: skip
        return own

    def tensors_in(self, module: str) -> dict[str, str]:
        """Return the canonical names of all tensors of a module by their paths."""
        return {path: name for name, path in self._paths.items() if path.startswith(f"{module}.")}

    def _path(self, name: str) -> str:
        if name not in self._paths:
            raise InputError(f"{self.named} has no tensor '{name}', so no adapter can change it there")
        return self._paths[name]


def require_adaptable(adapter: Adapter) -> None:
    """Raise InputError for an architecture whose modules peft cannot adapt."""
    if adapter.library != "transformers":
        convert = "convert its models first (featcal export --format hf)"
        raise InputError(
            f"peft adapts models of transformers, and this is one of {adapter.library}, whose attention keeps query, "
            f"key and value in one packed weight; {convert if adapter.library == 'open_clip' else _PUBLISH}"
        )
    if any(block.mixtures for block in adapter.blocks()):
        raise InputError(
            f"a {adapter.family} model is a mixture, whose experts' weights are fused into tensors that no linear map "
            f"owns, so peft cannot adapt them; {_PUBLISH}"
        )


def write_adapter(
    target: Path, adapter: Adapter, container: Located, change: LowRankDifference, over: str | None
) -> Written:
    """Write `adapter_config.json` and `adapter_model.safetensors`, and verify the adapted model.

    Args:
        container: files of the model under the adapter, which give its class.
        over: reference of the start, if it has one.

    Raises:
        InputError: an architecture that peft cannot adapt, or a tensor that an adapter cannot hold.
        NumericalError: the adapter, read back, does not reproduce `difference.end`.
    """
    layout = ModuleLayout(adapter, container)
    maps = {name: layout.map_at(name) for name in change.products}
    biases = [name for name in change.whole if f"{name.removesuffix('.bias')}.weight" in maps]
    paths = [path for path, _ in maps.values()]
    owners = layout.owners([name for name in change.whole if name not in biases], paths)
    biased = {name for name, (_, module) in maps.items() if module.bias is not None}
    beside = bool(biases) and len(biased) == len(maps)
    tensors: dict[str, Tensor] = {}
    for name, (path, _) in maps.items():
        up, down = change.products[name]
        tensors |= {f"{path}.lora_A.weight": down, f"{path}.lora_B.weight": up}
        bias = f"{name.removesuffix('.weight')}.bias"
        if beside:
            tensors[f"{path}.lora_B.bias"] = _read(change.end, bias) - _read(change.start, bias)
        elif bias in biases:
            tensors[f"{path}.base_layer.bias"] = _read(change.end, bias)
    for path, name in (pair for owner in owners for pair in layout.tensors_in(owner).items()):
        tensors[path] = _read(change.end, name)
    ranks = {path: len(change.products[name][1]) for name, (path, _) in maps.items()}
    config = _config(ranks, owners, over, layout.task_type) | {
        "bias": "all" if biases and not beside else "none",
        "lora_bias": beside,
        "fan_in_fan_out": bool(adapter.transposed_weights & change.products.keys()),
    }
    save_text(json.dumps(config, indent=2) + "\n", target / CONFIG_FILE)
    save_tensors({f"{MODEL_PREFIX}{path}": one.contiguous() for path, one in tensors.items()}, target / WEIGHT_FILE)
    _verify(target, adapter, change)
    return Written(owners, switchable=config["bias"] == "none")


def _config(ranks: Mapping[str, int], owners: list[str], over: str | None, task_type: str | None) -> dict[str, Any]:
    """Return peft's configuration of an adapter of scale 1.

    Args:
        ranks: by path of the adapted map.
    """
    most = max(ranks.values(), default=1)
    fewer = {path: rank for path, rank in ranks.items() if rank != most}
    return {
        "peft_type": "LORA",
        "task_type": task_type,
        "base_model_name_or_path": over,
        "inference_mode": True,
        "r": most,
        # alpha = r is scale 1, for every map.
        "lora_alpha": most,
        "rank_pattern": fewer,
        "alpha_pattern": fewer,
        "lora_dropout": 0.0,
        "init_lora_weights": True,
        "use_rslora": False,
        "target_modules": [*ranks],
        "modules_to_save": owners or None,
    }


def _library_modules(named: str, located: Located) -> nn.Module:
    """Return the library's own model without weights."""
    import transformers

    config = dict(located.config)
    with explain_model_errors(located.label, located.config_source), torch.device("meta"):
        if named == "AutoModel":
            model: nn.Module = transformers.AutoModel.from_config(transformers.AutoConfig.for_model(**config))
            return model
        kind = getattr(transformers, named)
        found: nn.Module = kind(kind.config_class.from_dict(config))
    return found


def _read(weights: Weights, name: str) -> Tensor:
    return weights.read([name])[name]


def _verify(folder: Path, adapter: Adapter, change: LowRankDifference) -> None:
    """Read an adapter back over its start, block by block, and compare every tensor with the end's."""
    # A merge on the fly has no files; nothing here asks for them.
    back = LoraWeights(cast(Stored, change.start), folder, "written adapter", adapter.canonical, adapter.aliases)
    for names in _parts(adapter):
        found, wanted = back.read(names), change.end.read(names)
        for name in names:
            apart = float((found[name].double() - wanted[name].double()).abs().max())
            limit = 4 * torch.finfo(wanted[name].dtype).eps * float(wanted[name].abs().max())
            # Written so that NaN fails too.
            if not apart <= limit:
                raise NumericalError(
                    f"{folder}: with the adapter, tensor '{name}' differs from the model's by {apart:.1e}"
                )


def _parts(adapter: Adapter) -> Iterator[list[str]]:
    """Yield the names of the tensors of every block, then those of the rest of the tower."""
    blocks = [list(block.names) for block in adapter.blocks()]
    inside = {name for names in blocks for name in names}
    yield from blocks
    yield [name for name in adapter.tower if name not in inside]

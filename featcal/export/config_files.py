"""Write the files beside transformers' weights so that versions 4 (4.57) and 5 read the same model.

Version 5 writes files that version 4 silently misreads (`rope_parameters`, the tied head of T5), or cannot read at all
(its tokenizer classes). If no file means the same to both, a note says which version is needed.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from featcal.formats.checkpoint import read_config
from featcal.formats.grid import SETTINGS, OnGrid
from featcal.formats.output import save_text
from featcal.formats.processor import PREPROCESSOR_FILE, image_processor_settings
from featcal.formats.weights import TensorInfo, Weights
from featcal.models.adapter import Adapter
from featcal.system.errors import InputError
from featcal.system.json_files import read_json

TOKENIZER_FILE = "tokenizer_config.json"
_OWN_CLASS = ("CLIPTokenizer", "T5Tokenizer")
"""Tokenizers of version 5 whose `tokenizer.json` the class of the same name in version 4 reads unchanged."""


def write_model_config(target: Path, adapter: Adapter, model: Weights) -> list[str]:
    """Rewrite the copied `config.json` of a written model if it must differ from its origin's.

    Returns:
        Notes on settings that version 4 cannot read.
    """
    config = read_config(target, "written model")
    document, notes = adapter.portable(config, model)
    dtype = str(named_dtype(adapter, model.info)).removeprefix("torch.")
    document |= {key: dtype for key in ("dtype", "torch_dtype") if config.get(key) is not None}
    if not _has_code(document.get("auto_map"), target):
        document.pop("auto_map", None)
    if document != config:
        save_text(json.dumps(document, indent=2) + "\n", target / "config.json")
    return notes


def _has_code(auto_map: Any, folder: Path) -> bool:
    """Say whether every class of an `auto_map` is in a file of the folder or in another repository: that code is not
    fetched from the Hub, and with `trust_remote_code` transformers would look for it here."""
    classes = [*auto_map.values()] if isinstance(auto_map, dict) else []
    named = [one for found in classes for one in (found if isinstance(found, list) else [found]) if one]
    return all("--" in one or (folder / f"{one.partition('.')[0]}.py").is_file() for one in named)


def write_packed_config(target: Path, adapter: Adapter, model: OnGrid) -> None:
    """Declare in the `config.json` of a written model which of its linear maps are packed, and how.

    Raises:
        InputError: transformers has other names for the maps.
    """
    config = read_config(target, "written model")
    document = {**config, SETTINGS: model.grid.settings(unpacked_maps(adapter, config, model.scales))}
    save_text(json.dumps(document, indent=2) + "\n", target / "config.json")


def unpacked_maps(adapter: Adapter, config: Mapping[str, Any], packed: Collection[str]) -> list[str]:
    """Return the linear maps that are not packed, by their names in the class of transformers that loads the model.

    Args:
        config: content of its `config.json`.
        packed: canonical names of weights.

    Raises:
        InputError: packed maps that the class does not have, or has under several names.
    """
    import transformers

    named = adapter.loader(config)
    options = transformers.CONFIG_MAPPING[config["model_type"]].from_dict(
        {k: v for k, v in config.items() if k != SETTINGS}
    )
    kind = getattr(transformers, named)
    with torch.device("meta"):
        model = kind.from_config(options) if named.startswith("Auto") else kind(options)
    own = {f"{b.path}.{n}" for b in adapter.blocks() for n in b.maps if f"{b.stored_name(n)}.weight" in packed}
    left, found = [], set[str]()
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.Linear):
            continue
        # A class may hold the stack that featcal runs inside another one, or be a part of it.
        same = {one for one in own if f".{one}".endswith(f".{name}") or f".{name}".endswith(f".{one}")}
        found |= same
        left += [] if same else [name]
    if found != own or len(own) != sum(1 for m in model.modules() if isinstance(m, torch.nn.Linear)) - len(left):
        raise InputError(
            f"quantize: {named} of transformers has other names for the linear maps of a {adapter.family} model than "
            "its files; leave quantize out"
        )
    return left


def named_dtype(adapter: Adapter, info: Mapping[str, TensorInfo]) -> torch.dtype:
    """Return the dtype for `config.json`, to which transformers rounds on loading: the widest of the tower.

    In a float16 model the modules that transformers keeps in float32 do not count.
    """
    dtypes = {name: info[name].dtype for name in adapter.tower}
    rest = {dtype for name, dtype in dtypes.items() if not set(name.split(".")) & set(adapter.kept_float32)}
    if rest == {torch.float16} and set(dtypes.values()) <= {torch.float16, torch.float32}:
        return torch.float16
    return max(dtypes.values(), key=lambda dtype: dtype.itemsize)


def say_tokenizer(target: Path) -> None:
    """Rewrite a `tokenizer_config.json` of version 5 for both versions: a class that both have, with explicit defaults
    and special tokens."""
    import transformers

    file = target / TOKENIZER_FILE
    if not file.is_file() or not (target / "tokenizer.json").is_file():
        return
    # It is a copy in a folder that is not there any more when the message is read.
    config = read_json(file, f"{TOKENIZER_FILE} beside the weights")
    saved_by_5 = config.get("backend") == "tokenizers" or config.get("tokenizer_class") == "TokenizersBackend"
    # "auto_map" names a class in code beside the model, which is its owner's affair.
    if not saved_by_5 or "auto_map" in config:
        return
    settings = dict(config)
    if isinstance(settings.get("extra_special_tokens"), list):
        settings["additional_special_tokens"] = settings.pop("extra_special_tokens")
    own = str(settings.get("tokenizer_class"))
    if own not in _OWN_CLASS:
        # Defaults of the class, which the file does not repeat: BERT's also reads the number of the text, Gemma's pads
        # on the left.
        kind = getattr(transformers, own, transformers.PreTrainedTokenizerFast)
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
        settings.setdefault("model_input_names", [*kind.model_input_names])
        settings.setdefault("padding_side", kind.padding_side)
    if settings != config:
        save_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", file)


def say_processor(target: Path) -> list[str]:
    """Write `preprocessor_config.json` if the settings are in a `processor_config.json`; return its name."""
    found = image_processor_settings(target)
    if found is None or found[0].name == PREPROCESSOR_FILE:
        return []
    save_text(json.dumps(found[1], indent=2) + "\n", target / PREPROCESSOR_FILE)
    return [PREPROCESSOR_FILE]

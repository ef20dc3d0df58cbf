"""Which adapter a checkpoint's configuration asks for."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from importlib import import_module
from typing import Any

import torch

from featcal.errors import InputError
from featcal.models.adapter import Adapter


def adapter_for(config: Mapping[str, Any], names: Collection[str], device: torch.device, label: str) -> Adapter:
    """The adapter for a checkpoint.

    Args:
        config: content of its `config.json`.
        names: names of its tensors, as stored or canonical; they say whether a head of its own is there.

    Raises:
        InputError: an architecture that featcal does not know, or a config that does not describe it.
    """
    from huggingface_hub.errors import StrictDataclassError

    architecture = architecture_for(config, label)
    try:
        return architecture(config, names, device)
    except (TypeError, ValueError, KeyError, ZeroDivisionError, StrictDataclassError) as error:
        what = " ".join(str(error).split())
        kind = config.get("model_type")
        raise InputError(f"{label}: its configuration does not describe a model of type '{kind}': {what}") from error


def architecture_for(config: Mapping[str, Any], label: str) -> type[Adapter]:
    """The class of adapter for a `config.json`; InputError for an architecture that featcal does not know."""
    kind = config.get("model_type")
    if kind not in _HOMES:
        if kind is not None:
            what = f"architecture '{kind}' is not supported"
        elif "pretrained_cfg" in config or "num_classes" in config:
            what = f"a model of timm ('{config.get('architecture')}'), which is not supported"
        else:
            what = "its config.json names no model_type, so it is no model of transformers"
        raise InputError(f"{label}: {what}; featcal reads {', '.join(_HOMES)}")
    module, name = _HOMES[kind]
    adapter: type[Adapter] = getattr(import_module(f"featcal.models.{module}"), name)
    return adapter


_HOMES = {
    "clip": ("clip", "ClipVision"),
    "clip_vision_model": ("clip", "ClipVision"),
    "open_clip": ("open_clip", "OpenClip"),
    "t5": ("t5", "T5"),
    "llama": ("llama", "Llama"),
}
"""`model_type` → module and class; imported when needed, since each brings its part of transformers."""

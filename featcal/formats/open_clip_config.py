"""Read open_clip's configurations and names of tensors, without building a model of open_clip."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from featcal.system.errors import InputError
from featcal.system.extras import require_packages
from featcal.system.formatting import did_you_mean
from featcal.system.json_files import read_json

CONFIG_FILE = "open_clip_config.json"
FILE_PREFIX, FOLDER_PREFIX, HUB_PREFIX = "open_clip:", "local-dir:", "hf-hub:"
PREFIXES = (FILE_PREFIX, FOLDER_PREFIX, HUB_PREFIX)
"""Prefixes of references to open_clip models; the first is for a file of weights without a configuration."""
_PREPROCESS_KEYS = ("mean", "std", "interpolation", "resize_mode", "fill_color")
_NOT_WEIGHTS = {"input_resolution", "context_length", "vocab_size", "attn_mask", "text.attn_mask"}


def read_open_clip_config(file: Path, label: str) -> dict[str, Any]:
    """Return `model_cfg` and `preprocess_cfg` of an `open_clip_config.json`, or of the configuration of an architecture
    alone, as open_clip's own training takes it.

    Raises:
        InputError: the file cannot be read, or does not configure a CLIP with two towers.
    """
    content = read_json(file, f"{label}: {file}", f"{label}: {file} cannot be read; is it an open_clip model?")
    model_cfg = content.get("model_cfg", content)
    parts = [model_cfg.get(part) for part in ("vision_cfg", "text_cfg")] if isinstance(model_cfg, dict) else []
    if not (len(parts) == 2 and all(isinstance(part, dict) for part in parts)):
        raise InputError(f"{label}: {file} has no 'model_cfg' with 'vision_cfg' and 'text_cfg'")
    return {"model_cfg": model_cfg, "preprocess_cfg": content.get("preprocess_cfg") or {}}


def named_architecture(arch: str, label: str) -> dict[str, Any]:
    """Return `model_cfg` of an architecture that open_clip names; raise InputError, with a suggestion, if it has
    none."""
    require_packages("open_clip")
    import open_clip

    config: dict[str, Any] | None = open_clip.get_model_config(arch.replace("/", "-"))
    if config is None:
        hint = did_you_mean(arch, open_clip.list_models())
        raise InputError(f"{label}: open_clip has no architecture '{arch}'.{hint}")
    return config


def preprocess_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return mean, std, interpolation, resize_mode and fill_color, with open_clip's defaults for missing ones."""
    from dataclasses import asdict

    require_packages("open_clip")
    from open_clip.transform import PreprocessCfg

    given = {key: value for key, value in config["preprocess_cfg"].items() if value is not None}
    whole = asdict(PreprocessCfg()) | given
    return {key: whole[key] for key in _PREPROCESS_KEYS}


def weight_name(stored: str) -> str | None:
    """Return a tensor's name; None for sizes and masks that old files store along with the weights."""
    return None if stored in _NOT_WEIGHTS else stored


def quick_gelu(model_cfg: Mapping[str, Any]) -> bool:
    """Say whether a model uses QuickGELU; raise InputError if the setting is neither true nor false."""
    # Without the key open_clip builds GELU.
    value = model_cfg.get("quick_gelu", False)
    if not isinstance(value, bool):
        raise InputError(f"model_cfg: quick_gelu is true or false, not {value!r}")
    return value


def check_plain(model_cfg: Mapping[str, Any]) -> None:
    """Raise InputError that lists everything by which a model differs from open_clip's plain vision transformer."""
    vision, text = model_cfg["vision_cfg"], model_cfg["text_cfg"]
    width, head_width = vision.get("width", 768), vision.get("head_width", 64)
    found = {
        "an image tower of timm": vision.get("timm_model_name"),
        "a ResNet image tower": isinstance(vision.get("layers"), list),
        "attentional pooling (CoCa)": vision.get("attentional_pool") or model_cfg.get("multimodal_cfg"),
        f"pool_type '{vision.get('pool_type')}'": vision.get("pool_type", "tok") != "tok",
        "a text tower of transformers": text.get("hf_model_name"),
        f"a width of {width} that is not a multiple of head_width {head_width}": width % head_width,
    }
    problems = [f"open_clip model with {what}; featcal reads its plain vision transformer" for what, is_so in
                found.items() if is_so]  # fmt: skip
    if problems:
        raise InputError(*problems)

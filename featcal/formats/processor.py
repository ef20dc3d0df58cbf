"""Read the settings of the image processor beside a model."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from featcal.system.errors import InputError
from featcal.system.json_files import read_json

_RESAMPLING = {"nearest": 0, "bilinear": 2, "bicubic": 3}
_KNOWN = ", ".join(_RESAMPLING)
_IMAGENET_MEAN, _IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""timm's default mean and standard deviation, for a folder that states none."""
PREPROCESSOR_FILE, PROCESSOR_FILE = "preprocessor_config.json", "processor_config.json"


def image_processor_settings(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """Return the file of a folder's image processor, and its settings; None without one.

    Raises:
        InputError: a file contains no settings.
    """
    processor, own = folder / PROCESSOR_FILE, folder / PREPROCESSOR_FILE
    # `CLIPProcessor` of transformers 5 puts the settings into this file, so it is read first.
    if processor.is_file():
        settings = read_json(processor).get("image_processor")
        if isinstance(settings, dict):
            return processor, settings
    return (own, read_json(own)) if own.is_file() else None


def timm_settings(folder: Path) -> dict[str, Any] | None:
    """Convert timm's `config.json` into settings of transformers' `CLIPImageProcessor`; None for other folders.

    The shorter side is resized to `input_size / crop_pct` and the centre is cut out.

    Raises:
        InputError: pictures are not square, or are resized or cropped in another way.
    """
    file = folder / "config.json"
    config = read_json(file) if file.is_file() else {}
    settings = config.get("pretrained_cfg") or config
    if "architecture" not in config or "input_size" not in settings:
        return None
    _, height, width = settings["input_size"]
    kind, cut = settings.get("interpolation", "bicubic"), settings.get("crop_mode") or "center"
    if height != width or cut != "center" or kind not in _RESAMPLING:
        raise InputError(
            f"base: {file} asks for pictures of {height} by {width}, crop_mode '{cut}', interpolation '{kind}'; "
            f"featcal prepares squares from the center, by {_KNOWN}"
        )
    return {
        "size": {"shortest_edge": math.floor(height / (settings.get("crop_pct") or 0.875))},
        "crop_size": {"height": height, "width": width},
        "resample": _RESAMPLING[kind],
        "image_mean": list(settings.get("mean", _IMAGENET_MEAN)),
        "image_std": list(settings.get("std", _IMAGENET_STD)),
    }

"""Settings of the image processor beside a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from featcal.jsons import read_json

PREPROCESSOR_FILE, PROCESSOR_FILE = "preprocessor_config.json", "processor_config.json"


def image_processor_settings(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """The file that sets up the image processor of a folder, and its settings; None where there is none.

    `CLIPProcessor` of version 5 puts them into `processor_config.json`, which is then read first.

    Raises:
        InputError: a file that holds no settings.
    """
    processor, own = folder / PROCESSOR_FILE, folder / PREPROCESSOR_FILE
    if processor.is_file():
        settings = read_json(processor).get("image_processor")
        if isinstance(settings, dict):
            return processor, settings
    return (own, read_json(own)) if own.is_file() else None

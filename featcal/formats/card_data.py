"""Read the card beside a model, written by others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from featcal.formats.hub import CARD_FILE

MOST_BYTES = 4 << 20
"""Size of a card beyond which it is not read."""


def read_card_data(folder: Path) -> dict[str, Any]:
    """Return the front matter of the card in a folder; {} if it cannot be read."""
    from huggingface_hub import metadata_load

    file = folder / CARD_FILE
    try:
        return (metadata_load(file) or {}) if file.is_file() and file.stat().st_size <= MOST_BYTES else {}
    except (OSError, ValueError, LookupError, AttributeError, RecursionError, yaml.YAMLError):
        return {}  # what others wrote, without which a card merely says less


def read_card_text(folder: Path) -> str:
    """Return the card in a folder as text; "" if it cannot be read."""
    file = folder / CARD_FILE
    try:
        return file.read_text(encoding="utf-8") if file.is_file() and file.stat().st_size <= MOST_BYTES else ""
    except (OSError, ValueError):
        return ""

"""Read folders of sentence-transformers: a model of transformers, and options that pool its states to one embedding."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from featcal.system.json_files import read_json, read_json_rows

MODULES_FILE = "modules.json"
POOLING = "sentence_pooling"
"""Option of a configuration that holds the kind of pooling: "mean", "first", or a description of another kind."""
_WITHOUT_WEIGHTS = ("Transformer", "Pooling", "Normalize")
_MODES = {"mean": "mean", "mean_tokens": "mean", "cls": "first", "cls_token": "first"}


def module_folders(folder: Path) -> list[str]:
    """Return the folders inside a sentence-transformers folder with options of its modules; none for other models."""
    listed = (_path(module) for module in _modules(folder))
    return [path for path in listed if path and (folder / path / "config.json").is_file()]


def pooling_option(folder: Path) -> dict[str, str]:
    """Return the pooling of a sentence-transformers folder as an option of its configuration; {} for other models."""
    modules = _modules(folder)
    if not modules:
        return {}
    kinds = [str(module.get("type", "")).rpartition(".")[2] for module in modules]
    others = [kind for kind in kinds if kind not in _WITHOUT_WEIGHTS]
    if others or _path(modules[0]):
        return {POOLING: f"{', '.join(others) or 'a Transformer'} in {MODULES_FILE}"}
    paths = [_path(module) for module, kind in zip(modules, kinds, strict=True) if kind == "Pooling"]
    modes = [mode for path in paths for mode in _modes(read_json(folder / path / "config.json"))]
    return {
        POOLING: _MODES.get(modes[0], modes[0]) if len(modes) == 1 else f"pooling by {', '.join(modes) or 'nothing'}"
    }


def _modules(folder: Path) -> list[Mapping[str, Any]]:
    file = folder / MODULES_FILE
    return [*read_json_rows(file)] if file.is_file() else []


def _path(module: Mapping[str, Any]) -> str:
    """Return the folder of a module, which lies directly inside the model's."""
    return Path(str(module.get("path", ""))).name


def _modes(config: Mapping[str, Any]) -> list[str]:
    """Return the kinds of pooling that are switched on: flags in older folders, one name in newer ones."""
    if isinstance(config.get("pooling_mode"), str):
        return [config["pooling_mode"]]
    return [
        name.removeprefix("pooling_mode_") for name, on in config.items() if name.startswith("pooling_mode_") and on
    ]

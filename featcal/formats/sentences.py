"""Folders of sentence-transformers: a model of transformers, and beside it how its states become one embedding."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from featcal.system.json_files import read_json, read_json_rows

MODULES_FILE = "modules.json"
POOLING = "sentence_pooling"
"""Option under which a configuration says how states are pooled: "mean", "first", or what else there is."""
_WITHOUT_WEIGHTS = ("Transformer", "Pooling", "Normalize")
_MODES = {"mean": "mean", "mean_tokens": "mean", "cls": "first", "cls_token": "first"}


def module_folders(folder: Path) -> list[str]:
    """Folders inside a folder of sentence-transformers that hold the options of its modules; none of other models."""
    listed = (_path(module) for module in _modules(folder))
    return [path for path in listed if path and (folder / path / "config.json").is_file()]


def pooling_option(folder: Path) -> dict[str, str]:
    """How a folder of sentence-transformers pools, as an option of its configuration; nothing of other models."""
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
    """The folder of a module, right inside the model's."""
    return Path(str(module.get("path", ""))).name


def _modes(config: Mapping[str, Any]) -> list[str]:
    """What is switched on: flags of older folders, one name in newer ones."""
    if isinstance(config.get("pooling_mode"), str):
        return [config["pooling_mode"]]
    return [
        name.removeprefix("pooling_mode_") for name, on in config.items() if name.startswith("pooling_mode_") and on
    ]

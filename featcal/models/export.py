"""Write a model in the layout of a Hub checkpoint, load it back and compare."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from featcal.errors import InputError, NumericalError
from featcal.models.adapter import Adapter, adapter_for
from featcal.models.checkpoint import INDEX_FILE, SINGLE_FILE, Checkpoint, read_config, resolve, stored_names
from featcal.models.features import final_features
from featcal.models.output import OutputFolder, save_tensors, save_text
from featcal.models.weights import Compute, TensorInfo, Weights

SHARD_BYTES = 2 * 2**30
"""Largest weight file; a smaller model is one `model.safetensors`."""
RECORD_FILE = "featcal.json"
CARD_FILE = "README.md"
RELOAD_TOLERANCE = 1e-4
"""Largest difference of final features after reloading, relative to their largest value (float32)."""
_WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".onnx"}


def write_model(
    folder: OutputFolder,
    adapter: Adapter,
    container: Path,
    model: Weights,
    record: Callable[[], Mapping[str, Any]],
    card: str,
) -> dict[str, Any]:
    """Write `model` into the layout of the checkpoint `container`, verify it and commit the folder.

    Tensors outside the tower (text tower, projections) and all non-weight files are the container's own.

    Args:
        record: asked once everything is written and verified, so that it can say how long that took.

    Returns:
        The content of `featcal.json`: the record and the names of all files.

    Raises:
        NumericalError: the reloaded model is not the one that was written.
        InputError: the disk refuses.
    """
    source = Checkpoint(container, "container", adapter.canonical)
    written = _copy_files(container, folder.partial)
    for file, names, index in _shards(source.info):
        tower = [name for name in names if name in adapter.tower]
        rest = [name for name in names if name not in adapter.tower]
        save_tensors({**source.read(rest), **model.read(tower)}, folder.partial / file)
        written.append(file)
        if index is not None:
            save_text(json.dumps(index, indent=2), folder.partial / INDEX_FILE)
            written.append(INDEX_FILE)
    verify_reload(folder.partial, adapter, model)
    save_text(card, folder.partial / CARD_FILE)
    content = {**record(), "written": sorted([*written, CARD_FILE, RECORD_FILE])}
    save_text(json.dumps(content, indent=2, allow_nan=False) + "\n", folder.partial / RECORD_FILE)
    folder.commit()
    return content


def convert(source: str | Path, out: str | Path) -> dict[str, Any]:
    """Rewrite a checkpoint folder with canonical tensor names, verify and commit it.

    A vision tower that transformers 5 saved from scratch lacks a prefix without which version 4 silently
    re-initialises every tensor; the rewritten folder loads in both.

    Returns:
        The document of `featcal export --json`.
    """
    container = resolve(str(source), Path.cwd(), "model to export")
    label = "model to export"
    config, names = read_config(container, label), stored_names(container, label)
    adapter = adapter_for(config, names, torch.device("cpu"), label)
    model = Checkpoint(container, label, adapter.canonical)
    card = container / CARD_FILE
    text = card.read_text(encoding="utf-8") if card.is_file() else "---\nlibrary_name: transformers\n---\n"
    record_file = container / RECORD_FILE
    try:
        record = json.loads(record_file.read_text(encoding="utf-8")) if record_file.is_file() else {}
    except ValueError as error:
        raise InputError(f"{record_file} is not valid JSON ({error}); repair or remove it") from error
    with OutputFolder(out) as folder:
        written = write_model(folder, adapter, container, model, lambda: record, text)["written"]
    return {"out": str(folder.out), "format": "hf", "written": written}


def verify_reload(folder: Path, adapter: Adapter, model: Weights) -> None:
    """Load `folder` with its own library and compare outputs on fixed inputs with those of `model`.

    Raises:
        NumericalError: a tensor would be re-initialised on loading, or the outputs differ.
    """
    cpu = Compute(torch.device("cpu"), torch.float32)
    inputs = adapter.probe()
    features = final_features(adapter, model, {}, [inputs], cpu)
    own = adapter.output(cpu.place(model.read(adapter.closing)), features)
    theirs = adapter.reference(folder, inputs)
    difference = float((own - theirs).abs().max() / own.abs().max())
    if not difference <= RELOAD_TOLERANCE:
        raise NumericalError(f"{folder}: reloaded outputs differ by {difference:.1e} of their largest value")


def _shards(info: Mapping[str, TensorInfo]) -> Iterator[tuple[str, list[str], dict[str, Any] | None]]:
    """(file, names, index or None) of every weight file; the index comes with the last one."""
    sizes = {name: torch.Size(i.shape).numel() * i.dtype.itemsize for name, i in info.items()}
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if shards[-1] and filled + size > SHARD_BYTES:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    if len(shards) == 1:
        yield SINGLE_FILE, shards[0], None
        return
    files = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    places = {name: file for file, names in zip(files, shards, strict=True) for name in names}
    index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": places}
    for file, names in zip(files, shards, strict=True):
        yield file, names, index if file == files[-1] else None


def _copy_files(container: Path, target: Path) -> list[str]:
    """Copy configuration, tokenizer, processor and every other non-weight file."""
    copied = []
    for file in sorted(container.iterdir()):
        replaced = file.name in (INDEX_FILE, RECORD_FILE, CARD_FILE) or file.suffix in _WEIGHT_SUFFIXES
        if file.is_file() and not replaced and not file.name.startswith("."):
            try:
                shutil.copyfile(file, target / file.name)
            except OSError as error:
                raise InputError(f"cannot copy {file} to {target}: {error.strerror}") from error
            copied.append(file.name)
    return copied

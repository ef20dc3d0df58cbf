"""From a model reference in a suite file to a model that can be opened: what every layout of files has in common."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from featcal.formats.checkpoint import Checkpoint, read_config, resolve, stored_names
from featcal.formats.located import Located
from featcal.formats.lora import LoraWeights, split_lora
from featcal.formats.open_clip import PREFIXES, is_open_clip_folder, locate_open_clip, located_folder
from featcal.formats.peft import task_type
from featcal.formats.sentences import pooled_by
from featcal.formats.sizes import check_sizes
from featcal.formats.weights import Canonical
from featcal.system.errors import InputError


def checkpoint_folder(ref: str, root: Path, label: str) -> Path:
    """The folder of a model that other programs can load: no adapter on top, no file of weights alone.

    Raises:
        InputError: nothing is there, or it must be written out first.
    """
    for prefix in PREFIXES[1:]:
        ref = ref.removeprefix(prefix)
    if ref.startswith(PREFIXES) or split_lora(ref, root)[1] is not None:
        raise InputError(f"{label}: {ref} is not a checkpoint folder; write one with featcal export or merge first")
    return resolve(ref, root, label)


def locate(ref: str, root: Path, label: str) -> Located:
    """Find the model behind a reference: a folder relative to `root` or a Hub id, each with an optional
    `+ADAPTER`, `open_clip:ARCH:FILE`, or the `local-dir:FOLDER` and `hf-hub:ID` of open_clip.

    Raises:
        InputError: nothing is there, or its headers cannot be read.
    """
    if ref.startswith(PREFIXES):
        return locate_open_clip(ref, root, label)
    under, adapter = split_lora(ref, root)
    folder = resolve(under, root, label)
    if adapter is None and is_open_clip_folder(folder):
        return located_folder(folder, label)
    config = read_config(folder, label) | pooled_by(folder)
    check_sizes(config, f"{label}: {folder / 'config.json'}")
    names = stored_names(folder, label)
    lora = None if adapter is None else resolve(adapter, root, f"{label}, adapter")

    def opened(canonical: Canonical, aliases: Mapping[str, str]) -> Checkpoint | LoraWeights:
        whole = Checkpoint(folder, label, canonical)
        return whole if lora is None else LoraWeights(whole, lora, label, canonical, aliases)

    return Located(label, folder, config, names, opened, "" if lora is None else task_type(lora))

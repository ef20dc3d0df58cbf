"""From a model reference in a suite file to a model that can be opened: what every layout of files has in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from featcal.errors import InputError
from featcal.formats.checkpoint import Checkpoint, read_config, resolve, stored_names
from featcal.formats.lora import LoraWeights, split_lora
from featcal.formats.weights import Stored

OPEN_CLIP = ("open_clip:", "local-dir:", "hf-hub:")
"""How references to open_clip models begin; the first means a file of weights alone."""


@dataclass(frozen=True)
class Located:
    """A model whose files were found; nothing but headers was read."""

    label: str
    folder: Path
    """Where tokenizer, processor and other files lie."""
    config: Mapping[str, Any]
    """What `adapter_for` needs: content of `config.json`, or its like."""
    names: Sequence[str]
    """Names of all tensors as they are stored."""
    open: Callable[[Callable[[str], str | None]], Stored]
    """The model under canonical names, given the adapter's `canonical`."""

    @property
    def described_in(self) -> str:
        """What says which architecture it is, for messages."""
        if self.config.get("model_type") != "open_clip":
            return str(self.folder / "config.json")
        return f"architecture {self.config['arch']}" if "arch" in self.config else "open_clip_config.json"


def checkpoint_folder(ref: str, root: Path, label: str) -> Path:
    """The folder of a model that other programs can load: no adapter on top, no file of weights alone.

    Raises:
        InputError: nothing is there, or it must be written out first.
    """
    for prefix in OPEN_CLIP[1:]:
        ref = ref.removeprefix(prefix)
    if ref.startswith(OPEN_CLIP) or split_lora(ref, root)[1] is not None:
        raise InputError(f"{label}: {ref} is not a checkpoint folder; write one with featcal export or merge first")
    return resolve(ref, root, label)


def locate(ref: str, root: Path, label: str) -> Located:
    """Find the model behind a reference: a folder relative to `root` or a Hub id, each with an optional
    `+ADAPTER`, `open_clip:ARCH:FILE`, or the `local-dir:FOLDER` and `hf-hub:ID` of open_clip.

    Raises:
        InputError: nothing is there, or its headers cannot be read.
    """
    if ref.startswith(OPEN_CLIP):
        from featcal.formats.open_clip import locate_open_clip

        return locate_open_clip(ref, root, label)
    under, adapter = split_lora(ref, root)
    folder = resolve(under, root, label)
    if adapter is None and (folder / "open_clip_config.json").is_file():
        from featcal.formats.open_clip import is_open_clip_folder, located_folder

        if is_open_clip_folder(folder):
            return located_folder(folder, label)
    config, names = read_config(folder, label), stored_names(folder, label)
    if adapter is None:
        return Located(label, folder, config, names, lambda canonical: Checkpoint(folder, label, canonical))
    lora = resolve(adapter, root, f"{label}, adapter")

    def with_adapter(canonical: Callable[[str], str | None]) -> Stored:
        return LoraWeights(Checkpoint(folder, label, canonical), lora, label, canonical)

    return Located(label, folder, config, names, with_adapter)

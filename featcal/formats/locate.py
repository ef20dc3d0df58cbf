"""Find the model for a reference in a suite file, whatever layout its files have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from featcal.formats.checkpoint import Checkpoint, local_folder, read_config, stored_names
from featcal.formats.grid import SETTINGS, PackedCheckpoint, QuantizationGrid, dense_names
from featcal.formats.in_memory import locate_held
from featcal.formats.located_model import Located
from featcal.formats.lora import LoraWeights, split_lora
from featcal.formats.open_clip import is_open_clip_folder, locate_open_clip, located_folder
from featcal.formats.open_clip_config import PREFIXES
from featcal.formats.peft import CONFIG_FILE as ADAPTER_CONFIG
from featcal.formats.peft import explain_missing_base, task_type
from featcal.formats.sentences import sentence_options
from featcal.formats.weights import Canonical, name_shared
from featcal.system.errors import InputError
from featcal.system.formatting import shorten
from featcal.system.in_memory import is_held
from featcal.system.json_files import read_json

_LAYERS = frozenset({"num_hidden_layers", "num_layers", "num_decoder_layers", "n_layer", "layers"})
_SIZES = frozenset({
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "image_size",
    "patch_size", "vocab_size", "projection_dim", "max_position_embeddings", "d_model", "d_kv", "d_ff", "num_heads",
    "num_channels", "n_embd", "n_head", "width", "embed_dim", "head_width", "heads", "context_length",
})  # fmt: skip
_OFTEN_NONE = frozenset({"num_key_value_heads", "head_dim", "num_decoder_layers"})
_OFTEN_LISTS = frozenset({"image_size", "patch_size", "intermediate_size"})
MOST_LAYERS, MOST_SIZE = 10_000, 1 << 26
"""Limits of sizes in a configuration: far above every published model (126 layers, a vocabulary of 256 thousand),
and far below a machine's memory.
"""


def checkpoint_folder(ref: str, root: Path, label: str) -> Path:
    """Return the folder of a model that other programs can load: without an adapter, and not a single file of weights.

    Raises:
        InputError: there is no model, or it must be written out first.
    """
    for prefix in PREFIXES[1:]:
        ref = ref.removeprefix(prefix)
    if ref.startswith(PREFIXES) or is_held(ref) or split_lora(ref, root)[1] is not None:
        raise InputError(f"{label}: {ref} is not a checkpoint folder; write one with featcal export or merge first")
    return local_folder(ref, root, label)


def locate(ref: str, root: Path, label: str, *, unpack: bool = False) -> Located:
    """Find the model for a reference, reading only headers.

    Args:
        ref: a folder relative to `root` or a Hub id, each with an optional `+ADAPTER`; `open_clip:ARCH:FILE`;
            open_clip's `local-dir:FOLDER` and `hf-hub:ID`; or the reference to a model in memory.
        unpack: open a folder of packed weights as a model of dense weights.

    Raises:
        InputError: there is no model, its headers cannot be read, or its packed weights are of an unsupported kind.
    """
    if is_held(ref):
        return locate_held(ref, label)
    if ref.startswith(PREFIXES):
        return locate_open_clip(ref, root, label)
    under, adapter = split_lora(ref, root)
    folder = local_folder(under, root, label)
    if adapter is None and is_open_clip_folder(folder):
        return located_folder(folder, label, under)
    if adapter is None and (folder / ADAPTER_CONFIG).is_file():
        if not (folder / "config.json").is_file():
            raise InputError(f"{label}: {explain_missing_base(read_json(folder / ADAPTER_CONFIG), under)}")
        # transformers would load both, whether the weights have the adapter in them or not.
        raise InputError(
            f"{label}: {under} has a whole model and an adapter ({ADAPTER_CONFIG}); give {under}+{under} for the model "
            f"with the adapter, or take {ADAPTER_CONFIG} out of the folder if the weights have it in them or go without"
        )
    config = read_config(folder, label) | sentence_options(folder)
    # Before any library sees them: it would ask for memory or time by absurd numbers.
    _check_sizes(config, f"{label}: {folder / 'config.json'}")
    names = stored_names(folder, label)
    lora = None if adapter is None else local_folder(adapter, root, f"{label}, adapter")
    if unpack and lora is None and SETTINGS in config:
        return _locate_packed(folder, label, config, names)

    def open_tensors(canonical: Canonical, aliases: Mapping[str, str]) -> Checkpoint | LoraWeights:
        whole = Checkpoint(folder, label, name_shared(names, canonical, aliases))
        return whole if lora is None else LoraWeights(whole, lora, label, canonical, aliases)

    return Located(label, folder, config, names, open_tensors, "" if lora is None else task_type(lora), lora)


def _locate_packed(folder: Path, label: str, config: Mapping[str, Any], names: Sequence[str]) -> Located:
    """Open a folder of packed weights as a model of dense ones, without the packing in its configuration."""
    grid = QuantizationGrid.read(config[SETTINGS], f"{label}: {folder / 'config.json'}")

    def open_packed(canonical: Canonical, aliases: Mapping[str, str]) -> PackedCheckpoint:
        return PackedCheckpoint(folder, label, canonical, grid)

    dense = {name: value for name, value in config.items() if name != SETTINGS}
    return Located(label, folder, dense, dense_names(names), open_packed)


def _check_sizes(config: Mapping[str, Any], where: str) -> None:
    """Check that all sizes in a configuration, those of its towers included, are ones that a model can have.

    Raises:
        InputError: a size is not an integer from 1 to `MOST_SIZE` (`MOST_LAYERS` for layers); the message lists all
            such sizes, after `where`.
    """
    problems = [
        f"{where}: {name} is {shorten(repr(value), 40)}, {wanted}" for name, value, wanted in _wrong_sizes(config)
    ]
    if problems:
        raise InputError(*problems)


def _wrong_sizes(config: Mapping[str, Any], under: str = "") -> Iterator[tuple[str, Any, str]]:
    for name, value in config.items():
        if isinstance(value, Mapping) and not under.count("."):
            yield from _wrong_sizes(value, f"{under}{name}.")
        elif name in _LAYERS or name in _SIZES:
            most = MOST_LAYERS if name in _LAYERS else MOST_SIZE
            several = value if isinstance(value, list) and name in _OFTEN_LISTS else [value]
            # `True` is an int in Python, and a bool is not a size.
            fine = all(isinstance(one, int) and not isinstance(one, bool) and 1 <= one <= most for one in several)
            if not fine and not (value is None and name in _OFTEN_NONE):
                yield f"{under}{name}", value, f"a model has a whole number from 1 to {most}"

"""Convert the preprocessing of a CLIP, image processor and tokenizer, between the two layouts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from featcal.export.clip_counterparts import BPE_ROWS
from featcal.export.write import copy_tokenizer
from featcal.formats.located_model import Located
from featcal.formats.open_clip_config import preprocess_settings
from featcal.formats.processor import PREPROCESSOR_FILE, image_processor_settings
from featcal.system.extras import require_packages
from featcal.system.json_files import read_json

_RESAMPLING = {"bilinear": 2, "bicubic": 3}
"""Interpolations: open_clip's word → Pillow's number."""

Written = tuple[list[str], list[str]]
"""Names of files, and notes on settings that could not be converted."""


def processor_for_hf(config: Mapping[str, Any], target: Path) -> Written:
    """Write the `preprocessor_config.json` of an open_clip model."""
    from transformers import CLIPImageProcessor

    settings, side = preprocess_settings(config), config["model_cfg"]["vision_cfg"].get("image_size", 224)
    square = {"height": side, "width": side}
    sizes = {
        "shortest": {"size": {"shortest_edge": side}, "crop_size": square, "do_center_crop": True},
        "squash": {"size": square, "crop_size": square, "do_center_crop": False},
    }
    mode, words = settings["resize_mode"], settings["interpolation"]
    if mode not in sizes:
        return [], [f"no {PREPROCESSOR_FILE}: transformers' CLIP cannot resize as '{mode}' does"]
    CLIPImageProcessor(
        **sizes[mode],
        resample=_RESAMPLING.get(words, _RESAMPLING["bicubic"]),
        image_mean=list(settings["mean"]),
        image_std=list(settings["std"]),
    ).save_pretrained(target)
    return [PREPROCESSOR_FILE], []


def preprocess_for_open_clip(folder: Path, side: int) -> tuple[dict[str, Any], list[str]]:
    """Return the `preprocess_cfg` of a transformers folder, and notes; empty if open_clip's defaults must do.

    Args:
        side: pixels of the model's pictures in each direction.
    """
    found = image_processor_settings(folder)
    if found is None:
        return {}, [f"the source has no {PREPROCESSOR_FILE}; open_clip's default preprocessing (OpenAI's) is used"]
    given = found[1]
    size, crop = given.get("size"), given.get("do_center_crop", True)
    edges = dict(size) if isinstance(size, dict) else {"shortest_edge": size}
    notes = []
    settings: dict[str, Any] = {}
    if not given.get("do_rescale", True):
        notes.append("the source does not scale pixels to 0-1; open_clip always does")
    elif not math.isclose(factor := given.get("rescale_factor", 1 / 255), 1 / 255, rel_tol=1e-4):
        notes.append(f"the source scales pixels by {factor:g}; open_clip always does by 1/255")
    if given.get("do_normalize", True):
        settings |= {key: given[name] for key, name in (("mean", "image_mean"), ("std", "image_std")) if name in given}
    else:
        settings |= {"mean": [0.0] * 3, "std": [1.0] * 3}
    resampling = {number: word for word, number in _RESAMPLING.items()}.get(given.get("resample", 3))
    if resampling is None:
        notes.append(f"resampling {given['resample']} has no counterpart in open_clip; bicubic is used")
    settings["interpolation"] = resampling or "bicubic"
    resizes = given.get("do_resize", True)
    squashes = resizes and edges.get("height") == edges.get("width") == side
    shortens = resizes and crop and edges.get("shortest_edge") == side
    if not (squashes or shortens):
        notes.append(
            f"the source resizes pictures to {side} pixels in a way that open_clip does not have; 'shortest' is used"
        )
    settings["resize_mode"] = "squash" if squashes else "shortest"
    return settings, notes


def tokenizer_for_hf(located: Located, target: Path) -> Written:
    """Write the tokenizer of an open_clip model: its own files, or CLIP's vocabulary, which open_clip contains."""
    text_cfg = located.config["model_cfg"]["text_cfg"]
    if located.owns_folder and (copied := copy_tokenizer(located.folder, target)):
        return copied, []
    name = text_cfg.get("hf_tokenizer_name")
    if name:
        return [], [f"no tokenizer files in the source; take those of '{name}'"]
    if text_cfg.get("vocab_size", BPE_ROWS) != BPE_ROWS:
        return [], [f"no tokenizer files in the source, and {text_cfg['vocab_size']} rows are not CLIP's vocabulary"]
    return _write_bpe(target, text_cfg.get("context_length", 77)), []


def _write_bpe(target: Path, length: int) -> list[str]:
    """Write CLIP's tokenizer for transformers, from the vocabulary inside open_clip."""
    require_packages("open_clip")
    from open_clip import SimpleTokenizer
    from transformers import CLIPTokenizer

    own = SimpleTokenizer()
    renamed = {"<start_of_text>": "<|startoftext|>", "<end_of_text>": "<|endoftext|>"}
    vocabulary = {renamed.get(token, token): index for token, index in own.encoder.items()}
    tokenizer = CLIPTokenizer(vocab=vocabulary, merges=list(own.bpe_ranks), model_max_length=length)
    return [Path(file).name for file in tokenizer.save_pretrained(target)]


def tokenizer_for_open_clip(folder: Path, text_cfg: dict[str, Any], target: Path) -> Written:
    """Copy the tokenizer of a transformers folder; `text_cfg` names it if it is not CLIP's own."""
    file = folder / "tokenizer_config.json"
    own = read_json(file).get("tokenizer_class", "") if file.is_file() else "CLIP"
    if text_cfg["vocab_size"] == BPE_ROWS and own.startswith("CLIP"):
        return copy_tokenizer(folder, target), []
    copied = copy_tokenizer(folder, target)
    if not copied:
        rows = text_cfg["vocab_size"]
        return [], [f"no tokenizer files in the source, and {rows} rows are not CLIP's vocabulary"]
    # With any name here open_clip reads the tokenizer of a `local-dir:` from that folder.
    text_cfg["hf_tokenizer_name"] = "."
    note = "the tokenizer lies in the folder; on the Hub, set text_cfg.hf_tokenizer_name to the name of the repository"
    return copied, [note]

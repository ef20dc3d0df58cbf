"""Convert a CLIP between the layouts of transformers and open_clip, and verify that both libraries agree."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from featcal.export import clip_inputs
from featcal.export.clip_counterparts import clip_pairs, hf_config, open_clip_config, to_hf, to_open_clip
from featcal.export.write import (
    LIBRARIES,
    RELOAD_TOLERANCE,
    carried_text,
    carry_companions,
    files_in,
    rewrite,
)
from featcal.formats.checkpoint import SINGLE_FILE
from featcal.formats.grid import require_dense
from featcal.formats.hub import CARD_FILE, RECORD_FILE
from featcal.formats.load_pretrained import load_complete
from featcal.formats.locate import locate
from featcal.formats.located_model import Located, explain_model_errors
from featcal.formats.lora import split_lora
from featcal.formats.open_clip import WEIGHT_FILE, load_folder, open_clip_model
from featcal.formats.open_clip_config import CONFIG_FILE, weight_name
from featcal.formats.output import OutputFolder, save_tensors, save_text
from featcal.models.families.clip import ClipVision
from featcal.system.errors import InputError, NumericalError


def convert(source: str | Path, out: str | Path, layout: str) -> dict[str, Any]:
    """Write the model that `source` names as a folder in the given layout.

    A model that already has the layout is rewritten in it (`rewrite`). A conversion needs a whole CLIP: both towers,
    their projections and the logit scale. Values and dtypes do not change.

    Args:
        source: reference of a model, as in a suite file; paths relative to the working folder.
        layout: "hf" or "open_clip".

    Returns:
        The document of `featcal export --json`: `out`, `format`, `written` and `notes` (what the other layout cannot
        hold, or transformers 4 cannot read); after a conversion also `parity`, the largest absolute difference of
        image features, text features and logit scale between source and result on fixed random inputs, each computed
        by its own library.

    Raises:
        InputError: not a model that the other layout can hold; the message lists all reasons.
        NumericalError: the two libraries do not agree; nothing is written.
    """
    if layout not in LIBRARIES:
        raise InputError(f"format is one of {', '.join(LIBRARIES)}, not '{layout}'")
    located = locate(str(source), Path.cwd(), "model to convert")
    if layout == located.layout:
        return rewrite(source, out)
    require_dense(located.config, located.label)
    if split_lora(str(source), Path.cwd())[1] is not None:
        raise InputError(
            f"{source} is a base with an adapter; write the sum first: featcal export BASE+ADAPTER --out DIR"
        )
    text, record = carried_text(located, layout)
    other = LIBRARIES[located.layout]
    text = text.replace(f"library_name: {other}", f"library_name: {LIBRARIES[layout]}", 1)
    with OutputFolder(out) as folder:
        write = _write_open_clip if layout == "open_clip" else _write_hf
        carry_companions(located.folder, folder.model, record)
        written, notes = write(located, folder.model)
        parity = _parity(located, folder.model, layout)
        save_text(text, folder.model / CARD_FILE)
        written = sorted({*written, *files_in(folder.model), CARD_FILE, RECORD_FILE})
        record.pop("tensors", None)  # hashes of the other layout's tensors
        record |= {"converted": {"from": other, "parity": parity, "notes": notes}, "written": written}
        save_text(json.dumps(record, indent=2, allow_nan=False) + "\n", folder.model / RECORD_FILE)
        folder.commit()
    return {"out": str(folder.out), "format": layout, "written": written, "notes": notes, "parity": parity}


def _write_open_clip(located: Located, target: Path) -> tuple[list[str], list[str]]:
    """Write transformers' layout as open_clip's; return files and notes."""
    if located.config.get("model_type") != "clip":
        kind = located.config.get("model_type")
        raise InputError(
            f"{located.label}: model_type is '{kind}'; only a whole CLIP can become an open_clip model, which has no "
            "layout for an image tower alone"
        )
    model_cfg = open_clip_config(located.config, located.label)
    stored = located.open(ClipVision.canonical, {})
    pairs = clip_pairs(model_cfg["vision_cfg"]["layers"], model_cfg["text_cfg"]["layers"])
    tensors = to_open_clip(stored.read(stored.info), pairs, located.label)
    tokenizer, tokenizer_notes = clip_inputs.tokenizer_for_open_clip(located.folder, model_cfg["text_cfg"], target)
    preprocess, notes = clip_inputs.preprocess_for_open_clip(located.folder, model_cfg["vision_cfg"]["image_size"])
    content = {"model_cfg": model_cfg, "preprocess_cfg": preprocess}
    save_tensors(tensors, target / WEIGHT_FILE)
    # After the weights: open_clip takes a folder without any for a random model.
    save_text(json.dumps(content, indent=2) + "\n", target / CONFIG_FILE)
    return [CONFIG_FILE, WEIGHT_FILE, *tokenizer], [*notes, *tokenizer_notes]


def _write_hf(located: Located, target: Path) -> tuple[list[str], list[str]]:
    """Write open_clip's layout as transformers'; return files and notes."""
    from transformers import CLIPConfig

    with explain_model_errors(located.label, located.config_source):
        config = hf_config(located.config["model_cfg"], located.label)
    stored = located.open(weight_name, {})
    pairs = clip_pairs(config["vision_config"]["num_hidden_layers"], config["text_config"]["num_hidden_layers"])
    tensors = to_hf(stored.read(stored.info), pairs, located.label)
    # Some open_clip files hold it as [1]; transformers loads a scalar alone.
    tensors["logit_scale"] = tensors["logit_scale"].reshape(())
    CLIPConfig(**config, architectures=["CLIPModel"]).save_pretrained(target)
    processor, notes = clip_inputs.processor_for_hf(located.config, target)
    tokenizer, tokenizer_notes = clip_inputs.tokenizer_for_hf(located, target)
    save_tensors(tensors, target / SINGLE_FILE)
    return [SINGLE_FILE, "config.json", *processor, *tokenizer], [*notes, *tokenizer_notes]


@torch.no_grad()
def _parity(located: Located, folder: Path, layout: str) -> dict[str, float]:
    """Measure the largest differences between the two libraries; NumericalError if they exceed rounding."""
    if layout == "open_clip":
        hf, other = _hf_model(located.folder), load_folder(folder)
    else:
        hf, other = _hf_model(folder), open_clip_model(located)
    generator = torch.Generator().manual_seed(0)
    vision, text = hf.config.vision_config, hf.config.text_config
    pixels = torch.randn(2, 3, vision.image_size, vision.image_size, generator=generator)
    ids = _texts(text.vocab_size, text.max_position_embeddings, text.eos_token_id, generator)
    pooled = hf.vision_model(pixels).pooler_output, hf.text_model(ids).pooler_output
    compared: Mapping[str, tuple[Tensor, Tensor]] = {
        "image_features": (hf.visual_projection(pooled[0]), other.encode_image(pixels)),
        "text_features": (hf.text_projection(pooled[1]), other.encode_text(ids)),
        "logit_scale": (hf.logit_scale.exp().reshape(()), other.logit_scale.exp().reshape(())),
    }
    parity = {name: float((ours - theirs).abs().max()) for name, (ours, theirs) in compared.items()}
    for name, (ours, theirs) in compared.items():
        # Written so that NaN fails too.
        if not parity[name] <= RELOAD_TOLERANCE * float(torch.maximum(ours.abs().max(), theirs.abs().max())):
            raise NumericalError(f"{folder}: {name} of the two libraries differ by {parity[name]:.1e}; not written")
    return parity


def _hf_model(folder: Path) -> Any:
    from transformers import CLIPModel

    return load_complete(CLIPModel, folder)


def _texts(rows: int, length: int, end: int, generator: torch.Generator) -> Tensor:
    """Make two texts `[2, length]`, one as long as it may be; each ends with the end token, once."""
    end = end if end > 2 else rows - 1
    ids = torch.randint(1, rows - 1, (2, length), generator=generator)
    # Both libraries pool at the end token, so it may stand only where the text ends.
    ids[ids == end] = 1
    ids[0, length // 2], ids[1, -1] = end, end
    ids[0, length // 2 + 1 :] = 0
    return ids

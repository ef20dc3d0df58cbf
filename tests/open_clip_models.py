"""Tiny open_clip models with random weights, as folders that open_clip itself loads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from open_clip.model import CLIP
from safetensors.torch import load_file, save_file
from torch import Tensor

from featcal.export.clip_counterparts import clip_pairs, open_clip_config, to_open_clip, vision_pairs

WIDTH, SIDE, CONTEXT, WORDS, SPACE = 32, 12, 6, 20, 8


def model_cfg(quick_gelu: bool | None = True, vision: Mapping[str, Any] = {}, **text: Any) -> dict[str, Any]:
    """Three image blocks, two text blocks; `quick_gelu` None leaves the key out."""
    image: dict[str, Any] = {"layers": 3, "width": WIDTH, "head_width": 8, "image_size": SIDE, "patch_size": 4}
    words = {"context_length": CONTEXT, "vocab_size": WORDS, "width": 16, "heads": 2, "layers": 2}
    said = {} if quick_gelu is None else {"quick_gelu": quick_gelu}
    return {"embed_dim": SPACE, "vision_cfg": image | dict(vision), "text_cfg": words | text, **said}


def random_state(config: Mapping[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """The state dict of a model: no bias is 0, no norm is 1, so that a test can tell all of them apart."""
    torch.manual_seed(seed)
    model = CLIP(**config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.2 * torch.randn_like(parameter)
            elif parameter.ndim == 2:
                parameter += torch.randn_like(parameter) * parameter.shape[1] ** -0.5
    return {name: tensor.contiguous() for name, tensor in model.state_dict().items()}


def near(state: Mapping[str, Tensor], seed: int, distance: float = 0.3, prefix: str = "visual.") -> dict[str, Tensor]:
    """The tensors under `prefix` moved by noise of relative size `distance`."""
    generator = torch.Generator().manual_seed(seed)
    moved = dict(state)
    for name, tensor in state.items():
        if name.startswith(prefix):
            noise = torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
            moved[name] = tensor + distance * noise * tensor.norm() / noise.norm()
    return moved


def write_folder(folder: Path, config: Mapping[str, Any], state: Mapping[str, Tensor], **preprocess: Any) -> Path:
    """An open_clip folder."""
    folder.mkdir(parents=True)
    content = {"model_cfg": config, "preprocess_cfg": preprocess}
    (folder / "open_clip_config.json").write_text(json.dumps(content))
    save_file(dict(state), folder / "open_clip_model.safetensors", {"format": "pt"})
    return folder


def reference(folder: Path) -> str:
    """How a suite names the model in a folder, by its two files."""
    return f"open_clip:{folder / 'open_clip_config.json'}:{folder / 'open_clip_model.safetensors'}"


def suite_as_open_clip(suite_file: Path, root: Path) -> Path:
    """The suite of transformers models at `suite_file`, its models written as open_clip folders under `root`."""
    content = yaml.safe_load(suite_file.read_text())
    base = suite_file.parent / content["base"]
    config = open_clip_config(json.loads((base / "config.json").read_text()), "base")
    layers = config["vision_cfg"]["layers"]
    whole = {n: t for n, t in load_file(base / "model.safetensors").items() if not n.endswith("position_ids")}
    pairs = clip_pairs(layers, config["text_cfg"]["layers"])
    content["base"] = reference(write_folder(root / "base", config, to_open_clip(whole, pairs, "base")))
    for name, task in content["tasks"].items():
        expert = load_file(suite_file.parent / task["expert"] / "model.safetensors")
        tower = to_open_clip(expert, vision_pairs(layers), name)
        task["expert"] = reference(write_folder(root / name, config, tower))
        for split in ("calibration", "validation", "test"):
            task[split]["tensors"] = str(suite_file.parent / task[split]["tensors"])
    file = root / "suite.yaml"
    file.write_text(yaml.safe_dump(content))
    return file

"""A tiny vision transformer of timm that is saved and loaded as models of transformers are."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import timm
import torch
from safetensors.torch import load_file, save_file
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

NAME = "vit_tiny_patch16_224"
ARGUMENTS: dict[str, Any] = {
    "img_size": 8, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 4, "mlp_ratio": 1.5, "init_values": 1.0
}  # fmt: skip
PIXELS = {"input_size": [3, 8, 8], "crop_pct": 0.9, "interpolation": "bicubic", "mean": [0.5] * 3, "std": [0.25] * 3}


class TinyTimm(nn.Module):
    """Blocks are where they are in timm's own model."""

    def __init__(self, own: VisionTransformer) -> None:
        super().__init__()
        for name, module in own.named_children():
            self.add_module(name, module)
        self.cls_token, self.pos_embed = own.cls_token, own.pos_embed
        self.config = SimpleNamespace(image_size=8)

    def forward(self, pixel_values: Tensor) -> SimpleNamespace:
        own = made()
        own.load_state_dict(self.state_dict())
        for name, module in self.named_children():
            setattr(own, name, module)
        own.cls_token, own.pos_embed = self.cls_token, self.pos_embed
        return SimpleNamespace(logits=own(pixel_values))

    def save_pretrained(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        save_file(
            {name: tensor.contiguous() for name, tensor in self.state_dict().items()}, folder / "model.safetensors"
        )
        config = {"architecture": NAME, "num_classes": 3, "model_args": ARGUMENTS, "pretrained_cfg": PIXELS}
        (folder / "config.json").write_text(json.dumps(config))

    @classmethod
    def from_pretrained(cls, folder: Path, dtype: torch.dtype, output_loading_info: bool = False, **_: Any) -> Any:
        model = cls(made())
        model.load_state_dict(load_file(folder / "model.safetensors"))
        model = model.to(dtype).eval()
        return (model, {}) if output_loading_info else model


def made() -> VisionTransformer:
    model = timm.create_model(NAME, num_classes=3, **ARGUMENTS).eval()
    assert isinstance(model, VisionTransformer)
    return model


def tiny_timm() -> TinyTimm:
    torch.manual_seed(0)
    return TinyTimm(made())

"""Adapt vision transformers of timm with a classifier, in folders as timm writes them for the Hub."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from featcal.models.adapter import Batch, check_buffers
from featcal.models.families.decoder_facts import DecoderPart
from featcal.models.families.encoder import Encoder
from featcal.models.families.encoder_facts import VISION_DEFAULTS, EncoderFacts
from featcal.system.errors import InputError, NumericalError
from featcal.system.extras import require_packages

_PIECES = {
    "norm_layer": "norm", "norm_pre": "norm_pre", "block_fn": "blocks.0", "attn_layer": "blocks.0.attn",
    "qk_norm": "blocks.0.attn.q_norm", "scale_attn_norm": "blocks.0.attn.norm", "mlp_layer": "blocks.0.mlp",
    "act_layer": "blocks.0.mlp.act", "scale_mlp_norm": "blocks.0.mlp.norm",
}  # fmt: skip
"""Options of timm's class whose effect shapes do not show → a module whose class shows it."""


class TimmVit(Encoder):
    """timm's `VisionTransformer` with a head that reads the class token.

    Query, key and value are one linear map (`qkv`). Since the rows of a ridge regression do not depend on each other,
    the solution equals that of three maps. The map includes keys and values, which affect the class token, so in the
    last block it counts every token in full.
    """

    library = "timm"
    family = "timm"
    modality = "pixels"
    scores_with = "own"
    defaults = VISION_DEFAULTS
    facts = EncoderFacts(
        model_type="timm",
        config="",
        model="",
        modality="pixels",
        stack="",
        blocks="blocks",
        norm="norm",
        reads="x",
        parts=(DecoderPart("attention", "attn", "norm1", "ls1"), DecoderPart("mlp", "mlp", "norm2", "ls2")),
        shared=(),
        keys=("attn.qkv",),
        classifier=("head",),
        heads=("head.",),
        settings=("architecture", "image_size", "patch_size", *_PIECES),
    )

    def build(self, config: Mapping[str, Any], device: torch.device) -> tuple[Any, Any]:
        """Return timm's own model by the names in `config.json`, and its options.

        Raises:
            InputError: not a vision transformer, or one with another head than a classifier of the class token.
        """
        require_packages("timm")
        import timm
        from timm.models.vision_transformer import VisionTransformer

        named = str(config.get("architecture"))
        # timm's own `save_for_hf` writes the number of classes in both places.
        arguments = {name: one for name, one in (config.get("model_args") or {}).items() if name != "num_classes"}
        try:
            with torch.device("meta"):
                model: Any = timm.create_model(named, num_classes=int(config.get("num_classes", 1000)), **arguments)
        except (RuntimeError, TypeError) as error:
            raise InputError(f"timm cannot make a model '{named}' ({error})") from error
        kind = type(model)
        if kind is not VisionTransformer:
            raise InputError(f"'{named}' is timm's {kind.__name__}; featcal reads only timm's VisionTransformer")
        plain = model.attn_pool is None and isinstance(model.fc_norm, torch.nn.Identity)
        if model.global_pool != "token" or model.num_prefix_tokens != 1 or not plain:
            raise InputError(
                f"'{named}': its head does not read the class token alone (global_pool '{model.global_pool}', "
                f"{model.num_prefix_tokens} tokens in front of the patches); featcal reads no other models of timm"
            )
        for block in model.blocks:
            block.attn.fused_attn = False  # the fused kernel has no forward-mode derivative
        side, patch = model.patch_embed.img_size, model.patch_embed.patch_size
        if side[0] != side[1] or patch[0] != patch[1]:
            raise InputError(f"'{named}': pictures of {list(side)} in patches of {list(patch)}, which are not square")
        own = {"num_channels": model.patch_embed.proj.in_channels, "image_size": side[0], "patch_size": patch[0]}
        heads, eps = model.blocks[0].attn.num_heads, model.norm.eps
        options = {"architecture": named, "num_attention_heads": heads, "layer_norm_eps": eps}
        # Not `model_args`, which one model may name and another leave to its architecture.
        modules = dict(model.named_modules())
        pieces = {name: type(modules.get(place)).__name__ for name, place in _PIECES.items()}
        return check_buffers(model), SimpleNamespace(**own, **options, **pieces)

    def reference(self, folder: Path, inputs: Batch) -> Tensor:
        require_packages("timm")
        import timm

        try:
            loaded: Any = timm.create_model(f"local-dir:{folder.as_posix()}", pretrained=True).eval()
        except RuntimeError as error:
            raise NumericalError(f"{folder}: timm cannot load it: {error}") from error
        with torch.no_grad():
            features: Tensor = loaded.forward_head(loaded.forward_features(inputs["pixel_values"]), pre_logits=True)
        return features

    def loading(self, folder: Path, config: Mapping[str, Any]) -> str:
        return f'import timm\n\nmodel = timm.create_model("local-dir:{folder.as_posix()}", pretrained=True)'

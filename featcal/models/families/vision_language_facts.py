"""Describe language models that read pictures by one row of facts each, and list the rows that featcal comes with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from featcal.models.families.decoder_facts import DecoderFacts, DecoderPart


@dataclass(frozen=True, kw_only=True)
class VisionLanguageFacts(DecoderFacts):
    """A decoder-only model that reads pictures as tokens among those of the text, in the manner of Qwen2-VL.

    The patches of all pictures of a batch form one sequence, and a merger makes one token of several neighbouring
    patches.
    """

    whole: str
    """Module that computes states of text and pictures; the stack is inside it."""
    vision: str
    """The vision tower inside `whole`."""
    vision_parts: tuple[DecoderPart, ...]
    """The residual parts of a block of the tower, in order."""
    vision_shared: tuple[tuple[str, ...], ...] = ()
    """Linear maps of such a block that share an input, by name inside it."""
    vision_blocks: str = "blocks"
    """The list of blocks inside the tower."""
    patches: str = "patch_embed"
    """Module of the tower that computes a state of every patch."""
    merger: str = "merger"
    """Module of the tower after its blocks, which is calibrated as the tower's last block."""
    stored: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Names in files of modules of the whole model, if they differ from those in the class."""
    vision_settings: tuple[str, ...] = ()
    """Options of the tower's configuration that change the forward without changing a shape."""


_PARTS = (DecoderPart("attention", "attn", "norm1"), DecoderPart("mlp", "mlp", "norm2"))
_QWEN_NAMES = {"model.language_model": "model", "model.visual": "visual"}

VISION_LANGUAGE = (
    VisionLanguageFacts(
        model_type="qwen2_vl",
        config="Qwen2VLConfig",
        model="Qwen2VLForConditionalGeneration",
        stack="model.language_model",
        whole="model",
        vision="visual",
        vision_parts=_PARTS,
        stored=_QWEN_NAMES,
        vision_settings=("num_heads", "hidden_act", "spatial_merge_size", "rope_parameters"),
    ),
    VisionLanguageFacts(
        model_type="qwen2_5_vl",
        config="Qwen2_5_VLConfig",
        model="Qwen2_5_VLForConditionalGeneration",
        stack="model.language_model",
        whole="model",
        vision="visual",
        vision_parts=_PARTS,
        vision_shared=(("mlp.gate_proj", "mlp.up_proj"),),
        stored=_QWEN_NAMES,
        vision_settings=(
            "num_heads",
            "hidden_act",
            "spatial_merge_size",
            "rope_parameters",
            "window_size",
            "fullatt_block_indexes",
        ),
    ),
)
"""The models of pictures and text that featcal comes with, each tested (docs/architectures.md)."""

"""A tiny configuration of every encoder of the table."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from featcal.models.encoder_facts import ENCODERS, EncoderFacts

_COMMON = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_labels": 3}
_TEXT = {"vocab_size": 32, "intermediate_size": 24, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
_PICTURES = {"image_size": 8, "patch_size": 4}
_OWN: dict[str, dict[str, Any]] = {
    "bert": {**_TEXT, "max_position_embeddings": 16},
    "roberta": {**_TEXT, "max_position_embeddings": 18, "pad_token_id": 1, "type_vocab_size": 1},
    "vit": {**_PICTURES, "intermediate_size": 24},
    "dinov2": {**_PICTURES, "mlp_ratio": 2},
    "siglip": {**_PICTURES, "intermediate_size": 24},
    "siglip_vision_model": {**_PICTURES, "intermediate_size": 24},
}
ROWS = {facts.model_type: facts for facts in ENCODERS}
VARIANTS: dict[str, tuple[EncoderFacts, dict[str, Any]]] = {
    **{kind: (facts, {}) for kind, facts in ROWS.items() if not facts.prompts or kind.endswith("vision_model")},
    "dinov2-swiglu": (ROWS["dinov2"], {"use_swiglu_ffn": True}),
}
"""Every architecture whose class is that of its row, and what else a configuration may build of it."""


def tiny_encoder(facts: EncoderFacts, **options: Any) -> Any:
    """The library's own model with random weights."""
    torch.manual_seed(0)
    config = getattr(transformers, str(facts.config))(**_COMMON | _OWN[facts.model_type] | options)
    return getattr(transformers, str(facts.model))(config)

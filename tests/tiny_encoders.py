"""A tiny configuration of every encoder of the table."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from featcal.models.encoder_facts import ENCODERS, EncoderFacts

_COMMON = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_labels": 3}
_TEXT = {"vocab_size": 32, "intermediate_size": 24, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
_OWN: dict[str, dict[str, Any]] = {
    "bert": {**_TEXT, "max_position_embeddings": 16},
    "roberta": {**_TEXT, "max_position_embeddings": 18, "pad_token_id": 1, "type_vocab_size": 1},
}
ROWS = {facts.model_type: facts for facts in ENCODERS}


def tiny_encoder(facts: EncoderFacts, **options: Any) -> Any:
    """The library's own model with random weights."""
    torch.manual_seed(0)
    config = getattr(transformers, str(facts.config))(**_COMMON | _OWN[facts.model_type] | options)
    return getattr(transformers, str(facts.model))(config)

"""A tiny configuration of every decoder-only architecture, with what makes it differ from Llama switched on."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from featcal.models.decoder_facts import FACTS, DecoderFacts, with_classifier

_COMMON = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": 1,
    "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
_KINDS = ["sliding_attention", "full_attention"]
_OWN: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 5, "head_dim": 6},
    "qwen2": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "qwen3": {"head_dim": 6, "tie_word_embeddings": True},
    "gemma": {"head_dim": 6, "tie_word_embeddings": True},
    "gemma2": {
        "head_dim": 6, "sliding_window": 5, "query_pre_attn_scalar": 6, "attn_logit_softcapping": 4.0,
        "final_logit_softcapping": 3.0, "tie_word_embeddings": True,
    },
    "gemma3_text": {
        "head_dim": 6, "sliding_window": 5, "query_pre_attn_scalar": 6, "layer_types": _KINDS,
        "tie_word_embeddings": True,
    },
    "phi3": {"sliding_window": 5},
    "gpt2": {},
    "smollm3": {"no_rope_layers": [1, 0], "head_dim": 6},
    "arcee": {"head_dim": 6, "mlp_bias": True},
    "ernie4_5": {"head_dim": 6, "use_bias": True, "tie_word_embeddings": True},
    "hunyuan_v1_dense": {
        "head_dim": 6,
        "rope_parameters": {"rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0, "rope_theta": 10000.0},
    },
    "glm": {"head_dim": 8, "attention_bias": True},
    "glm4": {"head_dim": 8},
    "exaone4": {"sliding_window": 5, "layer_types": _KINDS},
    "seed_oss": {"head_dim": 6},
    "ministral3": {},
    "olmo2": {},
    "olmo3": {"sliding_window": 5, "layer_types": _KINDS},
    "mixtral": {"sliding_window": 5, "num_local_experts": 6, "num_experts_per_tok": 2},
    "qwen3_moe": {
        "head_dim": 6, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "norm_topk_prob": True,
        "num_hidden_layers": 3, "mlp_only_layers": [1],
    },
    "olmoe": {"num_experts": 6, "num_experts_per_tok": 2, "norm_topk_prob": False, "clip_qkv": 3.0},
}  # fmt: skip
_GPT2 = {
    "vocab_size": 32, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 16, "n_inner": 24, "bos_token_id": None,
    "eos_token_id": 1,
}  # fmt: skip
ROWS = {facts.model_type: facts for facts in FACTS}


CLASSIFIERS = {kind: own for kind, facts in ROWS.items() if (own := with_classifier(facts))}
"""Those that transformers has with a classifier too."""


def tiny_decoder(facts: DecoderFacts, **options: Any) -> Any:
    """The library's own model with random weights."""
    torch.manual_seed(0)
    common = _GPT2 if facts.model_type == "gpt2" else _COMMON
    classes = {"num_labels": 3, "pad_token_id": 0} if facts.classifier else {}
    config = getattr(transformers, str(facts.config))(**common | _OWN[facts.model_type] | classes | options)
    return getattr(transformers, str(facts.model))(config)

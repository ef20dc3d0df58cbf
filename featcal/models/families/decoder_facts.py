"""Describe decoder-only architectures by one row of facts each, and list the rows that featcal comes with.

A row names modules and options of the library's own classes, and repeats none of their computations. Facts that the
model itself shows (widths, biases, classes of norms, masks and positions of single blocks) are read from the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class DecoderPart:
    """One residual part of a block: state + post_norm(module(norm(state))), or joined(module(norm(state)), state).

    >>> import featcal
    >>> mlp = featcal.DecoderPart("mlp", "feed_forward", norm="ffn_norm")
    >>> mlp.name, mlp.module, mlp.norm
    ('mlp', 'feed_forward', 'ffn_norm')
    """

    name: str
    """Name in tables: "attention" or "mlp"."""
    module: str
    """Name of its module inside the block; the module gets those of the block's arguments
    that its own forward names.
    """
    norm: str = ""
    """The norm before the module; empty without one."""
    post_norm: str = ""
    """The norm, or the scale, on the module's output before it is added to the residual stream. The output of the
    module's last map is then not itself added to the stream, so "beta" does not apply to that map
    (`calibration.refined_recipe`).
    """
    joined: str = ""
    """The module that computes the next state from the module's output and the state, if that module contains the sum
    (BERT's norm after the sum). No map then writes into the residual stream directly, so "beta" does not apply.
    """


@dataclass(frozen=True)
class ExpertFacts:
    """The experts of a mixture: down(activation(gate(x)) * up(x)), with `act_fn` as activation.

    The library holds their weights as `gate_up_proj` `[experts, 2 inner, width]` and `down_proj`
    `[experts, width, inner]`.

    >>> import featcal
    >>> experts = featcal.ExpertFacts("feed.experts", maps=("gate", "up", "down"), router="feed.router")
    >>> experts.module, experts.chosen
    ('feed.experts', 'num_experts_per_tok')
    """

    module: str = "mlp.experts"
    """Module of the experts inside a block; blocks without it are dense."""
    maps: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    """Names in files of the maps of one expert: gate, up, down."""
    chosen: str = "num_experts_per_tok"
    """Option of the configuration with the number of experts that a token passes."""
    router: str = "mlp.gate"
    """The module inside a block that chooses among them: a weight `[experts, width]` and nothing more, by which a
    token's state gives one score per expert. The option `routers` calibrates such a router; any other router stays as
    merged.
    """


PRE_NORM = (
    DecoderPart("attention", "self_attn", "input_layernorm"),
    DecoderPart("mlp", "mlp", "post_attention_layernorm"),
)
POST_NORM = (
    DecoderPart("attention", "self_attn", post_norm="post_attention_layernorm"),
    DecoderPart("mlp", "mlp", post_norm="post_feedforward_layernorm"),
)
BOTH_NORMS = (
    DecoderPart("attention", "self_attn", "input_layernorm", "post_attention_layernorm"),
    DecoderPart("mlp", "mlp", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
)
QKV = tuple(f"self_attn.{name}_proj" for name in "qkv")
GATED = ("mlp.gate_proj", "mlp.up_proj")


@dataclass(frozen=True, kw_only=True)
class DecoderFacts:
    """One decoder-only architecture of transformers, or a user's own of the same form.

    >>> import featcal
    >>> facts = featcal.DecoderFacts(model_type="my-llama", config="LlamaConfig", model="LlamaForCausalLM")
    >>> [part.module for part in facts.parts], facts.defaults
    (['self_attn', 'mlp'], {'lam': 1e-05, 'rho': 0.5, 'alpha': 0.15})
    """

    model_type: str
    """`model_type` in `config.json`."""
    config: str | type
    """Class of its configuration: a name in transformers, or the class itself."""
    model: str | type
    """Class of the whole model with its language-modelling head: a name in transformers, or the class itself."""
    parts: tuple[DecoderPart, ...] = PRE_NORM
    """The residual parts of a block in order, which together make up the block."""
    shared: tuple[tuple[str, ...], ...] = (QKV, GATED)
    """Linear maps of a block that share an input, by name inside it; every other map has one of its own. Only estimates
    use this; a run finds shared inputs by itself.
    """
    stack: str = "model"
    """Module of the whole model that holds embeddings, blocks and the last norm."""
    blocks: str = "layers"
    """The list of blocks inside the stack."""
    embedding: str = "embed_tokens"
    """The token embedding inside the stack."""
    positions: str = ""
    """Table of learned positions inside the stack; no text may be longer than it."""
    norm: str = "norm"
    """The last norm inside the stack."""
    experts: ExpertFacts | None = None
    """Facts of a mixture of experts; None for dense blocks."""
    renamed: tuple[tuple[str, str], ...] = ()
    """Modules inside a block and their names in files, if these differ from those in the class."""
    head: str = "lm_head"
    """The head of the whole model, without a bias, tied to the embedding or not."""
    stored_head: str = ""
    """Name of the head in files, if it differs from that in the class."""
    classifier: str = ""
    """The linear map of `model`, in place of the head, that scores classes from the last token of a text
    (`with_classifier`); empty for a language model.
    """
    norm_offset: float = 0.0
    """Number that scale-only norms add to their stored weight: 1 if they compute (1 + weight) * z."""
    head_axis: int | None = None
    """Axis of the heads if norms act on each head's part of queries and keys: 2 for `[batch, tokens, heads, width]`,
    1 for `[batch, heads, tokens, width]`."""
    softcap: str = ""
    """Option of the configuration that bounds the scores of tokens: cap * tanh(scores / cap)."""
    settings: tuple[str, ...] = ()
    """Options of the configuration, in addition to `SETTINGS`, that change the forward without changing a shape."""
    dropped: tuple[str, ...] = ("rotary_emb.inv_freq",)
    """Endings of the names of stored tensors that carry no information."""
    defaults: Mapping[str, Any] = field(default_factory=lambda: {"lam": 1e-5, "rho": 0.5, "alpha": 0.15}, hash=False)
    """Options of a calibration; by default the paper's for Llama."""
    in_tuple: bool = False
    """True if blocks return the next state as the first entry of a tuple, False if they return it by itself."""
    is_found: bool = False
    """True if no person wrote the row: `found_decoder` found it by running the class, and it names no parts."""


def with_classifier(facts: DecoderFacts) -> DecoderFacts | None:
    """Return the row with a classifier per task in place of the head; None if transformers has no such class."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as CLASSES

    named = CLASSES.get(facts.model_type)
    return replace(facts, model=named, classifier="score", softcap="") if named else None


SETTINGS = (
    "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", "hidden_act", "rope_parameters",
    "attention_bias", "mlp_bias", "layer_types", "sliding_window", "use_sliding_window", "hidden_activation",
    "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention",
)  # fmt: skip
"""Options that change the forward without changing a shape, in any architecture that has them."""

FACTS = (
    DecoderFacts(model_type="llama", config="LlamaConfig", model="LlamaForCausalLM"),
    DecoderFacts(model_type="mistral", config="MistralConfig", model="MistralForCausalLM"),
    DecoderFacts(model_type="qwen2", config="Qwen2Config", model="Qwen2ForCausalLM"),
    DecoderFacts(model_type="qwen3", config="Qwen3Config", model="Qwen3ForCausalLM", head_axis=2),
    DecoderFacts(model_type="gemma", config="GemmaConfig", model="GemmaForCausalLM", norm_offset=1.0),
    DecoderFacts(
        model_type="gemma2",
        config="Gemma2Config",
        model="Gemma2ForCausalLM",
        parts=BOTH_NORMS,
        norm_offset=1.0,
        softcap="final_logit_softcapping",
    ),
    DecoderFacts(
        model_type="gemma3_text",
        config="Gemma3TextConfig",
        model="Gemma3ForCausalLM",
        parts=BOTH_NORMS,
        norm_offset=1.0,
        head_axis=1,
        softcap="final_logit_softcapping",
    ),
    DecoderFacts(model_type="phi3", config="Phi3Config", model="Phi3ForCausalLM", shared=()),
    DecoderFacts(
        model_type="gpt2",
        config="GPT2Config",
        model="GPT2LMHeadModel",
        parts=(DecoderPart("attention", "attn", "ln_1"), DecoderPart("mlp", "mlp", "ln_2")),
        shared=(),
        stack="transformer",
        blocks="h",
        embedding="wte",
        positions="wpe",
        norm="ln_f",
        settings=(
            "layer_norm_epsilon", "activation_function", "scale_attn_weights", "scale_attn_by_inverse_layer_idx",
        ),
        dropped=(".attn.bias", ".attn.masked_bias"),
    ),
    DecoderFacts(
        model_type="smollm3", config="SmolLM3Config", model="SmolLM3ForCausalLM", settings=("no_rope_layers",)
    ),
    DecoderFacts(model_type="arcee", config="ArceeConfig", model="ArceeForCausalLM", shared=(QKV,)),
    DecoderFacts(model_type="ernie4_5", config="Ernie4_5Config", model="Ernie4_5ForCausalLM"),
    DecoderFacts(
        model_type="hunyuan_v1_dense", config="HunYuanDenseV1Config", model="HunYuanDenseV1ForCausalLM", head_axis=1
    ),
    DecoderFacts(model_type="glm", config="GlmConfig", model="GlmForCausalLM", shared=(QKV,)),
    DecoderFacts(
        model_type="glm4",
        config="Glm4Config",
        model="Glm4ForCausalLM",
        parts=(
            DecoderPart("attention", "self_attn", "input_layernorm", "post_self_attn_layernorm"),
            DecoderPart("mlp", "mlp", "post_attention_layernorm", "post_mlp_layernorm"),
        ),
        shared=(QKV,),
    ),
    DecoderFacts(
        model_type="exaone4", config="Exaone4Config", model="Exaone4ForCausalLM", parts=POST_NORM, head_axis=1
    ),
    DecoderFacts(model_type="seed_oss", config="SeedOssConfig", model="SeedOssForCausalLM"),
    DecoderFacts(model_type="ministral3", config="Ministral3Config", model="Ministral3ForCausalLM"),
    DecoderFacts(model_type="olmo2", config="Olmo2Config", model="Olmo2ForCausalLM", parts=POST_NORM),
    DecoderFacts(model_type="olmo3", config="Olmo3Config", model="Olmo3ForCausalLM", parts=POST_NORM),
    DecoderFacts(
        model_type="mixtral",
        config="MixtralConfig",
        model="MixtralForCausalLM",
        shared=(QKV,),
        experts=ExpertFacts(maps=("w1", "w3", "w2")),
        renamed=(("mlp", "block_sparse_moe"),),
        settings=("num_experts_per_tok",),
    ),
    DecoderFacts(
        model_type="qwen3_moe",
        config="Qwen3MoeConfig",
        model="Qwen3MoeForCausalLM",
        head_axis=2,
        experts=ExpertFacts(),
        settings=("num_experts_per_tok", "norm_topk_prob"),
    ),
    DecoderFacts(
        model_type="olmoe",
        config="OlmoeConfig",
        model="OlmoeForCausalLM",
        shared=(QKV,),
        experts=ExpertFacts(),
        settings=("num_experts_per_tok", "norm_topk_prob", "clip_qkv"),
    ),
)  # fmt: skip
"""The architectures that featcal comes with, each tested (docs/architectures.md)."""

"""Describe encoders with a classification head by one row of facts each, and list the rows that featcal comes with.

As in `decoder_facts`, a row names modules and options of the library's own classes, and repeats none of their
computations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from featcal.models.families.decoder_facts import DecoderPart

Pooling = Literal["first", "mean", "first and mean"]
"""Part of the last state that the head reads: the first token, the mean over all tokens but padding, or the first token
and the mean over the others, concatenated. A `pooler` reads all tokens instead.
"""

TEXT_DEFAULTS: Mapping[str, Any] = {"lam": 1e-5, "rho": 2.0, "alpha": 0.6}
"""The paper's options for T5, its text model with numbers on GLUE."""
VISION_DEFAULTS: Mapping[str, Any] = {"lam": 0.05, "rho": 2.0, "alpha": 0.3}
"""The paper's options for CLIP."""


@dataclass(frozen=True, kw_only=True)
class EncoderFacts:
    """One encoder of transformers with a classification head, or a user's own of the same form.

    >>> import featcal
    >>> facts = featcal.EncoderFacts(
    ...     model_type="my-modernbert",
    ...     config="ModernBertConfig",
    ...     model="ModernBertForSequenceClassification",
    ...     modality="text",
    ...     stack="model",
    ...     blocks="layers",
    ...     parts=(
    ...         featcal.DecoderPart("attention", "attn", norm="attn_norm"),
    ...         featcal.DecoderPart("mlp", "mlp", norm="mlp_norm"),
    ...     ),
    ...     shared=(),
    ...     keys=("attn.Wqkv",),
    ...     norm="final_norm",
    ...     table="embeddings.tok_embeddings",
    ...     head=("head", "classifier"),
    ...     classifier=("classifier",),
    ... )
    >>> facts.pooling, facts.defaults
    ('first', {'lam': 1e-05, 'rho': 2.0, 'alpha': 0.6})
    """

    model_type: str
    """`model_type` in `config.json`."""
    config: str | type
    """Class of its configuration: a name in transformers, or the class itself."""
    model: str | type
    """Class of the whole model with its classification head: a name in transformers, or the class itself."""
    modality: Literal["text", "pixels"]
    stack: str
    """Module of the whole model that holds embeddings, blocks and the last norm; empty if it is the whole model."""
    parts: tuple[DecoderPart, ...]
    """The residual parts of a block in order, which together make up the block."""
    shared: tuple[tuple[str, ...], ...]
    """Linear maps of a block that share an input, by name inside it; every other map has one of its own."""
    keys: tuple[str, ...]
    """Linear maps of a block through which tokens affect other tokens: keys and values. If the head reads the first
    token alone, all other maps of the last block count that token in full and the rest by `patch_weight`.
    """
    classifier: tuple[str, ...] = ()
    """Linear maps of the head from the pooled state to the scores, by name in the whole model, with tanh between them.
    Empty if class prompts make the head (`pooler`). For a model with a `head`, only its last map, whose rows are the
    classes.
    """
    head: tuple[str, ...] = ()
    """Modules of the whole model that compute the scores from the pooled state, applied in order, for a head that is
    more than linear maps with tanh between them (ModernBERT: a map, an activation, a norm, then the classifier).
    """
    pooler: str = ""
    """Module after the last norm, inside the stack, that computes final features from all tokens. It is merged too,
    and class prompts score the features.
    """
    prompts: str = ""
    """Class in transformers of the whole model with a text tower, which encodes class prompts."""
    blocks: str = "encoder.layer"
    """The list of blocks inside the stack."""
    reads: str = "pixel_values"
    """Name of the stack's argument for pictures."""
    norm: str = ""
    """The last norm inside the stack; empty if every block ends with one."""
    pooling: Pooling = "first"
    pooling_option: str = ""
    """Option of the configuration that says how the state is pooled, "cls" or "mean"; empty if that is `pooling`."""
    table: str = ""
    """The token embedding inside the stack, of text."""
    positions: str = ""
    """Table of learned positions inside the stack, which limits the length of a text. Empty for rotary positions."""
    first_position: str = ""
    """Option of the configuration after which positions begin (RoBERTa: the id of padding); empty for a start at 0."""
    types: str = ""
    """Table of token types inside the stack, which distinguish the two texts of a pair."""
    stored_stack: str = ""
    """Name of the stack in files, if it differs from that in the class."""
    stored_blocks: str = ""
    """Name in files of the list of blocks inside the stack, if it differs from that in the class."""
    stored: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Names in files of modules of a block, if they differ from those in the class; several modules with one name are
    stored in one tensor, row after row.
    """
    any_size: bool = False
    """True if pictures may have any height and width that patches fill (positions are interpolated)."""
    heads: tuple[str, ...] = ("classifier.",)
    """Prefixes of the names of a head's tensors, which are written unchanged."""
    repeated: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Names under which files repeat a tensor of the stack → that tensor."""
    reads_packed: bool = True
    """False if transformers converts its files while it loads them, by a rule that fails
    for packed (quantised) weights.
    """
    settings: tuple[str, ...] = ()
    """Options of the configuration, in addition to `SETTINGS`, that change the forward without changing a shape."""
    dropped: tuple[str, ...] = ("embeddings.position_ids",)
    """Endings of the names of stored tensors that carry no information."""
    defaults: Mapping[str, Any] = field(default_factory=lambda: TEXT_DEFAULTS, hash=False)
    """Options of a calibration; by default the paper's for T5."""


SETTINGS = (
    "num_attention_heads",
    "hidden_act",
    "layer_norm_eps",
    "position_embedding_type",
    "is_decoder",
    "pad_token_id",
)
"""Options that change the forward without changing a shape, in any architecture that has them."""

BERT_PARTS = (
    DecoderPart("attention", "attention.self", joined="attention.output"),
    DecoderPart("mlp", "intermediate", joined="output"),
)
_KEYS = ("attention.self.key", "attention.self.value")
_QKV = ("attention.self.query", *_KEYS)
_PROJECTED = ("attention.q_proj", "attention.k_proj", "attention.v_proj")
_VIT_NAMES = {
    "attention.q_proj": "attention.attention.query",
    "attention.k_proj": "attention.attention.key",
    "attention.v_proj": "attention.attention.value",
    "attention.o_proj": "attention.output.dense",
}
_OF_PICTURES = ("patch_size", "image_size")

ENCODERS = (
    EncoderFacts(
        model_type="bert",
        config="BertConfig",
        model="BertForSequenceClassification",
        modality="text",
        stack="bert",
        parts=BERT_PARTS,
        shared=(_QKV,),
        keys=_KEYS,
        classifier=("bert.pooler.dense", "classifier"),
        table="embeddings.word_embeddings",
        positions="embeddings.position_embeddings",
        types="embeddings.token_type_embeddings",
        heads=("classifier.", "bert.pooler.", "cls."),
        repeated={"cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight"},
    ),
    EncoderFacts(
        model_type="roberta",
        config="RobertaConfig",
        model="RobertaForSequenceClassification",
        modality="text",
        stack="roberta",
        parts=BERT_PARTS,
        shared=(_QKV,),
        keys=_KEYS,
        classifier=("classifier.dense", "classifier.out_proj"),
        table="embeddings.word_embeddings",
        positions="embeddings.position_embeddings",
        first_position="pad_token_id",
        types="embeddings.token_type_embeddings",
        heads=("classifier.", "roberta.pooler.", "lm_head."),
        repeated={"lm_head.decoder.weight": "roberta.embeddings.word_embeddings.weight"},
    ),
    EncoderFacts(
        model_type="modernbert",
        config="ModernBertConfig",
        model="ModernBertForSequenceClassification",
        modality="text",
        stack="model",
        blocks="layers",
        parts=(DecoderPart("attention", "attn", "attn_norm"), DecoderPart("mlp", "mlp", "mlp_norm")),
        shared=(),
        keys=("attn.Wqkv",),
        classifier=("classifier",),
        head=("head", "classifier"),
        norm="final_norm",
        pooling_option="classifier_pooling",
        table="embeddings.tok_embeddings",
        heads=("head.", "classifier.", "decoder."),
        repeated={"decoder.weight": "model.embeddings.tok_embeddings.weight"},
        settings=("layer_types", "local_attention", "rope_parameters", "norm_eps", "hidden_activation"),
    ),
    EncoderFacts(
        model_type="vit",
        config="ViTConfig",
        model="ViTForImageClassification",
        modality="pixels",
        stack="vit",
        blocks="layers",
        stored_blocks="encoder.layer",
        stored=_VIT_NAMES | {"mlp.fc1": "intermediate.dense", "mlp.fc2": "output.dense"},
        parts=(
            DecoderPart("attention", "attention", "layernorm_before"),
            DecoderPart("mlp", "mlp", "layernorm_after"),
        ),
        shared=(_PROJECTED,),
        keys=_PROJECTED[1:],
        classifier=("classifier",),
        norm="layernorm",
        heads=("classifier.", "vit.pooler.", "decoder.", "vit.embeddings.mask_token"),
        settings=_OF_PICTURES,
        defaults=VISION_DEFAULTS,
    ),
    EncoderFacts(
        model_type="dinov2",
        config="Dinov2Config",
        model="Dinov2ForImageClassification",
        modality="pixels",
        stack="dinov2",
        stored=_VIT_NAMES
        | {"mlp.gate_proj": "mlp.weights_in", "mlp.up_proj": "mlp.weights_in", "mlp.down_proj": "mlp.weights_out"},
        parts=(
            DecoderPart("attention", "attention", "norm1", "layer_scale1"),
            DecoderPart("mlp", "mlp", "norm2", "layer_scale2"),
        ),
        shared=(_PROJECTED, ("mlp.gate_proj", "mlp.up_proj")),
        keys=_PROJECTED[1:],
        classifier=("classifier",),
        norm="layernorm",
        pooling="first and mean",
        any_size=True,
        reads_packed=False,
        settings=_OF_PICTURES,
        defaults=VISION_DEFAULTS,
    ),
    *(
        EncoderFacts(
            model_type=model_type,
            config="SiglipVisionConfig",
            model="SiglipVisionModel",
            modality="pixels",
            stack="",
            stored_stack="vision_model",
            blocks="encoder.layers",
            parts=(
                DecoderPart("attention", "self_attn", "layer_norm1"),
                DecoderPart("mlp", "mlp", "layer_norm2"),
            ),
            shared=(tuple(f"self_attn.{name}_proj" for name in "kvq"),),
            keys=("self_attn.k_proj", "self_attn.v_proj"),
            norm="post_layernorm",
            pooler="head",
            prompts="SiglipModel",
            heads=("text_model.", "logit_scale", "logit_bias"),
            settings=_OF_PICTURES,
            defaults=VISION_DEFAULTS,
        )
        for model_type in ("siglip", "siglip_vision_model")
    ),
)
"""The encoders that featcal comes with, each tested (docs/architectures.md)."""

"""Adapt T5 and FLAN-T5: an encoder stage, and a decoder stage that starts when the encoder is done."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import T5Config, T5ForConditionalGeneration
from transformers.models.t5.modeling_t5 import T5LayerNorm

from featcal.formats.weights import Weights
from featcal.models.adapter import Batch, Block, Call, Stage, Sublayer, TokenOptions, capture_call, check_buffers
from featcal.models.attention import choose_attention
from featcal.models.families.language import (
    IGNORED,
    LanguageModel,
    library_logits,
    mask_to_weights,
    random_tokens,
    require_no_cache,
    run_norm,
    unpadded_ids,
    zero_masked,
)

_SHARED, _HEAD = "shared.weight", "lm_head.weight"
_ALIASES = {"encoder.embed_tokens.weight": _SHARED, "decoder.embed_tokens.weight": _SHARED}
_UNUSED = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
"""Name of a table in old checkpoints that no version of the model reads."""
_SETTINGS = (
    "num_heads", "d_kv", "layer_norm_epsilon", "feed_forward_proj", "dense_act_fn",
    "relative_attention_num_buckets",
    "relative_attention_max_distance", "pad_token_id", "decoder_start_token_id", "scale_decoder_outputs",
)  # fmt: skip
HIDDEN, BIAS, ENCODER, CROSS_BIAS = 0, 2, 3, 5
"""Positions of a block's arguments: state, position bias, encoder output, position bias of cross-attention."""
_ENCODER_PARTS, _DECODER_PARTS = ("attention", "mlp"), ("attention", "cross-attention", "mlp")
"""Residual parts of a block, which holds them as `layer.0`, `layer.1` and so on."""


class T5EncoderStage(Stage):
    """The stage from token ids through embeddings to the encoder blocks."""

    name = "encoder"
    norm = T5LayerNorm

    def __init__(self, model: T5ForConditionalGeneration) -> None:
        self._stack = model.encoder
        self.blocks = tuple(Block(f"encoder.block.{i}", block) for i, block in enumerate(model.encoder.block))
        self.outer = (_SHARED,)

    def first_call(self, outer: Mapping[str, Tensor], inputs: Batch, upstream: Call | None) -> Call:
        embedding = {"embed_tokens.weight": outer[_SHARED]}
        ids, mask = inputs["input_ids"], inputs.get("attention_mask")
        call = capture_call(
            self._stack, self.blocks[0].module, embedding, input_ids=ids, attention_mask=mask, use_cache=False
        )
        return require_no_cache(call)

    def weighting(self, index: int, module: str) -> str:
        return "encoder tokens"

    def token_weights(self, weighting: str, call: Call, inputs: Batch, options: TokenOptions) -> Tensor | None:
        return mask_to_weights(inputs.get("attention_mask"))

    def state(self, call: Call, inputs: Batch) -> Tensor:
        return zero_masked(call.hidden_state, inputs.get("attention_mask"))

    def token_ids(self, inputs: Batch) -> Mapping[str, Tensor]:
        return {"encoder": unpadded_ids(inputs)}

    def advance(self, call: Call, output: Any) -> Call:
        """Return the next call with the block's output and the position bias that block 0 computed for all."""
        return _replace_args(call, {HIDDEN: output[0], BIAS: output[1]})

    def part(self, module: str) -> str:
        return _ENCODER_PARTS[int(module.split(".")[1])]

    def sublayers(self, block: Block, tensors: Mapping[str, Tensor]) -> Mapping[str, Sublayer]:
        return _sublayers(block, tensors, _ENCODER_PARTS)


class T5DecoderStage(Stage):
    """The stage from encoder output and shifted targets to the decoder blocks, by teacher forcing.

    The state is the decoder's tokens and the normed encoder output, concatenated along the token axis, because the
    drift of the encoder reaches every decoder block through cross-attention.
    """

    name = "decoder"
    norm = T5LayerNorm

    def __init__(self, model: T5ForConditionalGeneration, start: int) -> None:
        self._stack, self._encoder_norm, self._start = model.decoder, model.encoder.final_layer_norm, start
        self.blocks = tuple(Block(f"decoder.block.{i}", block) for i, block in enumerate(model.decoder.block))
        self.outer = (_SHARED, "encoder.final_layer_norm.weight")

    def first_call(self, outer: Mapping[str, Tensor], inputs: Batch, upstream: Call | None) -> Call:
        assert upstream is not None
        encoded = run_norm(self._encoder_norm, outer["encoder.final_layer_norm.weight"], upstream.hidden_state)
        call = capture_call(
            self._stack,
            self.blocks[0].module,
            {"embed_tokens.weight": outer[_SHARED]},
            input_ids=shift_right(inputs["labels"], self._start),
            encoder_hidden_states=encoded,
            encoder_attention_mask=inputs.get("attention_mask"),
            use_cache=False,
        )
        return require_no_cache(call)

    def weighting(self, index: int, module: str) -> str:
        """Return "encoder tokens" for keys and values of cross-attention, "decoder tokens" for everything else."""
        crossed = module.endswith(("EncDecAttention.k", "EncDecAttention.v"))
        return "encoder tokens" if crossed else "decoder tokens"

    def token_weights(self, weighting: str, call: Call, inputs: Batch, options: TokenOptions) -> Tensor | None:
        return mask_to_weights(_encoder_mask(inputs) if weighting == "encoder tokens" else _targets(inputs))

    def state(self, call: Call, inputs: Batch) -> Tensor:
        encoded = zero_masked(call.args[ENCODER], inputs.get("attention_mask"))
        return torch.cat([self.own_state(call, inputs), encoded], dim=1)

    def own_state(self, call: Call, inputs: Batch) -> Tensor:
        """Return decoder tokens alone."""
        # Without the encoder's output, which is normed while these tokens are not: one norm over both says little.
        return zero_masked(call.hidden_state, _targets(inputs))

    def token_ids(self, inputs: Batch) -> Mapping[str, Tensor]:
        """Return the ids that the decoder reads (the start token and the targets but the
        last), and then the encoder's text.
        """
        read = shift_right(inputs["labels"], self._start).masked_fill(_targets(inputs) == 0, IGNORED)
        return {"decoder": read, "encoder": unpadded_ids(inputs)}

    def with_state(self, call: Call, state: Tensor) -> Call:
        tokens = call.hidden_state.shape[1]
        return _replace_args(call, {HIDDEN: state[:, :tokens], ENCODER: state[:, tokens:]})

    def advance(self, call: Call, output: Any) -> Call:
        return _replace_args(call, {HIDDEN: output[0], BIAS: output[1], CROSS_BIAS: output[2]})

    def part(self, module: str) -> str:
        return _DECODER_PARTS[int(module.split(".")[1])]

    def sublayers(self, block: Block, tensors: Mapping[str, Tensor]) -> Mapping[str, Sublayer]:
        return _sublayers(block, tensors, _DECODER_PARTS)


class T5(LanguageModel):
    """T5 with its language-modelling head; `lm_head` is never calibrated, tied to the embedding or not."""

    family = "t5"
    modality = "seq2seq"
    classes = ("T5ForConditionalGeneration",)
    defaults: Mapping[str, Any] = {"lam": 1e-5, "rho": 2.0, "alpha": 0.6}
    head = ()
    kept_float32 = ("wo",)

    def __init__(self, config: Mapping[str, Any], names: Collection[str], device: torch.device) -> None:
        self._config = {**config, "tie_word_embeddings": config.get("tie_word_embeddings", True)}
        self._untied = _HEAD in names
        self.aliases = _ALIASES if self._untied else {**_ALIASES, _HEAD: _SHARED}
        self.model = self.fresh()
        choose_attention(self.model)
        checked: Any = self.model.config
        check_buffers(self.model)
        self.settings = {name: getattr(checked, name) for name in _SETTINGS}
        start = checked.decoder_start_token_id
        self._start = checked.pad_token_id if start is None else start
        self.stages = (T5EncoderStage(self.model), T5DecoderStage(self.model, self._start))
        self.tower = tuple(name for name, _ in self.model.named_parameters())
        self.vocabulary = (_SHARED, _HEAD) if self._untied else (_SHARED,)
        self.closing, self.scoring = ("decoder.final_layer_norm.weight",), (_HEAD if self._untied else _SHARED,)
        self.scale = checked.d_model**-0.5 if checked.scale_decoder_outputs else 1.0

    def fresh(self) -> T5ForConditionalGeneration:
        """Return a new skeleton of the whole model, with parameters on meta and its head tied if the file has none."""
        with torch.device("meta"):
            model = T5ForConditionalGeneration(T5Config(**self._config))
            tied = model.shared.weight
            model.encoder.embed_tokens.weight = model.decoder.embed_tokens.weight = tied
            # transformers 5 ties the head whatever the config says; the file decides here.
            model.lm_head.weight = torch.nn.Parameter(torch.empty_like(tied)) if self._untied else tied
        return model

    def final(self, tensors: Mapping[str, Tensor], call: Call, inputs: Batch) -> Tensor:
        """Return the normed decoder state at the first position, which decides the first token of the answer."""
        return self.close(tensors, call.hidden_state[:, 0])

    def close(self, tensors: Mapping[str, Tensor], hidden: Tensor) -> Tensor:
        return run_norm(self.model.decoder.final_layer_norm, tensors["decoder.final_layer_norm.weight"], hidden)

    def deciding_positions(self, inputs: Batch) -> Tensor:
        return _targets(inputs)

    def probe(self) -> Batch:
        ids = random_tokens(self.model.config.vocab_size)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids[:, :3].contiguous()}

    def reference(self, folder: Path, inputs: Batch) -> Tensor:
        return library_logits(T5ForConditionalGeneration, folder, **inputs)[:, 0]

    def canonical(self, stored: str) -> str | None:
        return None if stored in self.aliases or stored == _UNUSED else stored

    def portable(self, config: Mapping[str, Any], model: Weights) -> tuple[dict[str, Any], list[str]]:
        """Return a configuration that transformers 4 and 5 read alike, and notes if there is none."""
        scaled = bool(self.model.config.scale_decoder_outputs)
        settings = dict(config)
        # Version 4 ties the head and scales its inputs if `tie_word_embeddings` is true, and does neither if it is
        # false. Version 5 says true whatever the head is, and has `scale_decoder_outputs` beside it.
        if settings.get("tie_word_embeddings", True) != scaled:
            settings["tie_word_embeddings"] = scaled
        if not self._untied:
            alone = "" if scaled else "the head is the embedding and its inputs are not scaled"
        else:
            apart = scaled and not torch.equal(*model.read([_HEAD, _SHARED]).values())
            alone = "the head has values of its own and its inputs are scaled" if apart else ""
        return settings, [f"needs transformers 5: {alone}, which no config.json says to version 4"] if alone else []


def shift_right(labels: Tensor, start: int) -> Tensor:
    """Return decoder inputs `[batch, targets]` for teacher forcing: the start token, then all targets but the last."""
    shifted = labels.new_full(labels.shape, start)
    shifted[:, 1:] = labels[:, :-1].masked_fill(labels[:, :-1] == IGNORED, start)
    return shifted


def _encoder_mask(inputs: Batch) -> Tensor:
    ids = inputs["input_ids"]
    return inputs.get("attention_mask", torch.ones_like(ids))


def _targets(inputs: Batch) -> Tensor:
    return (inputs["labels"] != IGNORED).long()


def _replace_args(call: Call, replaced: Mapping[int, Any]) -> Call:
    return replace(call, args=tuple(replaced.get(i, value) for i, value in enumerate(call.args)))


def _sublayers(block: Block, tensors: Mapping[str, Tensor], names: tuple[str, ...]) -> Mapping[str, Sublayer]:
    """Return every residual part by its name; attention passes on its position bias, as a block does."""

    def part(position: int, name: str) -> Sublayer:
        def run(call: Call) -> Call:
            _, mask, bias, encoded, cross_mask, cross_bias, *_ = call.args
            given: dict[str, tuple[int, dict[str, Any]]] = {
                "attention": (BIAS, {"attention_mask": mask, "position_bias": bias}),
                "cross-attention": (
                    CROSS_BIAS,
                    {"key_value_states": encoded, "attention_mask": cross_mask, "position_bias": cross_bias},
                ),
            }
            if name not in given:
                return _replace_args(call, {HIDDEN: block.run_part(tensors, f"layer.{position}", call.hidden_state)})
            used, kwargs = given[name]
            hidden, bias = block.run_part(tensors, f"layer.{position}", call.hidden_state, **kwargs)[:2]
            return _replace_args(call, {HIDDEN: hidden, used: bias})

        return run

    return {name: part(position, name) for position, name in enumerate(names)}

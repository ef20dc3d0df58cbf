"""Llama: decoder-only, rotary positions, grouped-query attention, tied or untied head."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding

from featcal.formats.weights import Weights
from featcal.models.adapter import Batch, Block, Call, Stage, Sublayer, TokenOptions, capture_call, check_buffers
from featcal.models.attention import choose_attention
from featcal.models.language import (
    LanguageModel,
    answer_position,
    as_weights,
    library_logits,
    masked,
    random_tokens,
    run_norm,
    without_cache,
)

_EMBEDDING, _HEAD, _NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
_SETTINGS = (
    "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", "hidden_act", "rope_parameters",
    "attention_bias", "mlp_bias",
)  # fmt: skip
_ROPES_OF_4 = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")


class DecoderStage(Stage):
    """Token ids → embeddings → decoder blocks."""

    name = "decoder"
    norm = LlamaRMSNorm

    def __init__(self, model: LlamaForCausalLM) -> None:
        self._model = model.model
        self.blocks = tuple(Block(f"model.layers.{i}", block) for i, block in enumerate(model.model.layers))
        self.outer = (_EMBEDDING,)

    def first_call(self, outer: Mapping[str, Tensor], inputs: Batch, upstream: Call | None) -> Call:
        call = capture_call(
            self._model,
            self.blocks[0].module,
            {"embed_tokens.weight": outer[_EMBEDDING]},
            input_ids=inputs["input_ids"],
            attention_mask=inputs.get("attention_mask"),
            use_cache=False,
        )
        return without_cache(call)

    def weighting(self, index: int, module: str) -> str:
        return "tokens"

    def token_weights(self, weighting: str, call: Call, inputs: Batch, options: TokenOptions) -> Tensor | None:
        """Padding has weight 0; with `completion_only` so has every position that predicts no token of the answer.

        A text that is all answer, without a prompt, counts as a whole.
        """
        attended, answer = inputs.get("attention_mask"), inputs.get("completion_mask")
        if not options.completion_only or answer is None or attended is None:
            return as_weights(attended)
        predicting = torch.nn.functional.pad(answer[:, 1:], (0, 1))
        whole = (answer == attended).all(1, keepdim=True)
        return as_weights(torch.where(whole, attended, predicting))

    def state(self, call: Call, inputs: Batch) -> Tensor:
        return masked(call.hidden, inputs.get("attention_mask"))

    def part(self, module: str) -> str:
        return "attention" if module.startswith("self_attn.") else "mlp"

    def sublayers(self, block: Block, tensors: Mapping[str, Tensor]) -> Mapping[str, Sublayer]:
        part = partial(block.run_part, tensors)

        def attention(call: Call) -> Call:
            attended, _ = part("self_attn", hidden_states=part("input_layernorm", call.hidden), **call.kwargs)
            return self.with_state(call, call.hidden + attended)

        def mlp(call: Call) -> Call:
            return self.with_state(call, call.hidden + part("mlp", part("post_attention_layernorm", call.hidden)))

        return {"attention": attention, "mlp": mlp}


class Llama(LanguageModel):
    """Llama with its language-modelling head, which is never calibrated, tied to the embedding or not."""

    family = "llama"
    modality = "causal"
    classes = ("LlamaForCausalLM",)
    defaults: Mapping[str, Any] = {"lam": 1e-5, "rho": 0.5, "alpha": 0.15}
    head = ()

    def __init__(self, config: Mapping[str, Any], names: Collection[str], device: torch.device) -> None:
        tied = config.get("tie_word_embeddings", False)
        self._config = LlamaConfig(**{**config, "tie_word_embeddings": tied})
        self._device = device
        self.model = self.fresh()
        choose_attention(self.model)
        check_buffers(self.model)
        self.settings = {name: getattr(self._config, name, None) for name in _SETTINGS}
        self.stages = (DecoderStage(self.model),)
        self.tower = tuple(name for name, _ in self.model.named_parameters())
        self.aliases = {_HEAD: _EMBEDDING} if tied else {}
        self.vocabulary = (_EMBEDDING,) if tied else (_EMBEDDING, _HEAD)
        self.closing, self.scoring = (_NORM,), (_EMBEDDING if tied else _HEAD,)

    def fresh(self) -> LlamaForCausalLM:
        with torch.device("meta"):
            model = LlamaForCausalLM(copy.deepcopy(self._config))
            if self._config.tie_word_embeddings:
                model.lm_head.weight = model.model.embed_tokens.weight
        with self._device:
            model.model.rotary_emb = LlamaRotaryEmbedding(self._config)
        return model

    def final(self, tensors: Mapping[str, Tensor], call: Call, inputs: Batch) -> Tensor:
        """Normed state at the position that decides the first token of the answer."""
        rows = torch.arange(len(call.hidden), device=call.hidden.device)
        return run_norm(self.model.model.norm, tensors[_NORM], call.hidden[rows, answer_position(inputs)])

    def probe(self) -> Batch:
        ids = random_tokens(self._config.vocab_size)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def reference(self, folder: Path, inputs: Batch) -> Tensor:
        return library_logits(LlamaForCausalLM, folder, **inputs)[:, -1]

    def misfit(self, inputs: Batch) -> str | None:
        return super().misfit(inputs) or self._mixed_ropes(inputs)

    def _mixed_ropes(self, inputs: Batch) -> str | None:
        """Why the rotary frequencies of a text would depend on which others are in its batch; None if they do not."""
        kind = self._config.rope_parameters["rope_type"]
        if kind not in ("dynamic", "longrope"):
            return None
        limit: int = self._config.max_position_embeddings
        if kind == "longrope":
            limit = self._config.rope_parameters["original_max_position_embeddings"]
        lengths = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).sum(1)
        shortest, longest = int(lengths.min()), int(lengths.max())
        if longest <= limit or (kind == "longrope" and shortest > limit):
            return None
        return (
            f"rope type '{kind}' turns by the longest text of a batch beyond {limit} tokens, and texts reach from "
            f"{shortest} to {longest} tokens: what one gives would depend on the others; cut them to at most {limit} "
            "('max_length' of the task)"
        )

    def canonical(self, stored: str) -> str | None:
        return None if stored in self.aliases or stored.endswith("rotary_emb.inv_freq") else stored

    def portable(self, config: Mapping[str, Any], model: Weights) -> tuple[dict[str, Any], list[str]]:
        """transformers 4 reads `rope_theta` and `rope_scaling`, not the `rope_parameters` of version 5."""
        if config.get("rope_parameters") is None:
            return dict(config), []
        rope = dict(self._config.rope_parameters)
        kind, said = rope["rope_type"], {**config, "rope_theta": rope.pop("rope_theta")}
        said["rope_scaling"] = None if kind == "default" else rope
        why = "" if kind in _ROPES_OF_4 else f"version 4 has no rope type '{kind}'"
        if kind == "longrope":  # version 4 looks for the length beside the scaling, and divides by it
            original = said["original_max_position_embeddings"] = rope["original_max_position_embeddings"]
            ratio = config.get("max_position_embeddings", self._config.max_position_embeddings) / original
            if rope.get("attention_factor") is None and rope.get("factor") not in (None, ratio):
                why = f"version 4 replaces the factor {rope['factor']:g} of this longrope by {ratio:g}"
        return said, [f"needs transformers 5: {why}"] if why else []

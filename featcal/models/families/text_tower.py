"""Adapt models whose text tower is merged along with the tower for pictures, as a separate stage. A sample is then a
picture and a prompt that do not affect each other, so the stages of the picture's tower stay the same as without the
text tower. The library's own whole model supplies modules, masks and features of prompts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.func import functional_call

from featcal.formats.load_pretrained import load_complete
from featcal.formats.located_model import Located
from featcal.formats.tokenizers import open_prompt_tokenizer
from featcal.formats.weights import Weights
from featcal.models.adapter import (
    Adapter,
    Batch,
    Block,
    Call,
    PromptEncoder,
    Stage,
    TokenOptions,
    check_buffers,
    read_alone,
)
from featcal.models.attention import choose_attention
from featcal.models.families.clip import ClipVision
from featcal.models.families.decoder import fill_buffers
from featcal.models.families.decoder_facts import DecoderPart
from featcal.models.families.encoder import Encoder
from featcal.models.families.encoder_facts import ENCODERS
from featcal.models.families.facts import class_of
from featcal.models.families.forward_options import forward_options
from featcal.models.families.language import mask_to_weights, random_tokens, unpadded_ids, unreadable, zero_masked
from featcal.models.families.sublayers import PartedStage
from featcal.models.standing_in import capture_calls
from featcal.system.errors import InputError

_TOWER, _PROJECTION = "text_model", "text_projection"
_KEYS = ("self_attn.k_proj", "self_attn.v_proj")
_SETTINGS = ("hidden_act", "num_attention_heads", "layer_norm_eps", "eos_token_id")


class TextStage(PartedStage):
    """The stage from token ids of prompts through embeddings to the blocks of the text tower."""

    name = "text"
    feeds = False
    parts = (DecoderPart("attention", "self_attn", "layer_norm1"), DecoderPart("mlp", "mlp", "layer_norm2"))
    shared = (("self_attn.k_proj", "self_attn.v_proj", "self_attn.q_proj"),)

    def __init__(self, model: Any) -> None:
        self._stack = model.get_submodule(_TOWER)
        self._end: int = model.config.text_config.eos_token_id
        layers = enumerate(self._stack.encoder.layers)
        self.blocks = tuple(Block(f"{_TOWER}.encoder.layers.{i}", layer) for i, layer in layers)
        names = [name for name, _ in self._stack.named_parameters() if name.startswith("embeddings.")]
        self.outer = tuple(f"{_TOWER}.{name}" for name in names)

    def first_call(self, outer: Mapping[str, Tensor], inputs: Batch, upstream: Call | None) -> Call:
        own = {name.removeprefix(f"{_TOWER}."): tensor for name, tensor in outer.items()}
        return capture_calls(self._stack, self.blocks, own, **text_inputs(inputs))

    def buffers(self) -> dict[str, Tensor]:
        """Return the buffers of the tower, which are in no file."""
        return dict(self._stack.named_buffers())

    def pool_prompts(self, tensors: Mapping[str, Tensor], inputs: Batch) -> Tensor:
        """Return the features `[batch, width]` of prompts from the library's tower, run
        with these tensors by name inside it.
        """
        made: Tensor = functional_call(self._stack, dict(tensors), (), text_inputs(inputs), strict=True).pooler_output
        return made

    def weighting(self, index: int, module: str) -> str:
        """Return "read token" in the last block, whose other tokens affect the features
        only through keys and values.
        """
        last = index == len(self.blocks) - 1
        return "read token" if last and module not in _KEYS else "tokens"

    def token_weights(self, weighting: str, call: Call, inputs: Batch, options: TokenOptions) -> Tensor | None:
        """Return weight 0 for padding and 1 for other tokens; if one token is read alone,
        the others have `patch_weight`.
        """
        attended = mask_to_weights(inputs.get("attention_mask"))
        if weighting == "tokens":
            return attended
        return read_alone(call, self.read(inputs), options.patch_weight, attended)

    def read(self, inputs: Batch) -> Tensor:
        """Return the position `[batch]` of the token whose last state becomes the features: the last token if
        prompts are not masked (SigLIP), else the first end token.
        """
        ids = inputs["input_ids"]
        if "attention_mask" not in inputs:
            return torch.full((len(ids),), ids.shape[1] - 1, device=ids.device)
        # The library takes the largest id if the configuration says 2, as that of the first CLIPs does, whose end token
        # is another.
        return ids.argmax(1) if self._end == 2 else ids.eq(self._end).int().argmax(1)

    def state(self, call: Call, inputs: Batch) -> Tensor:
        return zero_masked(call.hidden_state, inputs.get("attention_mask"))

    def token_ids(self, inputs: Batch) -> Mapping[str, Tensor]:
        return {"prompt": unpadded_ids(inputs)}


class TwoTowers(Adapter):
    """A mixin that adds the text tower to the adapter of a tower for pictures."""

    reads_prompts = True
    whole_class: str
    """Class of transformers that holds both towers."""
    whole_prompts = False
    """True if prompts are padded to the model's full length, without a mask, as in its training."""
    _visual: tuple[Stage, ...]

    def __init__(self, config: Mapping[str, Any], names: Collection[str], device: torch.device) -> None:
        if "text_config" not in config:
            raise InputError(f"a '{config.get('model_type')}' has no text tower; leave 'text_tower' out")
        self._seeing.__init__(config, names, device)
        kind = getattr(transformers, self.whole_class)
        with torch.device("meta"):
            self._whole = kind(kind.config_class(**config))
        with device:
            fill_buffers(self._whole)
        choose_attention(self._whole)
        check_buffers(self._whole)
        self._text = TextStage(self._whole)
        for stage in self.stages:
            stage.name = "vision"
        self.stages = (self._text, *self.stages)
        kept = tuple(f"{one}." for one in (_TOWER, _PROJECTION))
        own = {name: tuple(p.shape) for name, p in self._whole.named_parameters() if name.startswith(kept)}
        self._text_shapes, self.scoring = own, tuple(own)
        self._both = {**self._seeing.shapes(), **own}
        self.tower = (*self.tower, *own)
        options = self._whole.config.text_config
        read = forward_options(options, _SETTINGS)
        self.settings = {**self.settings, **{f"text {name}": value for name, value in read.items()}}
        self._longest: int = options.max_position_embeddings
        self.vocabulary = (*self.vocabulary, f"{_TOWER}.embeddings.token_embedding.weight")

    @property
    def _seeing(self) -> Any:
        """Return this adapter in its role as adapter of the tower for pictures."""
        return super()

    def prompt_inputs(self, base: Located, texts: Sequence[str]) -> Batch:
        tokenizer = open_prompt_tokenizer(base.folder)
        padding, longest = "max_length" if self.whole_prompts else True, self._longest
        if not self.whole_prompts:  # as the base's prompts are cut where its text tower is not merged
            longest = min(longest, tokenizer.model_max_length)
        encoded = tokenizer(list(texts), padding=padding, truncation=True, max_length=longest, return_tensors="pt")
        return {name: encoded[name] for name in (["input_ids"] if self.whole_prompts else _READ)}

    def prompt_encoder_of(self, base: Located, model: Weights) -> tuple[PromptEncoder, float]:
        """Return the encoder of prompts by the model's own tower, in float32, and the base's factor of the scores."""
        tensors = {name: tensor.float().cpu() for name, tensor in model.read(self._text_shapes).items()}
        scale = base.open(self.canonical, self.aliases).read(["logit_scale"])["logit_scale"]

        def encode(texts: list[str]) -> Tensor:
            inputs = self.prompt_inputs(base, texts)
            # The tower's modules belong to the skeleton, which takes the tensors of one model at a time.
            with self.in_use:
                return self._features(tensors, inputs)

        return encode, float(scale.float().exp())

    def _features(self, tensors: Mapping[str, Tensor], inputs: Batch) -> Tensor:
        """Return the features `[batch, k]` of prompts as the library's own text tower computes them."""
        own, projection = dict(self._text.buffers()), f"{_PROJECTION}.weight"
        for name in self._text_shapes:
            if name.startswith(f"{_TOWER}."):
                own[name.removeprefix(f"{_TOWER}.")] = tensors[name]
        pooled = self._text.pool_prompts(own, inputs)
        return torch.nn.functional.linear(pooled, tensors[projection]) if projection in tensors else pooled

    def output(self, tensors: Mapping[str, Tensor], features: Tensor) -> Tensor:
        """Return the final features of the probe's pictures and prompts, concatenated."""
        prompts = {name: tensor.to(features.device) for name, tensor in self.probe().items()}
        return torch.cat([features, self._features(tensors, prompts)], dim=1)

    def reference(self, folder: Path, inputs: Batch) -> Tensor:
        seen = self._seeing.reference(folder, {"pixel_values": inputs["pixel_values"]})
        loaded = load_complete(getattr(transformers, self.whole_class), folder)
        with torch.no_grad():
            read = loaded.get_submodule(_TOWER)(**text_inputs(inputs)).pooler_output
            found: Tensor = loaded.text_projection(read) if hasattr(loaded, _PROJECTION) else read
        return torch.cat([seen, found], dim=1)

    def probe(self) -> Batch:
        """Return pictures, and prompts of random tokens that end with an end token."""
        rows = self._text_shapes[f"{_TOWER}.embeddings.token_embedding.weight"][0]
        if self.whole_prompts:
            return {**self._seeing.probe(), "input_ids": random_tokens(rows, tokens=self._longest)}
        ids, end = random_tokens(rows, tokens=min(7, self._longest)), self._whole.config.text_config.eos_token_id
        # The end token must come once; where it is given as 2 the library looks for the largest id.
        ids[ids == end] = (end + 1) % rows
        ids[:, -3] = ids.max() if end == 2 else end
        return {**self._seeing.probe(), "input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def tokens(self, inputs: Batch) -> int:
        pictured: int = self._seeing.tokens(inputs)
        return pictured + inputs["input_ids"].numel()

    def misfit(self, inputs: Batch) -> str | None:
        rows = self._text_shapes[f"{_TOWER}.embeddings.token_embedding.weight"][0]
        return self._seeing.misfit(inputs) or unreadable(inputs, rows)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._both


class ClipTowers(TwoTowers, ClipVision):
    """Both towers of transformers' CLIP."""

    whole_class = "CLIPModel"
    classes = ("CLIPModel",)


class SiglipTowers(TwoTowers, Encoder):
    """Both towers of transformers' SigLIP."""

    whole_class = "SiglipModel"
    whole_prompts = True


_READ = ("input_ids", "attention_mask")


def text_inputs(inputs: Batch) -> dict[str, Tensor]:
    """Return the inputs of a batch that the text tower reads."""
    return {name: inputs[name] for name in _READ if name in inputs}


def siglip_towers() -> type[Adapter]:
    """Return the adapter of both towers for the row of SigLIP (`encoder_facts`)."""
    (facts,) = (one for one in ENCODERS if one.model_type == "siglip")
    return class_of(facts, SiglipTowers, "Towers", modality=facts.modality, scores_with="prompts")

"""Adapt the vision tower of Hugging Face CLIP."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.func import functional_call
from transformers import CLIPConfig, CLIPVisionConfig
from transformers.models.clip.modeling_clip import CLIPVisionModelWithProjection

from featcal.formats.checkpoint import read_config
from featcal.formats.in_memory import name_place
from featcal.formats.load_pretrained import load_complete, load_pretrained
from featcal.formats.located_model import Located
from featcal.formats.tokenizers import open_prompt_tokenizer
from featcal.models.adapter import (
    Adapter,
    Batch,
    Block,
    Call,
    PromptEncoder,
    Stage,
    Sublayer,
    TokenOptions,
    capture_call,
    check_buffers,
    read_alone,
)
from featcal.models.attention import choose_attention
from featcal.system.errors import NoScores

_TOWER = "vision_model."
_PROJECTION = "visual_projection.weight"
_BARE = ("embeddings.", "encoder.", "pre_layrnorm.", "post_layernorm.")
_SETTINGS = ("hidden_act", "num_attention_heads", "layer_norm_eps", "patch_size", "image_size")
_CARRIED = ("text_model.", "text_projection.", "logit_scale", _PROJECTION)


def _vision_options(config: Mapping[str, Any]) -> CLIPVisionConfig:
    """Return the options of the image tower: a configuration of its own, or the part of a whole CLIP's that
    transformers takes, which in old files is `vision_config_dict`."""
    if not {"vision_config", "vision_config_dict"} & config.keys():
        return CLIPVisionConfig(**config)
    whole = CLIPConfig(**config)
    vision: CLIPVisionConfig = whole.vision_config
    vision.projection_dim = whole.projection_dim
    return vision


class VisionStage(Stage):
    """The stage from pixels through embeddings and first norm to the encoder blocks."""

    name = "vision"
    leads = True
    spent = ("pixel_values",)

    def __init__(self, model: CLIPVisionModelWithProjection) -> None:
        self._model = model
        prefix = f"{_TOWER}encoder.layers."
        layers = model.vision_model.encoder.layers
        self.blocks = tuple(Block(f"{prefix}{i}", layer) for i, layer in enumerate(layers))
        before = (f"{_TOWER}embeddings.", f"{_TOWER}pre_layrnorm.")
        self.outer = tuple(name for name, _ in model.named_parameters() if name.startswith(before))

    def first_call(self, outer: Mapping[str, Tensor], inputs: Batch, upstream: Call | None) -> Call:
        return capture_call(self._model, self.blocks[0].module, outer, pixel_values=inputs["pixel_values"])

    def weighting(self, index: int, module: str) -> str:
        """Return "class-token" in the last block, whose other tokens reach the output by keys and values alone."""
        last = index == len(self.blocks) - 1
        return "class-token" if last and module not in ("self_attn.k_proj", "self_attn.v_proj") else "all"

    def token_weights(self, weighting: str, call: Call, inputs: Batch, options: TokenOptions) -> Tensor | None:
        return None if weighting == "all" else read_alone(call, 0, options.patch_weight)

    def part(self, module: str) -> str:
        return "attention" if module.startswith("self_attn.") else "mlp"

    def sublayers(self, block: Block, tensors: Mapping[str, Tensor]) -> Mapping[str, Sublayer]:
        part = partial(block.run_part, tensors)

        def attention(call: Call) -> Call:
            attended, _ = part("self_attn", part("layer_norm1", call.hidden_state), *call.args[1:], **call.kwargs)
            return self.with_state(call, call.hidden_state + attended)

        def mlp(call: Call) -> Call:
            return self.with_state(call, call.hidden_state + part("mlp", part("layer_norm2", call.hidden_state)))

        return {"attention": attention, "mlp": mlp}


class ClipVision(Adapter):
    """The vision tower of CLIP and, if the base has one, the projection that gives the final features.

    Canonical names are those of a full CLIP checkpoint (`vision_model.…`): both major versions of transformers read
    them, while a tower that version 5 saved from scratch lacks the prefix.
    """

    family = "clip"
    modality = "pixels"
    scores_with = "prompts"
    class_token = True
    classes: tuple[str, ...] = ("CLIPVisionModel", "CLIPVisionModelWithProjection", "CLIPModel")
    image_processor = "CLIPImageProcessor"
    remakes: Mapping[str, str] = {
        "CLIPForImageClassification": (
            "CLIPVisionModel.from_pretrained(…).save_pretrained(…) keeps its image tower alone"
        )
    }
    defaults: Mapping[str, Any] = {"lam": 0.05, "rho": 2.0, "alpha": 0.3}

    def __init__(self, config: Mapping[str, Any], names: Collection[str], device: torch.device) -> None:
        checked = _vision_options(config)
        self.settings = {name: getattr(checked, name) for name in _SETTINGS}
        self._input_shape = (checked.num_channels, checked.image_size, checked.image_size)
        with torch.device("meta"):
            self.model = CLIPVisionModelWithProjection(checked)
        choose_attention(self.model)
        embeddings = self.model.vision_model.embeddings
        positions = torch.arange(embeddings.num_positions, device=device).expand((1, -1))
        # Built on the meta device it has no values, and files need not hold it.
        embeddings.register_buffer("position_ids", positions, persistent=False)
        check_buffers(self.model)
        self.stages = (VisionStage(self.model),)
        names = [name for name, _ in self.model.named_parameters()]
        self.tower = tuple(name for name in names if name.startswith(_TOWER))
        self.head = (_PROJECTION,)
        self.closing = tuple(name for name in self.tower if name.startswith(f"{_TOWER}post_layernorm."))

    def final(self, tensors: Mapping[str, Tensor], call: Call, inputs: Batch) -> Tensor:
        """Return the class token after the last norm and the projection; without a
        projection, the normed class token itself.
        """
        norm = {name.rsplit(".", 1)[1]: tensors[name] for name in self.closing}
        pooled = functional_call(self.model.vision_model.post_layernorm, norm, (call.hidden_state[:, 0],), strict=True)
        if _PROJECTION in tensors:
            pooled = torch.nn.functional.linear(pooled, tensors[_PROJECTION])
        features: Tensor = pooled
        return features

    def probe(self) -> Batch:
        return {"pixel_values": torch.randn(2, *self._input_shape, generator=torch.Generator().manual_seed(0))}

    def reference(self, folder: Path, inputs: Batch) -> Tensor:
        """Return pooled features before the projection, which a vision tower alone does not have."""
        loaded = load_complete(getattr(transformers, self.loader(read_config(folder, "written model"))), folder)
        with torch.no_grad():
            # A tower of transformers 5 is flat, a whole CLIP has it inside.
            pooled: Tensor = getattr(loaded, "vision_model", loaded)(**inputs).pooler_output
        return pooled

    def loader(self, config: Mapping[str, Any]) -> str:
        """Return "CLIPModel" for a whole CLIP, "CLIPVisionModel" for its image tower alone."""
        return "CLIPModel" if config.get("model_type") == "clip" else "CLIPVisionModel"

    def prompt_encoder(self, base: Located) -> tuple[PromptEncoder, float]:
        """Return prompt encoder and logit scale of a transformers CLIP."""
        from transformers import CLIPModel

        folder = base.folder
        if base.config.get("model_type") != "clip":
            raise NoScores(
                f"base: {name_place(folder)} has no text tower, so there is no zero-shot head; "
                "evaluation needs a full CLIP checkpoint as base"
            )
        tokenizer = open_prompt_tokenizer(folder)
        model, _ = load_pretrained(CLIPModel, folder)
        # Files of a tokenizer need not say how long a text may be.
        longest = min(tokenizer.model_max_length, model.config.text_config.max_position_embeddings)

        def encode(texts: list[str]) -> Tensor:
            tokens = tokenizer(texts, padding=True, truncation=True, max_length=longest, return_tensors="pt")
            pooled = model.text_model(tokens["input_ids"], attention_mask=tokens["attention_mask"]).pooler_output
            features: Tensor = model.text_projection(pooled)
            return features

        return encode, float(model.logit_scale.exp())

    def tokens(self, inputs: Batch) -> int:
        positions: int = self.model.vision_model.embeddings.num_positions
        return positions * len(inputs["pixel_values"])

    def misfit(self, inputs: Batch) -> str | None:
        return misfit_of_pictures(inputs, self._input_shape, "image processor")

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tuple(parameter.shape) for name, parameter in self.model.named_parameters()}

    @staticmethod
    def canonical(stored: str) -> str | None:
        if stored.endswith("position_ids"):
            return None
        # A tower that transformers 5 saved alone lacks the prefix.
        return f"{_TOWER}{stored}" if stored.startswith(_BARE) else stored

    @staticmethod
    def is_carried(name: str) -> bool:
        return name.startswith(_CARRIED)


def misfit_of_pictures(inputs: Batch, shape: tuple[int, ...], prepared_by: str) -> str | None:
    """Return why a tower for pictures of one shape `[channels, height, width]` refuses inputs; None if it takes them.

    Args:
        prepared_by: the base's settings that prepare its pictures, for the message.
    """
    pixels = inputs.get("pixel_values")
    if pixels is None:
        return "no pixel_values; a vision tower takes pictures"
    if tuple(pixels.shape[1:]) != shape:
        given = list(pixels.shape[1:])
        return (
            f"inputs have shape {given}, the model takes {list(shape)}; check the base's {prepared_by} or the tensors"
        )
    return None

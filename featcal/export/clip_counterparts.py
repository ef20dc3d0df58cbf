"""Map tensors and options between CLIP's two layouts, open_clip's and transformers'."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from featcal.formats.open_clip_config import check_plain, quick_gelu
from featcal.system.errors import InputError
from featcal.system.extras import require_packages

_BLOCK = {
    "ln_1": "layer_norm1",
    "ln_2": "layer_norm2",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
    "attn.out_proj": "self_attn.out_proj",
}
BPE_ROWS = 49408
"""Size of CLIP's own vocabulary, whose last id ends a text."""
_ARGMAX = 2
"""Value of `eos_token_id` at which transformers pools at the highest id, as open_clip always does."""
_ONLY_OPEN_CLIP = {
    "ls_init_value": None, "no_ln_pre": False, "block_type": None, "qk_norm": False, "scaled_cosine_attn": False,
    "scale_heads": False, "scale_attn_inner": False, "scale_attn": False, "scale_fc": False, "embed_cls": False,
    "no_causal_mask": False, "proj_bias": False, "proj_type": "linear", "act_kwargs": None,
}  # fmt: skip
"""Options that transformers' CLIP does not have, and the values at which they have no effect."""


@dataclass(frozen=True)
class Pair:
    """A tensor of open_clip and the tensors of transformers that form it, stacked by rows and perhaps transposed."""

    open_clip: str
    hf: tuple[str, ...]
    transposed: bool = False

    def to_open_clip(self, parts: Sequence[Tensor]) -> Tensor:
        whole = parts[0] if len(parts) == 1 else torch.cat(list(parts))
        return whole.mT.contiguous() if self.transposed else whole

    def to_hf(self, whole: Tensor) -> dict[str, Tensor]:
        # `chunk` wants a dimension, which the logit scale lacks.
        parts = (whole.mT if self.transposed else whole).chunk(len(self.hf)) if whole.ndim else (whole,)
        return {name: part.contiguous() for name, part in zip(self.hf, parts, strict=True)}


def _both(open_clip: str, hf: str) -> list[Pair]:
    return [Pair(f"{open_clip}.{kind}", (f"{hf}.{kind}",)) for kind in ("weight", "bias")]


def _blocks(open_clip: str, hf: str, layers: int) -> list[Pair]:
    pairs = []
    for i in range(layers):
        own, theirs = f"{open_clip}transformer.resblocks.{i}", f"{hf}encoder.layers.{i}"
        for kind in ("weight", "bias"):
            parts = tuple(f"{theirs}.self_attn.{part}_proj.{kind}" for part in "qkv")
            pairs.append(Pair(f"{own}.attn.in_proj_{kind}", parts))
        for name, other in _BLOCK.items():
            pairs += _both(f"{own}.{name}", f"{theirs}.{other}")
    return pairs


def vision_pairs(layers: int) -> list[Pair]:
    """Return the pairs of the image tower, without its projection."""
    embeddings = "vision_model.embeddings"
    return [
        Pair("visual.class_embedding", (f"{embeddings}.class_embedding",)),
        Pair("visual.conv1.weight", (f"{embeddings}.patch_embedding.weight",)),
        Pair("visual.positional_embedding", (f"{embeddings}.position_embedding.weight",)),
        *_both("visual.ln_pre", "vision_model.pre_layrnorm"),
        *_blocks("visual.", "vision_model.", layers),
        *_both("visual.ln_post", "vision_model.post_layernorm"),
    ]


def text_pairs(layers: int) -> list[Pair]:
    """Return the pairs of the text tower, without its projection."""
    embeddings = "text_model.embeddings"
    return [
        Pair("token_embedding.weight", (f"{embeddings}.token_embedding.weight",)),
        Pair("positional_embedding", (f"{embeddings}.position_embedding.weight",)),
        *_blocks("", "text_model.", layers),
        *_both("ln_final", "text_model.final_layer_norm"),
    ]


HEAD_PAIRS = (
    Pair("visual.proj", ("visual_projection.weight",), transposed=True),
    Pair("text_projection", ("text_projection.weight",), transposed=True),
    Pair("logit_scale", ("logit_scale",)),
)


def clip_pairs(vision_layers: int, text_layers: int) -> list[Pair]:
    """Return the pairs of every tensor of a CLIP."""
    return [*vision_pairs(vision_layers), *text_pairs(text_layers), *HEAD_PAIRS]


def to_open_clip(tensors: Mapping[str, Tensor], pairs: Sequence[Pair], label: str) -> dict[str, Tensor]:
    """Return transformers' tensors under open_clip's names, with values and dtypes unchanged.

    Raises:
        InputError: a tensor is missing or left over.
    """
    _check_names({name for pair in pairs for name in pair.hf}, set(tensors), label)
    return {pair.open_clip: pair.to_open_clip([tensors[name] for name in pair.hf]) for pair in pairs}


def to_hf(tensors: Mapping[str, Tensor], pairs: Sequence[Pair], label: str) -> dict[str, Tensor]:
    """Return open_clip's tensors under transformers' names; a separate text tower (`text.…`) is accepted too."""
    plain = {name.removeprefix("text."): tensor for name, tensor in tensors.items()}
    _check_names({pair.open_clip for pair in pairs}, set(plain), label)
    converted: dict[str, Tensor] = {}
    for pair in pairs:
        converted |= pair.to_hf(plain[pair.open_clip])
    return converted


def _check_names(expected: set[str], found: set[str], label: str) -> None:
    missing, extra = sorted(expected - found), sorted(found - expected)
    problems = [f"{label}: tensors are missing: {', '.join(missing[:4])}"] if missing else []
    problems += [f"{label}: tensors without a counterpart: {', '.join(extra[:4])}"] if extra else []
    if problems:
        raise InputError(*problems)


def open_clip_config(config: Mapping[str, Any], label: str) -> dict[str, Any]:
    """Make open_clip's `model_cfg` from a `config.json` of transformers' CLIP.

    Raises:
        InputError: lists what open_clip cannot express.
    """
    from transformers import CLIPConfig

    whole = CLIPConfig(**config)
    vision, text = whole.vision_config, whole.text_config
    activations = {vision.hidden_act, text.hidden_act}
    problems = []
    if len(activations) > 1 or activations - {"quick_gelu", "gelu"}:
        problems.append(f"hidden_act is {' and '.join(sorted(activations))}; open_clip has quick_gelu or gelu for both")
    if not isinstance(text.eos_token_id, int):
        problems.append(f"eos_token_id is {text.eos_token_id}; open_clip has one")
    if vision.num_channels != 3:
        problems.append(f"{vision.num_channels} channels; open_clip has 3")
    if problems:
        raise InputError(*(f"{label}: {problem}" for problem in problems))

    def tower(part: Any) -> dict[str, Any]:
        ratio = part.intermediate_size / part.hidden_size
        if int(part.hidden_size * ratio) != part.intermediate_size:  # open_clip rounds down
            ratio = (part.intermediate_size + 0.5) / part.hidden_size
        own = {"width": part.hidden_size, "layers": part.num_hidden_layers, "mlp_ratio": ratio}
        return own if part.layer_norm_eps == 1e-5 else {**own, "norm_kwargs": {"eps": part.layer_norm_eps}}

    vision_cfg = {
        **tower(vision),
        "head_width": vision.hidden_size // vision.num_attention_heads,
        "image_size": vision.image_size,
        "patch_size": vision.patch_size,
    }
    text_cfg = {
        **tower(text),
        "heads": text.num_attention_heads,
        "context_length": text.max_position_embeddings,
        "vocab_size": text.vocab_size,
    }
    if text.eos_token_id != _ARGMAX and (text.eos_token_id, text.vocab_size) != (BPE_ROWS - 1, BPE_ROWS):
        text_cfg |= {"pool_type": "eos", "eos_id": text.eos_token_id}
    return {
        "embed_dim": whole.projection_dim,
        "vision_cfg": vision_cfg,
        "text_cfg": text_cfg,
        "quick_gelu": activations == {"quick_gelu"},
    }


def hf_config(model_cfg: Mapping[str, Any], label: str) -> dict[str, Any]:
    """Make the arguments of transformers' `CLIPConfig` from open_clip's `model_cfg`.

    Raises:
        InputError: lists what transformers' CLIP cannot express.
    """
    require_packages("open_clip")
    from open_clip.model import CLIPTextCfg, CLIPVisionCfg

    check_plain(model_cfg)
    vision, text = CLIPVisionCfg(**model_cfg["vision_cfg"]), CLIPTextCfg(**model_cfg["text_cfg"])
    problems = [
        f"{name} is {getattr(tower, name)!r}"
        for tower in (vision, text)
        for name, nothing in _ONLY_OPEN_CLIP.items()
        if getattr(tower, name, nothing) not in (nothing, None)
    ]
    if model_cfg.get("init_logit_bias") is not None:
        problems.append("there is a logit_bias")
    if not isinstance(vision.image_size, int):
        problems.append(f"image_size is {vision.image_size}, not one number")
    if text.pool_type not in ("argmax", "eos"):
        problems.append(f"pool_type of the text tower is '{text.pool_type}'")
    if problems:
        raise InputError(*(f"{label}: {problem}, which transformers' CLIP does not have" for problem in problems))
    shared = {"hidden_act": "quick_gelu" if quick_gelu(model_cfg) else "gelu"}

    def tower(part: CLIPVisionCfg | CLIPTextCfg, heads: int) -> dict[str, Any]:
        return {
            **shared,
            "hidden_size": part.width,
            "intermediate_size": int(part.width * part.mlp_ratio),
            "num_hidden_layers": part.layers,
            "num_attention_heads": heads,
            "layer_norm_eps": (part.norm_kwargs or {}).get("eps", 1e-5),
            "projection_dim": model_cfg["embed_dim"],
        }

    vision_config = {
        **tower(vision, vision.width // vision.head_width),
        "image_size": vision.image_size,
        "patch_size": vision.patch_size,
    }
    # CLIP's own last id is the highest; another vocabulary takes the value that stands for the highest id.
    end = text.vocab_size - 1 if text.vocab_size == BPE_ROWS else _ARGMAX
    text_config = {
        **tower(text, text.heads),
        "max_position_embeddings": text.context_length,
        "vocab_size": text.vocab_size,
        "bos_token_id": end - 1,
        "eos_token_id": text.eos_id if text.pool_type == "eos" else end,
        "pad_token_id": 0,
    }
    return {"vision_config": vision_config, "text_config": text_config, "projection_dim": model_cfg["embed_dim"]}

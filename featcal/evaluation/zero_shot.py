"""Zero-shot accuracy: image features against class prompts through the base's own text tower."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from featcal.errors import InputError
from featcal.evaluation.heads import CosineHead
from featcal.formats.located import Located
from featcal.formats.pretrained import load_pretrained

PromptEncoder = Callable[[list[str]], Float[Tensor, "n k"]]
"""Texts → features in the space of image features, not normalised."""


@torch.no_grad()
def zero_shot_heads(base: Located, tasks: Mapping[str, tuple[Sequence[str], Sequence[str]]]) -> dict[str, CosineHead]:
    """Heads of several tasks from (class names, templates): fill all templates, encode, normalise, average over
    templates, normalise.

    Raises:
        InputError: the base has no text tower (it is a vision-only checkpoint), or no tokenizer.
    """
    encode, scale = _open_clip_encoder(base) if base.config.get("model_type") == "open_clip" else _hf_encoder(base)
    heads = {}
    for task, (class_names, templates) in tasks.items():
        texts = [template.replace("{}", name) for name in class_names for template in templates]
        unit = torch.nn.functional.normalize(encode(texts), dim=-1)
        mean = unit.reshape(len(class_names), len(templates), -1).mean(1)
        heads[task] = CosineHead(torch.nn.functional.normalize(mean, dim=-1), scale, tuple(class_names))
    return heads


def _hf_encoder(base: Located) -> tuple[PromptEncoder, float]:
    """Prompt encoder and logit scale of a transformers CLIP."""
    from transformers import AutoTokenizer, CLIPModel

    folder = base.folder
    if base.config.get("model_type") != "clip":
        raise InputError(
            f"base: {folder} has no text tower, so there is no zero-shot head; "
            "evaluation needs a full CLIP checkpoint as base"
        )
    model, _ = load_pretrained(CLIPModel, folder)
    if not any((folder / name).is_file() for name in ("tokenizer.json", "vocab.json")):
        raise InputError(f"base: {folder} has no tokenizer files, which class prompts need")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise InputError(f"base: {folder} has no usable tokenizer, which class prompts need ({error})") from error

    def encode(texts: list[str]) -> Tensor:
        tokens = tokenizer(texts, padding=True, truncation=True, return_tensors="pt")
        pooled = model.text_model(tokens["input_ids"], attention_mask=tokens["attention_mask"]).pooler_output
        features: Tensor = model.text_projection(pooled)
        return features

    return encode, float(model.logit_scale.exp())


def _open_clip_encoder(base: Located) -> tuple[PromptEncoder, float]:
    """Prompt encoder and logit scale of an open_clip model, with open_clip's own tokenizer."""
    from featcal.formats.open_clip import library_model, tokenizer

    model, tokenize = library_model(base), tokenizer(base)

    def encode(texts: list[str]) -> Tensor:
        features: Tensor = model.encode_text(tokenize(texts))
        return features

    return encode, float(model.logit_scale.exp())

"""Zero-shot accuracy: image features against class prompts through the base's own text tower."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from featcal.errors import InputError
from featcal.models.checkpoint import read_config
from featcal.models.pretrained import load_pretrained


@dataclass(frozen=True)
class ZeroShotHead:
    """One unit row per class, and the factor of the cosine that gives logits."""

    class_names: tuple[str, ...]
    prompts: Float[Tensor, "classes k"]
    scale: float

    def logits(self, features: Float[Tensor, "n k"]) -> Float[Tensor, "n classes"]:
        """scale * cosine of every image feature to every class."""
        return self.scale * torch.nn.functional.normalize(features, dim=-1) @ self.prompts.mT


@torch.no_grad()
def zero_shot_heads(
    base_folder: Path, tasks: Mapping[str, tuple[Sequence[str], Sequence[str]]]
) -> dict[str, ZeroShotHead]:
    """Heads of several tasks from (class names, templates): fill all templates, encode, normalise, average over
    templates, normalise.

    Raises:
        InputError: the base has no text tower (it is a vision-only checkpoint).
    """
    from transformers import AutoTokenizer, CLIPModel

    if read_config(base_folder, "base").get("model_type") != "clip":
        raise InputError(
            f"base: {base_folder} has no text tower, so there is no zero-shot head; "
            "evaluation needs a full CLIP checkpoint as base"
        )
    model, _ = load_pretrained(CLIPModel, base_folder)
    if not any((base_folder / name).is_file() for name in ("tokenizer.json", "vocab.json")):
        raise InputError(f"base: {base_folder} has no tokenizer files, which class prompts need")
    try:
        tokenizer = AutoTokenizer.from_pretrained(base_folder)
    except (OSError, ValueError) as error:
        raise InputError(f"base: {base_folder} has no usable tokenizer, which class prompts need ({error})") from error
    scale = float(model.logit_scale.exp())
    heads = {}
    for task, (class_names, templates) in tasks.items():
        texts = [template.replace("{}", name) for name in class_names for template in templates]
        tokens = tokenizer(texts, padding=True, truncation=True, return_tensors="pt")
        pooled = model.text_model(tokens["input_ids"], attention_mask=tokens["attention_mask"]).pooler_output
        unit = torch.nn.functional.normalize(model.text_projection(pooled), dim=-1)
        mean = unit.reshape(len(class_names), len(templates), -1).mean(1)
        heads[task] = ZeroShotHead(tuple(class_names), torch.nn.functional.normalize(mean, dim=-1), scale)
    return heads

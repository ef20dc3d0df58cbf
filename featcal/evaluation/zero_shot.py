"""Zero-shot accuracy: image features against class prompts through the base's own text tower, or the model's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from featcal.evaluation.heads import CosineHead
from featcal.formats.located import Located
from featcal.formats.weights import Weights
from featcal.models.adapter import Adapter
from featcal.samples.prompts import class_prompts


@torch.no_grad()
def zero_shot_heads(
    adapter: Adapter,
    base: Located,
    tasks: Mapping[str, tuple[Sequence[str], Sequence[str]]],
    model: Weights | None = None,
) -> dict[str, CosineHead]:
    """Heads of several tasks from (class names, templates): fill all templates, encode, normalise, average over
    templates, normalise.

    Args:
        model: whose text tower makes them, where text towers are merged too; else the base's does.

    Raises:
        InputError: as `Adapter.prompt_encoder`.
    """
    encode, scale = adapter.prompt_encoder(base) if model is None else adapter.prompt_encoder_of(base, model)
    heads = {}
    for task, (class_names, templates) in tasks.items():
        texts = class_prompts(class_names, templates)
        unit = torch.nn.functional.normalize(encode(texts), dim=-1)
        mean = unit.reshape(len(class_names), len(templates), -1).mean(1)
        heads[task] = CosineHead(torch.nn.functional.normalize(mean, dim=-1), scale, tuple(class_names))
    return heads

"""Encoders with a classification head: one adapter for all, told by a row of facts (`encoder_facts`).

The head is a task's own: it is taken from the task's expert, never merged and never calibrated, and stays in a written
folder as the folder's origin has it.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.func import functional_call

from featcal.formats.checkpoint import read_config
from featcal.formats.pretrained import load_complete
from featcal.models.adapter import Adapter, Batch, Block, Call, Stage, Sublayer, TokenOptions, check_buffers
from featcal.models.attention import choose_attention
from featcal.models.decoder import fill_buffers
from featcal.models.encoder_facts import SETTINGS, EncoderFacts, Pooling
from featcal.models.language import as_weights, masked, random_tokens, unreadable
from featcal.models.residual import part_of, sharing_of, sublayers_of
from featcal.models.standing_in import capture_calls

_OLD_NAMES = {"gamma": "weight", "beta": "bias"}
"""What the first checkpoints call scale and shift of a LayerNorm."""


class EncoderStage(Stage):
    """Token ids or pixels → embeddings → encoder blocks."""

    name = "encoder"

    def __init__(self, model: Any, facts: EncoderFacts) -> None:
        self._facts = facts
        self.spent = ("pixel_values",) if facts.modality == "pixels" else ()
        self._stack = model.get_submodule(facts.stack)
        blocks = f"{facts.stack}.{facts.blocks}"
        self.blocks = tuple(Block(f"{blocks}.{i}", block) for i, block in enumerate(model.get_submodule(blocks)))
        self.outer = tuple(
            f"{facts.stack}.{name}" for name, _ in self._stack.named_parameters() if _inside(name, facts.embeddings)
        )

    def first_call(self, outer: Mapping[str, Tensor], inputs: Batch, upstream: Call | None) -> Call:
        own = {name[len(self._facts.stack) + 1 :]: outer[name] for name in self.outer}
        return capture_calls(self._stack, self.blocks, own, **_read(inputs))

    def weighting(self, index: int, module: str) -> str:
        """Where the head reads the first token alone, nothing else of the last block reaches it but keys and values."""
        last = index == len(self.blocks) - 1
        return "class-token" if last and self._first and module not in self._facts.keys else "tokens"

    @property
    def _first(self) -> bool:
        return self._facts.pooling == "first"

    def token_weights(self, weighting: str, call: Call, inputs: Batch, options: TokenOptions) -> Tensor | None:
        """Padding has weight 0, every other token 1, or `patch_weight` beside a class token that counts alone."""
        attended = as_weights(inputs.get("attention_mask"))
        if weighting == "tokens":
            return attended
        shape, device = call.hidden.shape[:2], call.hidden.device
        weights = torch.full(shape, options.patch_weight, device=device, dtype=torch.float64)
        weights[:, 0] = 1.0
        return weights if attended is None else weights * attended

    def state(self, call: Call, inputs: Batch) -> Tensor:
        return masked(call.hidden, inputs.get("attention_mask"))

    def part(self, module: str) -> str:
        return part_of(self._facts.parts, module)

    def sharing(self, index: int) -> Sequence[Sequence[str]]:
        return sharing_of(self._facts.shared, self.blocks[index])

    def sublayers(self, block: Block, tensors: Mapping[str, Tensor]) -> Mapping[str, Sublayer]:
        """As the facts have them."""
        return sublayers_of(self._facts.parts, block, tensors)


class Encoder(Adapter):
    """An encoder; a subclass for every row of facts (`encoder_of`)."""

    scores_with = "own"
    head = ()
    facts: EncoderFacts
    config_class: Any
    model_class: Any

    def __init__(self, config: Mapping[str, Any], names: Collection[str], device: torch.device) -> None:
        facts = self.facts
        checked = self.config_class(**config)
        with torch.device("meta"):
            self.model = self.model_class(copy.deepcopy(checked))
        with device:
            fill_buffers(self.model)
        choose_attention(self.model)
        check_buffers(self.model)
        self.settings = {name: getattr(checked, name, None) for name in (*SETTINGS, *facts.settings)}
        self._first_position = getattr(checked, facts.first_position) + 1 if facts.first_position else 0
        stage = EncoderStage(self.model, facts)
        self.stages = (stage,)
        norm = f"{facts.stack}.{facts.norm}"
        self._shapes = {name: tuple(parameter.shape) for name, parameter in self.model.named_parameters()}
        self.closing = tuple(name for name in self._shapes if facts.norm and _inside(name, norm))
        inside = (name for block in stage.blocks for name in block.names)
        self.tower = (*stage.outer, *inside, *self.closing)
        self.aliases = dict(facts.repeated)
        self.vocabulary = (f"{facts.stack}.{facts.table}.weight",) if facts.table else ()
        self.classifier = facts.classifier
        self.class_token = facts.pooling == "first"

    def final(self, tensors: Mapping[str, Tensor], call: Call, inputs: Batch) -> Tensor:
        """What the head reads: the last state, normed where the stack ends with a norm, and pooled."""
        hidden = call.hidden
        if self.facts.norm:
            norm = f"{self.facts.stack}.{self.facts.norm}"
            own = {name[len(norm) + 1 :]: tensors[name] for name in self.closing}
            hidden = functional_call(self.model.get_submodule(norm), own, (hidden,), strict=True)
        return pooled(hidden, self.facts.pooling, inputs.get("attention_mask"))

    def probe(self) -> Batch:
        ids = random_tokens(self._rows(self.facts.table))
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def reference(self, folder: Path, inputs: Batch) -> Tensor:
        loaded = load_complete(getattr(transformers, self.loader(read_config(folder, "written model"))), folder)
        with torch.no_grad():
            last = loaded.base_model(**inputs).last_hidden_state
        return pooled(last, self.facts.pooling, inputs.get("attention_mask"))

    def loader(self, config: Mapping[str, Any]) -> str:
        """The class that the folder names, whatever its head is; without one the stack alone."""
        named = next(iter(config.get("architectures") or ()), "")
        return named if hasattr(transformers, named) else "AutoModel"

    def tokens(self, inputs: Batch) -> int:
        return inputs["input_ids"].numel()

    def misfit(self, inputs: Batch) -> str | None:
        problem = unreadable(inputs, self._rows(self.facts.table))
        if problem is not None:
            return problem
        longest, positions = inputs["input_ids"].shape[1], self._rows(self.facts.positions) - self._first_position
        if longest > positions:
            return f"texts of {longest} tokens, the model has {positions} positions; set 'max_length'"
        types = inputs.get("token_type_ids")
        if types is not None and int(types.max()) >= self._rows(self.facts.types):
            return f"token types reach to {int(types.max())}, the model has {self._rows(self.facts.types)}"
        return None

    def _rows(self, table: str) -> int:
        rows: int = self._shapes[f"{self.facts.stack}.{table}.weight"][0]
        return rows

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: self._shapes[name] for name in self.tower}

    def canonical(self, stored: str) -> str | None:
        if stored in self.aliases or stored.endswith(self.facts.dropped):
            return None
        front, _, last = stored.rpartition(".")
        named = f"{front}.{_OLD_NAMES[last]}" if front.endswith("LayerNorm") and last in _OLD_NAMES else stored
        inside = f"{self.facts.stack}.{named}"
        bare = inside in self._shapes or inside.startswith(self.facts.heads)
        return inside if bare and named not in self._shapes else named

    def carried(self, name: str) -> bool:
        return name.startswith(self.facts.heads)


def encoder_of(facts: EncoderFacts) -> type[Encoder]:
    """The adapter for one row.

    Raises:
        AttributeError: the installed transformers has no class of that name.
    """
    config, model = (getattr(transformers, one) if isinstance(one, str) else one for one in (facts.config, facts.model))
    own = {
        "family": facts.model_type,
        "facts": facts,
        "config_class": config,
        "model_class": model,
        "classes": (model.__name__,),
        "modality": facts.modality,
        "defaults": facts.defaults,
    }
    return type(f"Encoder of {facts.model_type}", (Encoder,), own)


def pooled(states: Tensor, how: Pooling, mask: Tensor | None) -> Tensor:
    """`[batch, k]` of states `[batch, tokens, width]`; k is the width, or twice that for "first and mean".

    Args:
        mask: `[batch, tokens]`, 0 on padding, which no mean counts.
    """
    if how == "first":
        return states[:, 0]
    if how == "first and mean":
        return torch.cat([states[:, 0], states[:, 1:].mean(1)], dim=1)
    return states.mean(1) if mask is None else masked(states, mask).sum(1) / mask.sum(1, keepdim=True)


def _inside(name: str, prefix: str) -> bool:
    return name.startswith(f"{prefix}.")


def _read(inputs: Batch) -> dict[str, Tensor]:
    """What the embeddings and the masks are made of."""
    names = ("input_ids", "attention_mask", "token_type_ids", "pixel_values")
    return {name: inputs[name] for name in names if name in inputs}

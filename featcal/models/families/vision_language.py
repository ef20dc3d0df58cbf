"""Adapt language models that read pictures: a stage for the vision tower, then one for the language model, configured
by a row of facts (`vision_language_facts`).

Every text comes with one picture. The tower takes the patches of all pictures of a batch in one sequence, without
padding, so its states are `[patches, width]`; drift gets them with one row per picture (`PictureRows`).
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from featcal.formats.weights import Weights
from featcal.models.adapter import Batch, Block, Call, Sublayer, TokenOptions, check_buffers
from featcal.models.attention import choose_attention
from featcal.models.compute import find_device, widen
from featcal.models.families.decoder import Decoder, DecoderStage, fill_buffers, forward_settings
from featcal.models.families.facts import class_of
from featcal.models.families.forward_options import forward_options
from featcal.models.families.language import library_logits, random_tokens, require_no_cache
from featcal.models.families.renamed_block import NamedBlock
from featcal.models.families.sublayers import PartedStage
from featcal.models.families.vision_language_facts import VisionLanguageFacts
from featcal.models.generation import Generator
from featcal.models.standing_in import capture_calls, standing_in

_PICTURES = "pictures"
"""Key under which a call of the tower holds the number of patches of each picture (`Call.apart`)."""


class WindowedBlock(NamedBlock):
    """A block of the tower, which splits the sequence into windows or pictures by lengths that are part of the data."""

    def run(self, local: Mapping[str, Tensor], call: Call) -> Any:
        """Return the block's output; on meta, where there are no lengths, return a state of the same form."""
        return call.hidden_state if call.hidden_state.is_meta else super().run(local, call)


@dataclass(frozen=True)
class PictureRows:
    """Numbers of rows of each picture in a batch, whose rows follow one another."""

    counts: Tensor
    """Number of rows of every picture, `[batch]`."""
    longest: int
    """Largest number of rows of any picture, in this batch or another."""

    @classmethod
    def from_batch(cls, inputs: Batch) -> PictureRows:
        """Count the patches of each picture in a batch."""
        return cls(inputs["image_grid_thw"].prod(1), inputs["pixel_values"].shape[1])

    @classmethod
    def from_state(cls, call: Call, merged: int) -> PictureRows:
        """Count each picture's rows in a tower's state, before or after the merger, which
        merges `merged` patches into one.
        """
        ((counts, longest), _) = call.apart[_PICTURES]
        shared = 1 if len(call.hidden_state) == int(counts.sum()) else merged
        return cls(counts // shared, longest // shared)

    def unpack(self, rows: Tensor) -> Tensor:
        """Return rows `[n, width]` as `[batch, longest, width]`, with zeros after the last row of a shorter picture."""
        kept = self._row_mask
        places = torch.full(kept.shape, len(rows), device=rows.device)
        places[kept] = torch.arange(len(rows), device=rows.device)
        # The row of zeros after the last one fills places without a row.
        return torch.nn.functional.pad(rows, (0, 0, 0, 1))[places]

    def pack(self, padded: Tensor) -> Tensor:
        """Return padded rows `[batch, longest, width]` as `[n, width]`: the inverse of `unpack`."""
        return padded[self._row_mask.nonzero(as_tuple=True)]

    @property
    def _row_mask(self) -> Tensor:
        """Return `[batch, longest]`, true where there is a row."""
        return torch.arange(self.longest, device=self.counts.device) < self.counts[:, None]


class _ByRow(TorchFunctionMode):
    """Mode in which this thread puts the rows of pictures into the text by `_place_rows`."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        # torch takes derivatives of `masked_scatter` one by one instead of side by side, with a warning.
        called = _place_rows if func is Tensor.masked_scatter else func
        return called(*args, **(kwargs or {}))


def _place_rows(states: Tensor, mask: Tensor, rows: Tensor) -> Tensor:
    """Return states `[batch, tokens, width]` with `rows` `[n, width]` written, in order, at
    the tokens that `mask` marks.
    """
    tokens = mask[..., 0]
    # Tokens in front of the first picture would look up row -1; the mask drops what they find.
    places = (tokens.flatten().cumsum(0) - 1).clamp(min=0).view(tokens.shape)
    return torch.where(mask, rows[places], states)


class PatchStage(PartedStage):
    """The stage from patches through embeddings and the tower's blocks to the merger, its last block."""

    name = "vision"
    spent = ("pixel_values",)

    def __init__(self, model: Any, facts: VisionLanguageFacts, merged: int) -> None:
        self._merged, self.parts, self.shared = merged, facts.vision_parts, facts.vision_shared
        path = f"{facts.whole}.{facts.vision}"
        self._tower = model.get_submodule(path)
        stored, blocks = stored_tower_name(facts, path), self._tower.get_submodule(facts.vision_blocks)
        inside = ((f"{facts.vision_blocks}.{i}", block) for i, block in enumerate(blocks))
        merger = self._tower.get_submodule(facts.merger)
        self.blocks = (
            *(WindowedBlock(f"{stored}.{name}", block, f"{path}.{name}", {}) for name, block in inside),
            NamedBlock(f"{stored}.{facts.merger}", merger, f"{path}.{facts.merger}", {}),
        )
        behind = tuple(f"{one}." for one in (facts.vision_blocks, facts.merger))
        names = (name for name, _ in self._tower.named_parameters() if not name.startswith(behind))
        self._outer = {f"{stored}.{name}": name for name in names}
        self.outer = tuple(self._outer)
        kind = type(blocks[0].get_submodule(facts.vision_parts[0].norm))
        self.norm = None if issubclass(kind, nn.LayerNorm) else kind

    def first_call(self, outer: Mapping[str, Tensor], inputs: Batch, upstream: Call | None) -> Call:
        own = {name: outer[stored] for stored, name in self._outer.items()}
        pictures = PictureRows.from_batch(inputs)
        patches = pictures.pack(inputs["pixel_values"]).to(next(iter(own.values())).dtype)
        call = capture_calls(self._tower, self.blocks, own, hidden_states=patches, grid_thw=inputs["image_grid_thw"])
        return replace(call, apart={**call.apart, _PICTURES: ((pictures.counts, pictures.longest), {})})

    def weighting(self, index: int, module: str) -> str:
        """Return "merged patches" after the merger's norm, where one row holds several patches."""
        norm = module in self.blocks[index].modules_of(self.norm or nn.LayerNorm)
        return "merged patches" if index == len(self.blocks) - 1 and not norm else "patches"

    def token_weights(self, weighting: str, call: Call, inputs: Batch, options: TokenOptions) -> Tensor | None:
        """Return 1 for every row; there is no padding."""
        rows = len(call.hidden_state) // (self._merged if weighting == "merged patches" else 1)
        return torch.ones(1, rows, dtype=torch.float64, device=find_device(call.hidden_state.device, torch.float64))

    def arrange_tokens(self, given: Tensor) -> Tensor:
        return given[None] if given.ndim == 2 else given

    def state(self, call: Call, inputs: Batch) -> Tensor:
        """Return the patches of every picture, in the tower's order."""
        return PictureRows.from_state(call, self._merged).unpack(call.hidden_state)

    def with_state(self, call: Call, state: Tensor) -> Call:
        return call.with_state(PictureRows.from_state(call, self._merged).pack(state))

    def sublayers(self, block: Block, tensors: Mapping[str, Tensor]) -> Mapping[str, Sublayer]:
        """Return the residual parts in the row of facts; the merger is one part."""
        if block is self.blocks[-1]:
            return {"mlp": lambda call: call.with_state(block.run(tensors, call))}
        return super().sublayers(block, tensors)


class LanguageStage(DecoderStage):
    """The stage from token ids and the tower's output for their pictures to the decoder blocks.

    The library computes the places of pictures among the tokens, masks and positions: its whole forward runs, with the
        tower's output in place of the tower.
    """

    def __init__(self, model: Any, facts: VisionLanguageFacts, vision: PatchStage, image_token: int) -> None:
        super().__init__(model, facts)
        self._vision, self._image_token = vision, image_token
        self._whole = model.get_submodule(facts.whole)
        self._patches = Block("", self._whole.get_submodule(f"{facts.vision}.{facts.patches}"))
        path = f"{facts.stack}.{facts.blocks}"
        stored = stored_tower_name(facts, path)
        self.blocks = tuple(
            NamedBlock(f"{stored}.{i}", block.module, f"{path}.{i}", {}) for i, block in enumerate(self.blocks)
        )
        self._outer = {stored_tower_name(facts, name): name[len(facts.whole) + 1 :] for name in self.outer}
        self.outer = tuple(self._outer)

    def first_call(self, outer: Mapping[str, Tensor], inputs: Batch, upstream: Call | None) -> Call:
        assert upstream is not None
        own = {name: outer[stored] for stored, name in self._outer.items()}
        ids, mask, grid = inputs["input_ids"], inputs.get("attention_mask"), inputs["image_grid_thw"]
        *blocks, merger = self._vision.blocks
        # Rows without values: the tower that would read the pixels only stands in.
        unread = upstream.hidden_state.new_zeros(int(grid.prod(1).sum()), 1)
        with _ByRow(), standing_in([self._patches, *blocks]), standing_in([merger], upstream.hidden_state):
            call = capture_calls(
                self._whole,
                self.blocks,
                own,
                input_ids=ids,
                attention_mask=mask,
                pixel_values=unread,
                image_grid_thw=grid,
                mm_token_type_ids=(ids == self._image_token).int(),
                use_cache=False,
            )
        return require_no_cache(call)

    def token_weights(self, weighting: str, call: Call, inputs: Batch, options: TokenOptions) -> Tensor | None:
        """Return the weights of any decoder, with those of a picture's tokens multiplied by `image_weight`."""
        weights = super().token_weights(weighting, call, inputs, options)
        ids = inputs["input_ids"]
        seen = widen(torch.where(ids == self._image_token, options.image_weight, 1.0))
        return seen if weights is None else weights * seen


class VisionLanguage(Decoder):
    """A model of pictures and text; every row of facts has a subclass (`vision_language_of`)."""

    facts: VisionLanguageFacts
    image_processor = "Qwen2VLImageProcessor"
    image_token: int

    def __init__(self, config: Mapping[str, Any], names: Collection[str], device: torch.device) -> None:
        facts = self.facts
        self._all = self.config_class(**config)
        self._config, vision = self._all.get_text_config(), self._all.vision_config
        self._device, self._tied = device, bool(self._all.tie_word_embeddings)
        self._embedded = f"{facts.stack}.{facts.embedding}.weight"
        self._head, self._embedding = f"{facts.head}.weight", stored_tower_name(facts, self._embedded)
        self.model = self.fresh()
        choose_attention(self.model)
        check_buffers(self.model)
        self.settings = forward_settings(self._config, facts.settings)
        seen = forward_options(vision, facts.vision_settings)
        self.settings |= {f"vision {name}": value for name, value in seen.items()}
        self.image_token, self._merged = self._all.image_token_id, vision.spatial_merge_size**2
        self._video_token = self._all.video_token_id
        self._channels = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        seeing = PatchStage(self.model, facts, self._merged)
        self.stages = (seeing, LanguageStage(self.model, facts, seeing, self.image_token))
        self.tower = tuple(self.shapes())
        self.aliases = {self._head: self._embedding} if self._tied else {}
        self.vocabulary = (self._embedding,) if self._tied else (self._embedding, self._head)
        self.scoring = (self._embedding if self._tied else self._head,)
        self._norm = f"{facts.stack}.{facts.norm}"
        self.closing = tuple(name for name in self.tower if name.startswith(f"{stored_tower_name(facts, self._norm)}."))

    def fresh(self) -> Any:
        with torch.device("meta"):
            model = self.model_class(copy.deepcopy(self._all))
        if self._tied:
            model.get_submodule(self.facts.head).weight = model.get_parameter(self._embedded)
        with self._device:
            fill_buffers(model)
        return model

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        found = self.model.named_parameters()
        return {stored_tower_name(self.facts, name): tuple(parameter.shape) for name, parameter in found}

    def canonical(self, stored: str) -> str | None:
        """Return the canonical name for a name in files."""
        if stored in self.aliases or stored.endswith(self.facts.dropped):
            return None
        # For a while the library wrote files with the names of its classes.
        return stored_tower_name(self.facts, stored)

    def tokens(self, inputs: Batch) -> int:
        return super().tokens(inputs) + int(inputs["image_grid_thw"].prod(1).sum())

    def probe(self) -> Batch:
        """Return two texts with a picture each, of two by four and four by two merged patches."""
        side = int(self._merged**0.5)
        grid = torch.tensor([[1, 2 * side, 4 * side], [1, 4 * side, 2 * side]])
        ids = self._readable(random_tokens(self.shapes()[self._embedding][0], tokens=13))
        ids[:, 1:9] = self.image_token
        patches = torch.randn(2, 8 * self._merged, self._channels, generator=torch.Generator().manual_seed(0))
        return {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "pixel_values": patches,
            "image_grid_thw": grid,
        }

    def _readable(self, ids: Tensor) -> Tensor:
        """Return all token ids except those reserved for pictures and films."""
        taken = {self.image_token, self._video_token}
        free = next(token for token in range(len(taken) + 1) if token not in taken)
        return ids.masked_fill(torch.isin(ids, torch.tensor([*taken])), free)

    def reference(self, folder: Path, inputs: Batch) -> Tensor:
        ids = inputs["input_ids"]
        given = {"input_ids": ids, "attention_mask": inputs["attention_mask"], **self.picture_inputs(inputs, ids)}
        return library_logits(self.model_class, folder, **given)[:, -1]

    def generating(self, tensors: Mapping[str, Tensor], folder: Path) -> Generator:
        unsaid = (self.image_token, self._video_token)
        return replace(super().generating(tensors, folder), seen=self.picture_inputs, unsaid=unsaid)

    def picture_inputs(self, inputs: Batch, ids: Tensor) -> dict[str, Tensor]:
        """Return the library model's inputs for the pictures of some texts, whose tokens are `ids`."""
        return {
            "pixel_values": PictureRows.from_batch(inputs).pack(inputs["pixel_values"]),
            "image_grid_thw": inputs["image_grid_thw"],
            "mm_token_type_ids": (ids == self.image_token).int(),
        }

    def misfit(self, inputs: Batch) -> str | None:
        return super().misfit(inputs) or self._misfit_of_pictures(inputs)

    def _misfit_of_pictures(self, inputs: Batch) -> str | None:
        ids, patches, grid = inputs["input_ids"], inputs.get("pixel_values"), inputs.get("image_grid_thw")
        if patches is None or grid is None:
            return "no pictures; a model of pictures and text takes one with every text ('image' beside 'input')"
        if patches.shape[-1] != self._channels:
            return f"patches have {patches.shape[-1]} values, the model takes {self._channels}"
        if bool((ids == self._video_token).any()):
            return "a text has tokens of a film; featcal takes pictures alone"
        if bool((ids[:, 0] == self.image_token).any()):
            return "a text begins with its picture; put a token in front of it, such as '<|vision_start|>'"
        wrong = ((ids == self.image_token).sum(1) != grid.prod(1) // self._merged).nonzero()
        if len(wrong):
            return f"sample {int(wrong[0])}: its text has not as many tokens for the picture as the picture has"
        return None

    def portable(self, config: Mapping[str, Any], model: Weights) -> tuple[dict[str, Any], list[str]]:
        """Return a configuration that transformers 4 can read too, with the language
        model's part handled as for any decoder.
        """
        inner = config.get("text_config")
        if not isinstance(inner, Mapping):
            return super().portable(config, model)
        settings, notes = super().portable(inner, model)
        # Version 4 looks here for the sections of positions along time, height and width, whatever the kind.
        if settings.get("rope_scaling") is None and "mrope_section" in (inner.get("rope_parameters") or {}):
            settings["rope_scaling"] = {
                name: one for name, one in inner["rope_parameters"].items() if name != "rope_theta"
            }
        return {**config, "text_config": settings}, notes


def vision_language_of(facts: VisionLanguageFacts) -> type[VisionLanguage]:
    """Return the adapter of one row of facts.

    Raises:
        AttributeError: the installed transformers has no class of that name.
    """
    return class_of(facts, VisionLanguage, "Model of pictures and text")


def stored_tower_name(facts: VisionLanguageFacts, name: str) -> str:
    """Return the name in files of a module or a tensor of the library's class."""
    for place, stored in facts.stored.items():
        if name == place or name.startswith(f"{place}."):
            return f"{stored}{name[len(place) :]}"
    return name

"""Adapt encoders with a classification head: one adapter for all, configured by a row of facts (`encoder_facts`). Every
task has its own head, taken from the task's expert. A head is never merged and never calibrated; a written folder keeps
the head of the folder from which it was made.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.func import functional_call

from featcal.formats.checkpoint import read_config
from featcal.formats.load_pretrained import load_complete, load_pretrained
from featcal.formats.located_model import Located
from featcal.formats.sentences import POOLING, TEXT, WEIGHED, SentenceText
from featcal.formats.tokenizers import open_prompt_tokenizer
from featcal.formats.weights import Weights
from featcal.models.adapter import (
    Adapter,
    Batch,
    Call,
    PromptEncoder,
    TokenOptions,
    check_buffers,
    read_alone,
)
from featcal.models.attention import choose_attention
from featcal.models.families.decoder import fill_buffers
from featcal.models.families.encoder_facts import SETTINGS, EncoderFacts, Pooling
from featcal.models.families.facts import class_of, named_class
from featcal.models.families.forward_options import forward_options
from featcal.models.families.language import (
    mask_to_weights,
    random_tokens,
    require_no_cache,
    unpadded_ids,
    unreadable,
    zero_masked,
)
from featcal.models.families.renamed_block import NamedBlock
from featcal.models.families.sublayers import PartedStage
from featcal.models.standing_in import capture_calls
from featcal.system.errors import InputError

_OLD_NAMES = {"gamma": "weight", "beta": "bias"}
"""Names of a LayerNorm's scale and shift in the earliest checkpoints."""


class EncoderStage(PartedStage):
    """The stage from token ids or pixels through embeddings to the encoder blocks."""

    name = "encoder"

    def __init__(self, model: Any, facts: EncoderFacts) -> None:
        self._facts, self.parts, self.shared = facts, facts.parts, facts.shared
        self.spent = ("pixel_values",) if facts.modality == "pixels" else ()
        self.leads = facts.modality == "pixels" and not facts.pooler
        self._stack = model.get_submodule(facts.stack)
        blocks = _join_names(facts.stack, facts.blocks)
        listed = enumerate(model.get_submodule(blocks))
        stored = _join_names(_prefix(facts), facts.stored_blocks or facts.blocks)
        self.blocks = tuple(NamedBlock(f"{stored}.{i}", one, f"{blocks}.{i}", facts.stored) for i, one in listed)
        behind = tuple(f"{one}." for one in (facts.blocks, facts.norm, facts.pooler) if one)
        found = (name for name, _ in self._stack.named_parameters() if not name.startswith(behind))
        self._outer = {
            stored: name for name in found if not (stored := _join_names(_prefix(facts), name)).startswith(facts.heads)
        }
        self.outer = tuple(self._outer)

    def first_call(self, outer: Mapping[str, Tensor], inputs: Batch, upstream: Call | None) -> Call:
        own = {name: outer[stored] for stored, name in self._outer.items()}
        names = ("input_ids", "attention_mask", *(["token_type_ids"] if self._facts.types else []))
        read = {name: inputs[name] for name in names if name in inputs}
        if self._facts.modality == "text" and not self._facts.positions:
            # Rows of the table may be narrower than the norm that reads them first, which takes one dtype alone.
            rows = nn.functional.embedding(read.pop("input_ids"), own[f"{self._facts.table}.weight"])
            read["inputs_embeds"] = rows.to(max((one.dtype for one in own.values()), key=lambda dtype: dtype.itemsize))
        if self._facts.modality == "pixels":
            read = {self._facts.reads: inputs["pixel_values"].to(next(iter(own.values())).dtype)}
        return require_no_cache(capture_calls(self._stack, self.blocks, own, **read))

    def weighting(self, index: int, module: str) -> str:
        """Return "class-token" in the last block, keys and values excepted, if the head reads that token alone."""
        last = index == len(self.blocks) - 1
        alone = reads_first(self._facts) and module not in self._facts.keys
        return "class-token" if last and alone else "tokens"

    def token_weights(self, weighting: str, call: Call, inputs: Batch, options: TokenOptions) -> Tensor | None:
        """Return weight 0 for padding and 1 for other tokens; if the head reads a class
        token alone, the others have `patch_weight`.
        """
        attended = mask_to_weights(inputs.get("attention_mask"))
        return attended if weighting == "tokens" else read_alone(call, 0, options.patch_weight, attended)

    def state(self, call: Call, inputs: Batch) -> Tensor:
        return zero_masked(call.hidden_state, inputs.get("attention_mask"))

    def token_ids(self, inputs: Batch) -> Mapping[str, Tensor]:
        return {} if self._facts.modality == "pixels" else {"text": unpadded_ids(inputs)}


class Encoder(Adapter):
    """An encoder; every row of facts has a subclass (`encoder_of`)."""

    head = ()
    facts: EncoderFacts
    config_class: Any
    model_class: Any

    def __init__(self, config: Mapping[str, Any], names: Collection[str], device: torch.device) -> None:
        facts = self.facts = _pooling(self.facts, config.get(POOLING))
        own = {name: value for name, value in config.items() if name not in (POOLING, TEXT, WEIGHED)}
        self.model, checked = self.build(own, device)
        if facts.pooling_option:
            facts = self.facts = _choose_pooling(facts, str(getattr(checked, facts.pooling_option)))
        self.settings = {**forward_options(checked, (*SETTINGS, *facts.settings)), "pooling": facts.pooling}
        self._first_position = getattr(checked, facts.first_position) + 1 if facts.first_position else 0
        self._most_positions = getattr(checked, "max_position_embeddings", 0)
        if facts.pooler and not hasattr(self.model.get_submodule(facts.stack), facts.pooler):
            raise InputError(
                f"'{facts.pooler}', which pools the states, is missing (vision_use_head: false); give a model with it"
            )
        try:
            stage = EncoderStage(self.model, facts)
        except AttributeError as error:
            raise InputError(
                f"the installed transformers builds '{facts.model_type}' from other modules ({error}); upgrade it"
            ) from error
        self.stages = (stage,)
        self._stored_paths: dict[str, str] = {}
        for block in stage.blocks:
            assert isinstance(block, NamedBlock)
            self._stored_paths |= block.renamed_paths()
        self._shapes = self._stored_shapes(stage)
        behind = [_join_names(_prefix(facts), name) for name in (facts.norm, facts.pooler) if name]
        self.closing = tuple(name for name in self._shapes if any(_is_inside(name, one) for one in behind))
        inside = (name for block in stage.blocks for name in block.names)
        self.tower = (*stage.outer, *inside, *self.closing)
        self.aliases = dict(facts.repeated)
        self.vocabulary = (f"{facts.stack}.{facts.table}.weight",) if facts.table else ()
        self.classifier, self.class_token = facts.classifier, reads_first(facts)
        self.sentence_text = SentenceText(**config[TEXT]) if TEXT in config else None
        if facts.modality == "pixels":
            self._patch = _sides(checked.patch_size)
            self._input_shape = (checked.num_channels, *_sides(checked.image_size))

    @property
    def reads_packed(self) -> bool:
        return super().reads_packed and self.facts.reads_packed

    def build(self, config: Mapping[str, Any], device: torch.device) -> tuple[Any, Any]:
        """Return the library's whole model with parameters on meta, and its options."""
        checked = self.config_class(**config.get("vision_config", config) if self.facts.pooler else config)
        if getattr(checked, "use_cache", False):  # of a text encoder with `is_decoder`
            checked.use_cache = False
        with torch.device("meta"):
            # A copy: models write into their configuration, such as their kind of attention.
            model = self.model_class(copy.deepcopy(checked))
        with device:
            fill_buffers(model)
        choose_attention(model)
        check_buffers(model)
        return model, checked

    def _stored_shapes(self, stage: EncoderStage) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor of the whole class, by canonical name."""
        facts, found = self.facts, dict(self.model.named_parameters())
        inside = [name for name in found if any(_is_inside(name, block.path) for block in stage.blocks)]
        own: dict[str, Tensor] = {}
        for block in stage.blocks:
            own |= block.canonical({n[len(block.path) + 1 :]: found[n] for n in inside if _is_inside(n, block.path)})
        for name, parameter in found.items():
            if name not in inside:
                own[f"{facts.stored_stack}.{name}" if facts.stored_stack else name] = parameter
        return {name: tuple(tensor.shape) for name, tensor in own.items()}

    def final(self, tensors: Mapping[str, Tensor], call: Call, inputs: Batch) -> Tensor:
        """Return the features that the head reads: the last state, normed if the stack ends with a norm, and pooled."""
        facts, hidden = self.facts, call.hidden_state
        if facts.norm:
            hidden = self._run_closing(facts.norm, tensors, hidden)
        if facts.pooler:
            return self._run_closing(facts.pooler, tensors, hidden)
        return pool_states(hidden, facts.pooling, inputs.get("attention_mask"))

    def _run_closing(self, name: str, tensors: Mapping[str, Tensor], hidden: Tensor) -> Tensor:
        """Return the output of a module that follows the blocks, for given states."""
        stored, module = (
            _join_names(_prefix(self.facts), name),
            self.model.get_submodule(_join_names(self.facts.stack, name)),
        )
        own = {one[len(stored) + 1 :]: tensors[one] for one in self.closing if _is_inside(one, stored)}
        made: Tensor = functional_call(module, own, (hidden,), strict=True)
        return made

    def probe(self) -> Batch:
        if self.modality == "pixels":
            return {"pixel_values": torch.randn(2, *self._input_shape, generator=torch.Generator().manual_seed(0))}
        ids = random_tokens(self._rows(self.facts.table))
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def reference(self, folder: Path, inputs: Batch) -> Tensor:
        config = read_config(folder, "written model")
        # A class of one's own is not in transformers, and its `base_model` need not be the stack.
        is_own = self.model_class.__name__ in (config.get("architectures") or ())
        # Of a bare stack whose files have no pooler transformers makes one, which the states do not go through.
        unused = () if self.facts.pooler else ("pooler.",)
        kind = self.model_class if is_own else getattr(transformers, self.loader(config))
        loaded = load_complete(kind, folder, unused)
        with torch.no_grad():
            if self.facts.pooler:
                made: Tensor = getattr(loaded, self.facts.stored_stack, loaded)(**inputs).pooler_output
                return made
            stack = loaded.get_submodule(self.facts.stack) if is_own else loaded.base_model
            last = stack(**inputs).last_hidden_state
        return pool_states(last, self.facts.pooling, inputs.get("attention_mask"))

    def prompt_encoder(self, base: Located) -> tuple[PromptEncoder, float]:
        """Return a function that encodes prompts with the text tower that belongs to a
        vision tower, and the factor of the cosines.
        """
        loader, folder = self.facts.prompts, base.folder
        if not loader or not any(name.startswith("text_model.") for name in base.names):
            return super().prompt_encoder(base)
        tokenizer = open_prompt_tokenizer(folder)
        model, _ = load_pretrained(getattr(transformers, loader), folder)
        longest = model.config.text_config.max_position_embeddings

        def encode(texts: list[str]) -> Tensor:
            # Padded to the full length, as the tower was trained. The bias of its sigmoid scores is left out: it is the
            # same for all classes.
            options = {"padding": "max_length", "truncation": True, "max_length": longest, "return_tensors": "pt"}
            features: Tensor = model.text_model(input_ids=tokenizer(texts, **options)["input_ids"]).pooler_output
            return features

        return encode, float(model.logit_scale.exp())

    def head_module(self) -> tuple[nn.Module, Mapping[str, str]] | None:
        if not self.facts.head or not self.classifier:
            return None
        module = nn.Sequential(*map(self.model.get_submodule, self.facts.head)).eval()
        places = (name.partition(".") for name, _ in module.named_parameters())
        return module, {f"{i}.{rest}": f"{self.facts.head[int(i)]}.{rest}" for i, _, rest in places}

    def portable(self, config: Mapping[str, Any], model: Weights) -> tuple[dict[str, Any], list[str]]:
        """Return a configuration that transformers 4 reads, too: ModernBERT's bases of rotary positions under its own
        names in addition to `rope_parameters`."""
        stated = config.get("rope_parameters") or {}
        if "sliding_attention" not in stated:
            return dict(config), []
        full, windowed = stated["full_attention"], stated["sliding_attention"]
        bases = {"global_rope_theta": full["rope_theta"], "local_rope_theta": windowed["rope_theta"]}
        kinds = sorted({one.get("rope_type", "default") for one in (full, windowed)} - {"default"})
        why = f"version 4 has no rope type '{kinds[0]}' in such an encoder" if kinds else ""
        return {**config, **bases}, [f"needs transformers 5: {why}"] if why else []

    def loader(self, config: Mapping[str, Any]) -> str:
        """Return the class that the folder names, whatever its head is; "AutoModel" for the stack alone."""
        return named_class(config)

    def tokens(self, inputs: Batch) -> int:
        if self.modality == "text":
            return inputs["input_ids"].numel()
        count, _, height, width = map(int, inputs["pixel_values"].shape)
        patches: int = (height // self._patch[0]) * (width // self._patch[1])
        return count * (patches if self.facts.pooler else patches + 1)

    def misfit(self, inputs: Batch) -> str | None:
        return self._misfit_of_pixels(inputs) if self.modality == "pixels" else self._misfit_of_text(inputs)

    def _misfit_of_pixels(self, inputs: Batch) -> str | None:
        pixels = inputs.get("pixel_values")
        if pixels is None:
            return "no pixel_values; a vision model takes pictures"
        shape, (channels, *_) = tuple(pixels.shape[1:]), self._input_shape
        filled = shape[0] == channels and not any(
            side % patch for side, patch in zip(shape[1:], self._patch, strict=True)
        )
        if shape == self._input_shape or (self.facts.any_size and filled):
            return None
        free = f"{channels} channels and sides of whole patches of {' x '.join(map(str, dict.fromkeys(self._patch)))}"
        takes = free if self.facts.any_size else list(self._input_shape)
        return (
            f"inputs have shape {list(shape)}, the model takes {takes}; check the base's image processor or the tensors"
        )

    def _misfit_of_text(self, inputs: Batch) -> str | None:
        problem = unreadable(inputs, self._rows(self.facts.table))
        if problem is not None:
            return problem
        table, longest = self.facts.positions, inputs["input_ids"].shape[1]
        positions = self._rows(table) - self._first_position if table else self._most_positions
        if longest > positions:
            return f"texts of {longest} tokens, the model has {positions} positions; set 'max_length'"
        types = inputs.get("token_type_ids") if self.facts.types else None
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
        # Files of the stack alone lack its prefix.
        inside = _join_names(_prefix(self.facts), named)
        # Adapters name modules as the library's class does, which in version 5 is not as files do.
        found = self._stored_paths.get(named) or self._stored_paths.get(inside)
        if found is not None:
            return found
        bare = inside in self._shapes or inside.startswith(self.facts.heads)
        return inside if bare and named not in self._shapes else named

    def is_carried(self, name: str) -> bool:
        return name.startswith(self.facts.heads)


def encoder_of(facts: EncoderFacts) -> type[Encoder]:
    """Return the adapter of one row of facts.

    Raises:
        AttributeError: the installed transformers has no class of that name.
    """
    return class_of(
        facts, Encoder, "Encoder", modality=facts.modality, scores_with="prompts" if facts.pooler else "own"
    )


def pool_states(states: Tensor, how: Pooling, mask: Tensor | None) -> Tensor:
    """Return `[batch, k]` of states `[batch, tokens, width]`; k is the width, or twice that for "first and mean".

    Args:
        mask: `[batch, tokens]`, 0 on padding, which no mean counts.
    """
    if how == "first":
        return states[:, 0]
    if how == "first and mean":
        return torch.cat([states[:, 0], states[:, 1:].mean(1)], dim=1)
    return states.mean(1) if mask is None else zero_masked(states, mask).sum(1) / mask.sum(1, keepdim=True)


def reads_first(facts: EncoderFacts) -> bool:
    """Say whether the head reads the first token alone."""
    return facts.pooling == "first" and not facts.pooler


def _pooling(facts: EncoderFacts, stated: str | None) -> EncoderFacts:
    """Return the facts with the pooling of a sentence-transformers folder, which has no classifier: its final features
    are its embeddings before any normalisation.

    Args:
        stated: `formats.sentences.POOLING` of the folder; None for other folders.

    Raises:
        InputError: the folder has modules that featcal does not run.
    """
    if stated is None:
        return facts
    if stated not in ("mean", "first") or facts.modality != "text":
        raise InputError(
            f"a sentence-transformers folder with {stated}; featcal pools text by the mean or the first token, prompts "
            "included"
        )
    return replace(facts, pooling="mean" if stated == "mean" else "first", classifier=())


def _choose_pooling(facts: EncoderFacts, stated: str) -> EncoderFacts:
    """Return the facts with the pooling that a configuration states, "cls" or "mean".

    Raises:
        InputError: it states another word.
    """
    known: Mapping[str, Pooling] = {"cls": "first", "mean": "mean"}
    if stated not in known:
        raise InputError(f"config.json pools by {facts.pooling_option}: {stated}; featcal knows {' and '.join(known)}")
    return replace(facts, pooling=known[stated])


def _sides(stated: int | Sequence[int]) -> tuple[int, int]:
    """Return height and width of pictures or patches; a configuration may state one number for both."""
    height, width = (stated, stated) if isinstance(stated, int) else stated
    return height, width


def _prefix(facts: EncoderFacts) -> str:
    """Return the name of the stack in files."""
    return facts.stored_stack or facts.stack


def _join_names(stack: str, name: str) -> str:
    return f"{stack}.{name}" if stack else name


def _is_inside(name: str, prefix: str) -> bool:
    return name.startswith(f"{prefix}.")

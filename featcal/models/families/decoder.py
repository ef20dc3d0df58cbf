"""Adapt decoder-only language models: one adapter for all, configured by a row of facts (`decoder_facts`)."""

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
from featcal.formats.load_pretrained import load_complete
from featcal.formats.sentences import MODULES_FILE, WEIGHED
from featcal.formats.weights import Weights
from featcal.models.adapter import Batch, Block, Call, TokenOptions, check_buffers
from featcal.models.attention import choose_attention
from featcal.models.families.decoder_facts import SETTINGS, DecoderFacts
from featcal.models.families.facts import class_of, named_class
from featcal.models.families.forward_options import forward_options
from featcal.models.families.language import (
    LanguageModel,
    answer_position,
    library_logits,
    mask_to_weights,
    random_tokens,
    require_no_cache,
    unpadded_ids,
    zero_masked,
)
from featcal.models.families.mixture import separate_members
from featcal.models.families.renamed_block import NamedBlock
from featcal.models.families.sublayers import PartedStage
from featcal.models.generation import Generator
from featcal.models.standing_in import capture_calls
from featcal.system.errors import InputError

_LENGTHS = ("max_position_embeddings", "max_seq_len")
"""Options of a configuration that state how long a text may be."""
_ROPES_OF_4 = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")


class DecoderStage(PartedStage):
    """The stage from token ids through embeddings to the decoder blocks.

    Masks and positions are captured for every block: those with a window, or with positions of their own, get theirs.
    """

    name = "decoder"

    def __init__(self, model: Any, facts: DecoderFacts) -> None:
        self._facts, self.parts, self.shared = facts, facts.parts, facts.shared
        self._stack = model.get_submodule(facts.stack)
        blocks, norm = f"{facts.stack}.{facts.blocks}", f"{facts.stack}.{facts.norm}"
        listed = model.get_submodule(blocks)
        self.blocks = tuple(_block(f"{blocks}.{i}", block, facts) for i, block in enumerate(listed))
        names = (name for name, _ in self._stack.named_parameters())
        behind = (f"{facts.blocks}.", f"{facts.norm}.")
        self.outer = tuple(f"{facts.stack}.{name}" for name in names if not name.startswith(behind))
        last = type(model.get_submodule(norm))
        # Every architecture has a class of its own for its RMSNorm, so that it is known by its parameters.
        scales = [name for name, _ in model.get_submodule(norm).named_parameters()]
        self.norm = last if scales == ["weight"] and not issubclass(last, nn.LayerNorm) else None
        self.norm_offset, self.head_axis = facts.norm_offset, facts.head_axis

    def first_call(self, outer: Mapping[str, Tensor], inputs: Batch, upstream: Call | None) -> Call:
        own = {name[len(self._facts.stack) + 1 :]: outer[name] for name in self.outer}
        given = {"input_ids": inputs["input_ids"], "attention_mask": inputs.get("attention_mask"), "use_cache": False}
        return require_no_cache(capture_calls(self._stack, self.blocks, own, self._facts.in_tuple, **given))

    def weighting(self, index: int, module: str) -> str:
        return "tokens"

    def token_weights(self, weighting: str, call: Call, inputs: Batch, options: TokenOptions) -> Tensor | None:
        """Return weight 0 for padding and, with `completion_only`, for positions that predict no token of the answer.

        In a text without a prompt, all tokens count.
        """
        attended = inputs.get("attention_mask")
        counts = attended if attended is None or not options.completion_only else predicting_positions(inputs)
        return mask_to_weights(counts)

    def state(self, call: Call, inputs: Batch) -> Tensor:
        return zero_masked(call.hidden_state, inputs.get("attention_mask"))

    def token_ids(self, inputs: Batch) -> Mapping[str, Tensor]:
        return {"text": unpadded_ids(inputs)}


def predicting_positions(inputs: Batch) -> Tensor:
    """Return a mask `[batch, tokens]` of the positions that predict a token of the answer; in a text without a
    prompt, of all positions but padding.
    """
    attended = inputs["attention_mask"] if "attention_mask" in inputs else torch.ones_like(inputs["input_ids"])
    answer = inputs.get("completion_mask", attended)
    # Position t predicts token t + 1, so the answer's mask moves one to the left.
    moved = torch.nn.functional.pad(answer[:, 1:], (0, 1))
    return torch.where((answer == attended).all(1, keepdim=True), attended, moved)


class Decoder(LanguageModel):
    """A decoder-only model with its language-modelling head, which is never calibrated, tied to the embedding or not.

    Every row of facts has a subclass (`adapter_of`).
    """

    modality = "causal"
    causal = True
    head = ()
    facts: DecoderFacts
    config_class: Any
    model_class: Any

    def __init__(self, config: Mapping[str, Any], names: Collection[str], device: torch.device) -> None:
        facts = self.facts
        if weighed := config.get(WEIGHED):
            raise InputError(
                f"a sentence-transformers folder with {', '.join(weighed)} in {MODULES_FILE}, whose weights featcal "
                "neither merges nor writes; of decoders it takes those without such modules"
            )
        self._config = self.config_class(**config)
        self._device, self._tied = device, bool(self._config.tie_word_embeddings)
        self._head = stored_name(facts, f"{facts.head}.weight")
        self._embedding = f"{facts.stack}.{facts.embedding}.weight"
        has_own_attention = facts.is_found and not self.model_class._supports_attention_backend
        if has_own_attention:
            self._config._attn_implementation = "eager"  # its plainest one, which has all derivatives
        self.model = self.fresh()
        if not has_own_attention:
            choose_attention(self.model)
        check_buffers(self.model)
        self.limits = limits_of(facts)
        self.settings = forward_settings(self._config, facts.settings)
        self.stages = (DecoderStage(self.model, facts),)
        self.tower = tuple(self.shapes())
        self.aliases = {self._head: self._embedding} if self._tied else {}
        self.vocabulary = (self._embedding,) if self._tied else (self._embedding, self._head)
        self.scoring = (self._embedding if self._tied else self._head,)
        self._norm = f"{facts.stack}.{facts.norm}"
        self.closing = tuple(name for name in self.tower if name.startswith(f"{self._norm}."))
        self.softcap = getattr(self._config, facts.softcap) if facts.softcap else None

    def fresh(self) -> Any:
        experts = self.facts.experts
        with torch.device("meta"):
            # A copy: models write into their configuration, such as their kind of attention.
            model = self.model_class(copy.deepcopy(self._config))
            if experts is not None:
                separate_members(
                    model, experts.module, experts.maps, getattr(self._config, experts.chosen), experts.router
                )
        if self._tied and not self.facts.classifier:
            model.get_submodule(self.facts.head).weight = model.get_parameter(self._embedding)
        with self._device:
            fill_buffers(model)
        return model

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {stored_name(self.facts, name): shape for name, shape in super().shapes().items()}

    def final(self, tensors: Mapping[str, Tensor], call: Call, inputs: Batch) -> Tensor:
        """Return the normed state at the position that decides the first token of the answer."""
        rows = torch.arange(len(call.hidden_state), device=call.hidden_state.device)
        return self.close(tensors, call.hidden_state[rows, answer_position(inputs)])

    def close(self, tensors: Mapping[str, Tensor], hidden: Tensor) -> Tensor:
        own = {name.rpartition(".")[2]: tensors[name] for name in self.closing}
        normed: Tensor = functional_call(self.model.get_submodule(self._norm), own, (hidden,), strict=True)
        return normed

    def deciding_positions(self, inputs: Batch) -> Tensor:
        # The one that `final` reads is among them, also of a text whose answer was cut off.
        return predicting_positions(inputs).scatter(1, answer_position(inputs)[:, None], 1)

    def probe(self) -> Batch:
        ids = random_tokens(self.shapes()[self._embedding][0])
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def reference(self, folder: Path, inputs: Batch) -> Tensor:
        return library_logits(self.model_class, folder, **inputs)[:, -1]

    @property
    def generates(self) -> bool:
        """Say whether the class has transformers' `generate`, which a user's own class may lack."""
        return super().generates and hasattr(self.model_class, "generate")

    def generating(self, tensors: Mapping[str, Tensor], folder: Path) -> Generator:
        table, config = self._positions, self._config.get_text_config()
        stated = getattr(config, "max_position_embeddings", None) if table is None else table
        return replace(super().generating(tensors, folder), positions=table, stated=stated)

    @property
    def _positions(self) -> int | None:
        """Return the number of rows of the table of positions; None without one. For a row that featcal found by
        itself, return the number in the configuration, since such a row does not say whether there is a table.
        """
        if self.facts.is_found:
            return next((own for name in _LENGTHS if (own := getattr(self._config, name, None))), None)
        table = f"{self.facts.stack}.{self.facts.positions}.weight"
        return self.shapes()[table][0] if self.facts.positions else None

    def misfit(self, inputs: Batch) -> str | None:
        return super().misfit(inputs) or self._too_long(inputs) or self._mixed_ropes(inputs)

    def _too_long(self, inputs: Batch) -> str | None:
        """Return the reason why a text has too few positions; None if all fit."""
        longest, rows = inputs["input_ids"].shape[1], self._positions
        if rows is None or longest <= rows:
            return None
        return f"texts of {longest} tokens, the model has {rows} positions; set 'max_length'"

    def _mixed_ropes(self, inputs: Batch) -> str | None:
        """Return the reason why the rotary frequencies of a text would depend on the other
        texts in its batch; None if they do not.
        """
        lengths = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).sum(1)
        shortest, longest = int(lengths.min()), int(lengths.max())
        for rope in ropes(self._config):
            kind = rope["rope_type"]
            if kind not in ("dynamic", "longrope"):
                continue
            limit: int = self._config.max_position_embeddings
            if kind == "longrope":
                limit = rope["original_max_position_embeddings"]
            if longest <= limit or (kind == "longrope" and shortest > limit):
                continue
            return (
                f"rope type '{kind}' turns by the longest text of a batch beyond {limit} tokens, and texts reach from "
                f"{shortest} to {longest} tokens: what one gives would depend on the others; cut them to at most "
                f"{limit} ('max_length' of the task)"
            )
        return None

    def canonical(self, stored: str) -> str | None:
        if stored in self.aliases or stored.endswith(self.facts.dropped):
            return None
        stored = stored_name(self.facts, stored)
        # Files of the stack alone lack its prefix.
        inside = f"{self.facts.stack}.{stored}"
        return inside if stored not in self.tower and inside in self.tower else stored

    def ties_head(self, config: Mapping[str, Any]) -> bool:
        return bool(self.config_class(**config).tie_word_embeddings)

    def portable(self, config: Mapping[str, Any], model: Weights) -> tuple[dict[str, Any], list[str]]:
        """Return a configuration that transformers 4 reads, too: `rope_theta` and `rope_scaling` in addition to
        `rope_parameters`, `rope_local_base_freq` for blocks with a window, and the number of experts under both
        versions' names.
        """
        if config.get("rope_parameters") is None:
            return dict(config), []
        stated, settings = dict(self._config.rope_parameters), dict(config)
        if self.facts.experts is not None:
            settings |= {
                name: settings[other] for name, other in self.config_class.attribute_map.items() if other in settings
            }
        if "rope_type" not in stated:
            windowed = dict(stated.pop("sliding_attention", None) or {})
            settings["rope_local_base_freq"] = windowed.get("rope_theta")
            stated = dict(stated["full_attention"])
        rope = stated
        kind = rope["rope_type"]
        settings["rope_theta"] = rope.pop("rope_theta")
        if "partial_rotary_factor" in rope:
            settings["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
        settings["rope_scaling"] = None if kind == "default" else rope
        if kind == "longrope" and config["model_type"] == "phi3":  # version 4 takes exactly these
            factors = {name: rope[name] for name in ("short_factor", "long_factor")}
            settings["rope_scaling"] = {"type": kind, **factors}
        if config["model_type"] == "gpt_neox":  # version 4 goes by these names alone
            names = {"rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor"}
            settings |= {old: settings[new] for old, new in names.items() if new in settings}
        why = "" if kind in _ROPES_OF_4 else f"version 4 has no rope type '{kind}'"
        if kind == "longrope":  # version 4 looks for the length beside the scaling, and divides by it
            original = settings["original_max_position_embeddings"] = rope["original_max_position_embeddings"]
            ratio = config.get("max_position_embeddings", self._config.max_position_embeddings) / original
            if rope.get("attention_factor") is None and rope.get("factor") not in (None, ratio):
                why = f"version 4 replaces the factor {rope['factor']:g} of this longrope by {ratio:g}"
        return settings, [f"needs transformers 5: {why}"] if why else []


class DecoderClassifier(Decoder):
    """A decoder with a classifier per task, without a bias, that reads the state of a text's last token.

    Like an encoder's head, the classifier is taken from the task's expert, never merged and never calibrated, and stays
    in a written folder as in the folder's origin. That origin, like the base, may have a language-modelling head or
    none.
    """

    def __init__(self, config: Mapping[str, Any], names: Collection[str], device: torch.device) -> None:
        super().__init__(config, names, device)
        self.classifier = (self.facts.classifier,)
        self.vocabulary, self.scoring = (self._embedding,), ()

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: shape for name, shape in super().shapes().items() if not self.is_carried(name)}

    def is_carried(self, name: str) -> bool:
        return name.startswith((f"{self.facts.classifier}.", f"{self.facts.head}."))

    def output(self, tensors: Mapping[str, Tensor], features: Tensor) -> Tensor:
        return features

    def reference(self, folder: Path, inputs: Batch) -> Tensor:
        loaded = load_complete(getattr(transformers, self.loader(read_config(folder, "written model"))), folder)
        with torch.no_grad():
            states: Tensor = loaded.base_model(**inputs, use_cache=False).last_hidden_state
        return states[:, -1]

    def loader(self, config: Mapping[str, Any]) -> str:
        """Return the class that the folder names, whatever its head is; "AutoModel" for the stack alone."""
        return named_class(config)


def limits_of(facts: DecoderFacts) -> str:
    """Return the limits, in words, of a row that featcal found by itself; "" for a row that a person wrote."""
    if not facts.is_found:
        return ""
    return (
        f"no row of facts describes '{facts.model_type}': its blocks were found by running "
        f"{getattr(facts.model, '__name__', facts.model)}; replay checked, options limited to the recipe 'paper', "
        "without sublayers"
    )


def adapter_of(facts: DecoderFacts) -> type[Decoder]:
    """Return the adapter of one row of facts.

    Raises:
        AttributeError: the installed transformers has no class of that name.
    """
    if facts.classifier:
        return class_of(facts, DecoderClassifier, "Classifier", modality="text", scores_with="own")
    return class_of(facts, Decoder, "Decoder")


def _block(name: str, module: nn.Module, facts: DecoderFacts) -> Block:
    """Return a block under the names of files."""
    if not facts.renamed:
        return Block(name, module)
    inside = (own for own, _ in module.named_modules())
    renamed = {own: stored for own in inside if (stored := _stored_local_name(facts, own)) != own}
    return NamedBlock(name, module, name, renamed)


def stored_name(facts: DecoderFacts, name: str) -> str:
    """Return the name in files of a tensor of the library's class."""
    if facts.stored_head and name == f"{facts.head}.weight":
        return f"{facts.stored_head}.weight"
    prefix = f"{facts.stack}.{facts.blocks}."
    number, dot, inside = name.removeprefix(prefix).partition(".")
    if not (name.startswith(prefix) and number.isdigit()):
        return name
    return f"{prefix}{number}{dot}{_stored_local_name(facts, inside)}"


def _stored_local_name(facts: DecoderFacts, inside: str) -> str:
    """Return the name in files of a module or a tensor of a block, given its name inside the block."""
    for module, stored in facts.renamed:
        if inside == module or inside.startswith(f"{module}."):
            return f"{stored}{inside[len(module) :]}"
    return inside


def fill_buffers(model: Any) -> None:
    """Give buffers that no checkpoint holds (rotary frequencies, a factor of the embedding) their values on the current
    device; parameters stay on meta.

    Raises:
        ValueError: a checkpoint would store one of them, so its values are the model's and not the library's.
    """
    stored = model.state_dict().keys() & {name for name, _ in model.named_buffers()}
    if stored:
        raise ValueError(f"buffers that belong to a checkpoint: {', '.join(sorted(stored))}")
    for module in model.modules():
        own = {name: buffer for name, buffer in module.named_buffers(recurse=False) if buffer.is_meta}
        for name, buffer in own.items():
            module.register_buffer(name, torch.empty(buffer.shape, dtype=buffer.dtype), persistent=False)
        if own:
            with torch.no_grad():
                # The library's own initialisation computes their values.
                model._init_weights(module)


def forward_settings(config: Any, more: Sequence[str]) -> dict[str, Any]:
    """Return the options of a configuration that change the forward without changing a shape: those of any decoder, and
    `more`."""
    # Rotary angles of these kinds are scaled by the longest text that the model takes.
    scaled = any(one.get("rope_type") in ("longrope", "dynamic") for one in ropes(config))
    return forward_options(config, (*SETTINGS, *more, *(["max_position_embeddings"] if scaled else [])))


def ropes(config: Any) -> list[Mapping[str, Any]]:
    """Return every set of rotary settings in a configuration: none, one, or one for each kind of block."""
    stated = getattr(config, "rope_parameters", None) or {}
    return [stated] if "rope_type" in stated else [one for one in stated.values() if one]

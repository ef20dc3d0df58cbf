"""Compare tokenizer, chat template and configuration of a merged model with those of its base and its experts: half of
all seemingly bad merges have a fault there."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from featcal.formats.located_model import Located, explain_model_errors
from featcal.formats.tokenizers import TOKENIZER_FILES, text_folder
from featcal.formats.weights import TensorInfo
from featcal.models.adapter import Adapter
from featcal.models.families.registry import adapter_for
from featcal.preflight.handover.folder import Folder
from featcal.preflight.models import CPU
from featcal.preflight.tokenizers import (
    read_tokenizer,
    read_vocabulary,
    token_text,
    tokenizer_disagreement,
    tokenizer_problem,
)
from featcal.system.errors import InputError
from featcal.system.formatting import join_words, shorten
from featcal.system.json_files import read_json

TOKENIZER, TEMPLATE, ROPE, CONFIG, TOKENS, DTYPE = (
    "tokenizer", "chat template", "rope", "configuration", "special tokens", "dtype",
)  # fmt: skip
"""Kinds of differences."""
_CONFIG, _GENERATION, _TEMPLATE, _OPTIONS = (
    "config.json", "generation_config.json", "chat_template.jinja", "tokenizer_config.json",
)  # fmt: skip
_ROPE = "rope_parameters"
_ENDS = ("add_bos_token", "add_eos_token", "bos_token", "eos_token")
"""Options of a tokenizer that decide the tokens at the start and end of a text."""


@dataclass(frozen=True)
class FileDifference:
    """One difference between the files of a merged model and its base, weights aside."""

    about: str
    sentence: str
    is_fault: bool
    """True if it makes the model do something else than its weights can do; otherwise it is only worth knowing."""
    files: tuple[str, ...] = ()
    """Files whose copies from the base correct it; none if a person must decide."""

    def to_json(self) -> dict[str, Any]:
        """Return all differences as JSON, for a document."""
        return asdict(self)


@dataclass(frozen=True)
class Side:
    """One model with the files beside its weights."""

    role: str
    located: Located
    info: Mapping[str, TensorInfo]
    """Shapes and dtypes of its tensors, by canonical name."""

    @property
    def folder(self) -> Path:
        """Return the folder of the model's files."""
        return self.located.folder

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """Return the model's configuration, completed with the library's defaults."""
        from transformers import CONFIG_MAPPING

        stated = self.located.config
        if (kind := str(stated.get("model_type"))) not in CONFIG_MAPPING:
            return stated
        with explain_model_errors(self.located.label, self.located.config_source):
            found: dict[str, Any] = CONFIG_MAPPING[kind](**stated).to_dict()
        return found

    def read(self, name: str) -> dict[str, Any]:
        """Return the content of a JSON file; {} if it cannot be read."""
        try:
            return read_json(self.folder / name)
        except InputError:
            return {}

    def token(self, name: str) -> Any:
        """Return a generation option, else that of the configuration."""
        stated = self.read(_GENERATION).get(name)
        return self.config.get(name) if stated is None else stated

    @property
    def ends(self) -> set[int]:
        """Return the ids of the tokens at which generation ends."""
        stated = self.token("eos_token_id")
        return {one for one in (stated if isinstance(stated, list) else [stated]) if isinstance(one, int)}

    @cached_property
    def template(self) -> Any:
        """Return the model's chat template, one text or one per use; None without one."""
        return Folder(text_folder(self.located)).template

    @property
    def vocabulary(self) -> dict[str, int]:
        """Return the id of every token, as far as the files show it."""
        found = read_tokenizer(self.folder)
        return {} if found is None else read_vocabulary(found)

    @property
    def tokenizer_files(self) -> tuple[str, ...]:
        """Return the names of the tokenizer's files."""
        return tuple(name for name in TOKENIZER_FILES if (self.folder / name).is_file())


@dataclass(frozen=True)
class Trio:
    """A merged model, its base and its experts, and their files.

    Args:
        adapter: of the base.
        base: the first expert, if the base is not known.
        experts: all of them, or the others.
    """

    adapter: Adapter
    base: Side
    merged: Side
    experts: Sequence[Side]

    def compare(self) -> tuple[FileDifference, ...]:
        """Return all differences between the merged model's files and the base's, faults first.

        Chat template and end tokens may also be an expert's, which is no fault. Options that change the computation
        must be the base's.

        Raises:
            InputError: the merged model's configuration describes no model.
        """
        found = [*self._compare_settings(), *self._compare_options(), *self._compare_dtypes()]
        if self.adapter.modality != "pixels":
            found += [*self._compare_tokenizers(), *self._compare_templates(), *self._compare_ends()]
        return tuple(sorted(found, key=lambda one: not one.is_fault))

    @property
    def _rows(self) -> tuple[int, int]:
        """Return the rows of the vocabulary of the base and of the merged model; 0 without a vocabulary."""
        first = next(iter(self.adapter.vocabulary), "")
        own, theirs = (side.info[first].shape[0] if first in side.info else 0 for side in (self.base, self.merged))
        return own, theirs

    def _copies(self, *names: str) -> tuple[str, ...]:
        """Return the base's files of these names, if they fit weights with the merged model's rows."""
        own, theirs = self._rows
        return tuple(name for name in names if (self.base.folder / name).is_file()) if own == theirs else ()

    @property
    def _whose(self) -> str:
        return "the base's" if self.base.role == "the base" else f"that of {self.base.role}"

    def _roles_with(self, template: Any) -> str:
        return join_words([one.role for one in (self.base, *self.experts) if one.template == template])

    def _compare_settings(self) -> Iterator[FileDifference]:
        """Compare the settings that change the forward pass without changing a shape, as the models' own classes read
        them."""
        found = self.merged.located
        with explain_model_errors(found.label, found.config_source):
            theirs = adapter_for(found.config, found.names, CPU, found.label, self.adapter.reads_prompts).settings
        for name, value in self.adapter.settings.items():
            other, files = theirs.get(name), self._copies(_CONFIG)
            if other != value and name == _ROPE:
                text = f"Rotary positions differ: {_tell_apart(value, other, self.base.role)}."
                yield FileDifference(ROPE, text, True, files)
            elif other != value:
                text = f"The configuration differs: {name} is {_short(other)}, in {self.base.role} {_short(value)}."
                yield FileDifference(CONFIG, text, True, files)

    def _compare_options(self) -> Iterator[FileDifference]:
        files = self._copies(_CONFIG)
        for name, about in (("max_position_embeddings", ROPE), ("tie_word_embeddings", CONFIG)):
            own, theirs = (side.config.get(name) for side in (self.base, self.merged))
            if own != theirs:
                text = f"The configuration differs: {name} is {_short(theirs)}, in {self.base.role} {_short(own)}."
                yield FileDifference(about, text, True, files)
        (own, rows), stated = self._rows, self.merged.config.get("vocab_size")
        if rows and isinstance(stated, int) and rows != stated:
            text = (
                f"The configuration is not that of the weights: vocab_size is {stated}, the embedding has {rows} rows."
            )
            yield FileDifference(CONFIG, text, True, files)
        if rows != own:
            yield FileDifference(TOKENIZER, f"The embedding has {rows} rows, that of {self.base.role} {own}.", False)

    def _compare_tokenizers(self) -> Iterator[FileDifference]:
        base, merged = self.base, self.merged
        if base.tokenizer_files and not merged.tokenizer_files:
            yield FileDifference(TOKENIZER, "There is no tokenizer beside the weights.", True, base.tokenizer_files)
            return
        if problem := tokenizer_problem(merged.folder):
            yield FileDifference(TOKENIZER, f"The tokenizer cannot be read: {problem}.", True, base.tokenizer_files)
            return
        largest, rows = max(merged.vocabulary.values(), default=0), self._rows[1]
        if largest >= rows > 0:
            text = f"The tokenizer has ids up to {largest}, the embedding only {rows} rows: texts with others fail."
            yield FileDifference(TOKENIZER, text, True, base.tokenizer_files)
        found = tokenizer_disagreement(base.folder, merged.folder)
        if found is None:
            return
        like = [one.role for one in self.experts if one.vocabulary == merged.vocabulary and merged.vocabulary]
        origin = f"; it is that of {join_words(like)}" if like else ""
        # Rules that merely look different may be the same ones, saved by another version of the library.
        title = f"The tokenizer is not {'' if found.changed else 'quite '}{self._whose}: "
        files = base.tokenizer_files if found.changed else ()
        sentence = found.sentence.replace("the base", self.base.role)  # which it calls what it is held against
        yield FileDifference(TOKENIZER, f"{title}{sentence}{origin}.", found.changed, files)

    def _compare_templates(self) -> Iterator[FileDifference]:
        holders = [one for one in (self.base, *self.experts) if one.template is not None]
        own, of_base = self.merged.template, self.base.template
        held = any((self.base.folder / name).is_file() for name in (_TEMPLATE, "chat_template.json"))
        files = () if of_base is None else self._copies(_TEMPLATE, "chat_template.json") if held else (_OPTIONS,)
        if own is None and holders:
            whose = join_words([one.role for one in holders])
            yield FileDifference(TEMPLATE, f"There is no chat template; {whose} had one.", of_base is not None, files)
        elif own is not None and own not in [one.template for one in holders]:
            text = f"The chat template is neither {self._whose} nor an expert's."
            yield FileDifference(TEMPLATE, text, bool(holders), files)
        elif own != of_base:
            text = f"The chat template is that of {self._roles_with(own)}, not {self._whose}."
            yield FileDifference(TEMPLATE, text, False)
        experts = [one for one in self.experts if one.template not in (None, own)]
        if own is not None and experts:
            whose = join_words([one.role for one in experts])
            text = f"The chat template is not the one that {whose} was trained with; its answers may suffer."
            yield FileDifference(TEMPLATE, text, False)

    def _compare_ends(self) -> Iterator[FileDifference]:
        """Compare the tokens at the start and end of texts."""
        own, theirs = (side.token("bos_token_id") for side in (self.base, self.merged))
        files = self._copies(_CONFIG, _GENERATION)
        if own != theirs:
            text = f"Texts begin with token {theirs}, those of {self.base.role} with {own}."
            yield FileDifference(TOKENS, text, True, files)
        lacking = {one.role: one.ends - self.merged.ends for one in (self.base, *self.experts)}
        others = "; ".join(f"{role} ends at {_ids(ids)} too" for role, ids in lacking.items() if ids)
        if others:
            text = f"Generation ends at token {_ids(self.merged.ends)}, but {others}: answers may not end."
            of_base = bool(lacking[self.base.role])
            yield FileDifference(TOKENS, text, of_base, files if of_base else ())
        stated, found = self.base.read(_OPTIONS), self.merged.read(_OPTIONS)
        for name in _ENDS:
            # What one of the files leaves out is left to the library, and versions of it differ in what they leave out.
            if name in stated and name in found and token_text(stated[name]) != token_text(found[name]):
                alike = [token_text(one.read(_OPTIONS).get(name)) for one in self.experts]
                text = f"{_OPTIONS}: {name} is {_short(found[name])}, in {self.base.role} {_short(stated[name])}."
                is_fault = token_text(found[name]) not in alike
                yield FileDifference(TOKENS, text, is_fault, (_OPTIONS,) if is_fault else ())

    def _compare_dtypes(self) -> Iterator[FileDifference]:
        own, theirs = (_dtypes(side) for side in (self.base, self.merged))
        if own != theirs:
            text = (
                f"Weights are stored in {join_words(sorted(theirs))}, those of {self.base.role} in "
                f"{join_words(sorted(own))}."
            )
            yield FileDifference(DTYPE, text, False)


def repair_command(differences: Sequence[FileDifference], base: Path, merged: Path) -> str:
    """Return the command that copies the base's files over faulty ones of a merged model; "" if there are none."""
    names = dict.fromkeys(name for one in differences if one.is_fault for name in one.files)
    return shlex.join(["cp", *(str(base / name) for name in names), f"{merged}/"]) if names else ""


def _tell_apart(own: Any, theirs: Any, role: str) -> str:
    """Describe the options in which two sets of rotary settings differ."""
    a, b = (one if isinstance(one, Mapping) else {_ROPE: one} for one in (own, theirs))
    names = [name for name in dict.fromkeys([*a, *b]) if a.get(name) != b.get(name)]
    return "; ".join(f"{name} is {_short(b.get(name))}, in {role} {_short(a.get(name))}" for name in names)


def _dtypes(side: Side) -> set[str]:
    return {str(one.dtype).removeprefix("torch.") for one in side.info.values()}


def _ids(ids: set[int]) -> str:
    return join_words([str(one) for one in sorted(ids)]) or "none"


def _short(value: Any) -> str:
    return shorten(str(token_text(value)), 60)

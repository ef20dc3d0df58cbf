"""Read a folder for export, as far as possible: problems are collected, so that none hides another."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

from featcal.formats.checkpoint import INDEX_FILE, SINGLE_FILE, Header, read_header, shards
from featcal.formats.conversions import explain_training_state
from featcal.formats.open_clip import is_open_clip_folder
from featcal.formats.output import PARTIAL, partial_folder
from featcal.formats.peft import CONFIG_FILE as ADAPTER_CONFIG
from featcal.formats.pickles import select_pickled
from featcal.preflight.handover.runtimes import SUPPORT, Support
from featcal.system.errors import InputError
from featcal.system.formatting import some
from featcal.system.json_files import read_json

LABEL = "folder"
CONFIG, GENERATION, TOKENIZER, OPTIONS = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
)  # fmt: skip
TEMPLATE, OLD_TEMPLATE = "chat_template.jinja", "chat_template.json"


@dataclass(frozen=True)
class Obstacle:
    """One obstacle for another program."""

    about: str
    """Part of the folder in a word or two, such as "tokenizer"."""
    sentence: str
    """What is wrong, where, and what to do."""
    copies: tuple[str, ...] = ()
    """Files that correct it if they are copied from the base."""


@dataclass(frozen=True)
class Folder:
    """A model's folder, together with the files in `added`."""

    path: Path
    added: Mapping[str, bytes] = field(default_factory=dict)
    """Content of files that the folder lacks, by name."""

    def has(self, name: str) -> bool:
        """Say whether a file exists or is in `added`."""
        return name in self.added or (self.path / name).is_file()

    def read(self, name: str) -> bytes | None:
        """Return the content of a file; None if it cannot be read."""
        if name in self.added:
            return self.added[name]
        try:
            return (self.path / name).read_bytes()
        except OSError:
            return None

    def json(self, name: str) -> dict[str, Any]:
        """Return the mapping in a JSON file; {} if it cannot be read."""
        try:
            content = json.loads(self.added[name]) if name in self.added else read_json(self.path / name)
        except (InputError, ValueError, RecursionError):
            return {}
        return content if isinstance(content, dict) else {}

    @cached_property
    def config(self) -> dict[str, Any]:
        """Return the content of `config.json`."""
        return self.json(CONFIG)

    @property
    def model_class(self) -> str:
        """Return the class of transformers that the configuration names first; "" without one."""
        stated = self.config.get("architectures")
        return str(stated[0]) if isinstance(stated, list) and stated else ""

    @property
    def generates(self) -> bool:
        """Say whether the class of the folder's model generates text."""
        return self.model_class.endswith(("ForCausalLM", "ForConditionalGeneration", "LMHeadModel"))

    @property
    def support(self) -> Support:
        """Return the known facts about its class in other programs."""
        return SUPPORT.get(self.model_class, Support())

    @cached_property
    def template(self) -> Any:
        """Return the folder's chat template, a text or a list of named ones; None without one."""
        own = self.read(TEMPLATE)
        if own is not None:
            return own.decode("utf-8", "replace")
        stated = self.json(OLD_TEMPLATE).get("chat_template")
        return self.json(OPTIONS).get("chat_template") if stated is None else stated

    @cached_property
    def headers(self) -> tuple[dict[Path, Header], tuple[Obstacle, ...]]:
        """Return the header of every readable weight file, and the problems of the others."""
        headers, obstacles = dict[Path, Header](), [*self._check_files()]
        for file in self._files():
            try:
                headers[file] = read_header(file, LABEL)
            except InputError as error:
                obstacles += [Obstacle("weights", one) for one in error.problems]
        return headers, (*obstacles, *self._check_index(headers))

    @cached_property
    def tensors(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Return shape and dtype code of every tensor by its stored name, as far as files can be read."""
        return {name: one for header in self.headers[0].values() for name, one in header.items()}

    @property
    def dtype(self) -> str:
        """Return the dtype code of most values; "" without weights."""
        counts: Counter[str] = Counter()
        for shape, code in self.tensors.values():
            counts[code] += prod(shape)
        return counts.most_common(1)[0][0] if counts else ""

    @property
    def rows(self) -> int:
        """Return the rows of the token embedding; 0 if none is found."""
        return self.tensors[self.embedding][0][0] if self.embedding else 0

    @property
    def embedding(self) -> str:
        """Return the name of the token embedding; "" if none is found."""
        ends = ("embed_tokens.weight", "wte.weight", "shared.weight", "word_embeddings.weight")
        return next((name for name, (shape, _) in self.tensors.items() if name.endswith(ends) and len(shape) == 2), "")

    def place(self, name: str) -> Path:
        """Return the weight file that holds a tensor."""
        return next(file for file, header in self.headers[0].items() if name in header)

    @cached_property
    def _index(self) -> Mapping[str, str]:
        """Return tensor → file from the index of shards; {} if there is no valid one."""
        stated = self.json(INDEX_FILE)
        try:
            shards(stated, INDEX_FILE)
        except InputError:
            return {}
        found: Mapping[str, str] = stated["weight_map"]
        return found

    def _files(self) -> Sequence[Path]:
        named = sorted({*self._index.values()}) or [SINGLE_FILE]
        return [self.path / name for name in named if (self.path / name).is_file()]

    def _check_files(self) -> Iterator[Obstacle]:
        """Yield problems of the weight files, from their names only."""
        if (self.path / INDEX_FILE).is_file() and not self._index:
            yield Obstacle("weights", f"{INDEX_FILE} is not a valid index of shards; write the folder again")
        missing = sorted({name for name in self._index.values() if not (self.path / name).is_file()})
        if missing:
            yield Obstacle("weights", f"{INDEX_FILE} names files that are not there: {some(missing)}; fetch them again")
        if self._index and (self.path / SINGLE_FILE).is_file() and SINGLE_FILE not in self._index.values():
            yield Obstacle(
                "weights",
                f"{SINGLE_FILE} lies beside {INDEX_FILE}, and programs differ in which they read; remove the older one",
            )
        if not self._files() and not missing:
            inside = [one.name for one in self.path.iterdir()]
            pickles, training = select_pickled(inside), explain_training_state(self.path, inside)
            only = f"only pickled weights ({some(pickles)})" if pickles and not training else f"no {SINGLE_FILE}"
            remedy = training or "write safetensors with featcal export first"
            yield Obstacle("weights", f"there is {only}; {remedy}")

    def _check_index(self, headers: Mapping[Path, Header]) -> Iterator[Obstacle]:
        """Yield contradictions between the index and its files."""
        stored = {(name, file.name) for file, header in headers.items() for name in header}
        there = {file.name for file in headers}
        stated = {(name, file) for name, file in self._index.items() if file in there}
        if self._index and stated != stored:
            names = sorted({name for name, _ in stated ^ stored})
            yield Obstacle(
                "weights", f"{INDEX_FILE} and its files do not hold the same tensors: {some(names)}; write it again"
            )


def find_strays(path: Path) -> Iterator[Obstacle]:
    """Yield half-written files in a folder or beside it."""
    absolute = path.absolute()
    half = [absolute] if absolute.name.endswith(PARTIAL) else [partial_folder(absolute)]
    inside = sorted(one for one in path.iterdir() if one.name.endswith(PARTIAL))
    found = [one.name for one in (*half, *inside) if one.exists()]
    if found:
        yield Obstacle(
            "half-written", f"{some(found)} is left from a run that did not end; finish it with --resume, or remove it"
        )


def require_model(path: Path) -> None:
    """Raise InputError for a model that cannot be handed over: a missing folder, an adapter
    without its model, open_clip's layout.
    """
    if not path.is_dir():
        raise InputError(f"no folder {path}; --for takes the folder of a model, as featcal writes it")
    if (path / ADAPTER_CONFIG).is_file() and not (path / CONFIG).is_file():
        raise InputError(
            f"{path} is an adapter without its model; write both as one first: featcal export BASE+{path} --out DIR"
        )
    if is_open_clip_folder(path):
        raise InputError(
            f"{path} has the layout of open_clip; write transformers' first: featcal export {path} --format hf "
            "--out DIR"
        )

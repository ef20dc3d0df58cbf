"""Locate the models of a suite without downloads."""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from featcal.family.opening import report_all
from featcal.formats.checkpoint import INDEX_FILE, local_folder
from featcal.formats.hub import HubModel, hub_model, snapshot
from featcal.formats.hub_errors import Trouble, Unreachable
from featcal.formats.locate import locate
from featcal.formats.located_model import Located
from featcal.formats.lora import LoraWeights, split_lora
from featcal.formats.open_clip import OpenClipModel
from featcal.formats.open_clip_config import FILE_PREFIX, FOLDER_PREFIX, HUB_PREFIX
from featcal.formats.peft import CONFIG_FILE, explain_missing_base, read_adapter_config, task_type
from featcal.formats.pickles import PICKLED_INDEX, select_pickled
from featcal.formats.quick_gelu import check_activation
from featcal.formats.weights import Canonical, Stored
from featcal.preflight.remote import Download, RemoteModel, remote_model
from featcal.preflight.remote_data import DrawnRows, RemoteData, ask_data, describe_rows_here, is_data_cached
from featcal.samples.sources import name_problems
from featcal.suite.source import Source
from featcal.system.errors import InputError
from featcal.system.extras import is_installed
from featcal.system.in_memory import MEMORY
from featcal.system.paths import local_path
from featcal.system.sandbox import require_no_hub

T = TypeVar("T")
Place = Path | RemoteModel | None
"""A folder on this machine, the Hub's description of a model, or None if the Hub does not answer."""


class Places:
    """Locates each model once; models on the Hub are described, never fetched.

    Args:
        root: folder that relative references start from.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._known: dict[str, Any] = {}
        self.downloads: dict[str, Download] = {}
        """Downloads that a run would need, by reference."""
        self.unreachable: dict[str, list[str]] = defaultdict(list)
        """Ids that are in no local cache while the Hub does not answer, and the roles that need them."""
        self.parts_here: dict[str, str] = {}
        """Description, by role, of the parts that are on this machine."""
        self.troubles: dict[str, Trouble] = {}
        """Reasons why models or data sets cannot be reached, by id."""
        self.without_package: set[str] = set()
        """Data sets that the package `datasets` would read if it were installed."""

    def ask_ahead(self, references: Iterable[str], sources: Iterable[Source]) -> None:
        """Ask the Hub for all models and data sets in parallel, so that later look-ups find the answers."""
        parts = dict.fromkeys(part for reference in references for part in self._parts(reference))
        data = {(one.hub, one.revision): one for one in sources if self._is_to_ask(one)}
        questions: list[Callable[[], object]] = [partial(self._place, part, "") for part in parts]
        questions += [partial(self._ask_data, one, "") for one in data.values()]

        def ask(question: Callable[[], object]) -> None:
            with suppress(InputError):  # kept, and raised for whoever needs it
                question()

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(ask, questions))
        # As they were asked, not as they were answered: what is said of them has the same order every time.
        keys = [*parts, *(_name_data(one) for one in data.values())]
        for answers in (self.downloads, self.unreachable, self.troubles):
            _put_in_order(answers, keys)

    def locate(self, ref: str, label: str) -> Located | None:
        """Return the model that a reference names, as far as it is known; None if nothing is known before the download.

        Raises:
            InputError: it does not exist, is gated, or cannot be used.
        """
        parts: list[Place] = []
        problems: list[str] = []
        for part in self._parts(ref):
            try:
                parts.append(self._place(part, label))
            except InputError as error:
                problems += error.problems
        report_all(problems)
        if all(isinstance(part, Path) for part in parts):
            here = self.local(ref)
            found = locate(here, self._root, label)
            if here != ref and isinstance(found, OpenClipModel):  # the folder in the cache has another name
                check_activation(found, ref.removeprefix(HUB_PREFIX))
            return found
        under, adapter = parts[0], parts[1] if len(parts) > 1 else None
        if isinstance(adapter, RemoteModel):
            _check_adapter(adapter, label)
        if isinstance(under, Path):
            return locate(str(under), self._root, label)
        if isinstance(under, RemoteModel) and under.config is None and under.adapter is not None:
            raise InputError(f"{label}: {explain_missing_base(under.adapter, under.ref)}")
        remote = under.locate(label) if under is not None else None
        return _apply_adapter(remote, adapter) if remote is not None and isinstance(adapter, Path) else remote

    def local(self, ref: str) -> str:
        """Return the reference with every Hub id in the local cache replaced by its folder."""
        if ref.startswith(HUB_PREFIX):
            place = self._known.get(ref.removeprefix(HUB_PREFIX))
            return f"{FOLDER_PREFIX}{place}" if isinstance(place, Path) else ref
        if ref.startswith((FILE_PREFIX, FOLDER_PREFIX, MEMORY)):
            return ref
        places = {part: self._known.get(part) for part in self._parts(ref)}
        return "+".join(
            str(place) if isinstance(place, Path) and not self._is_folder(part) else part
            for part, place in places.items()
        )

    def is_local(self, ref: str) -> bool:
        """Say whether every part of a reference that `locate` has seen is on this machine."""
        return all(isinstance(self._known.get(part, self._root), Path) for part in self._parts(ref))

    def has_data(self, source: Source, label: str, rows: DrawnRows | None) -> bool:
        """Say whether a source can be opened, and these rows drawn from it, without a download.

        Args:
            rows: returns the rows that a run would draw, given their total number; None for all.

        Raises:
            InputError: the Hub has no such data set, it is gated, or it cannot be read as the source asks; on a shared
                server, it is on the Hub at all.
        """
        if source.hub is None:
            return True
        if not is_installed("datasets"):
            self.without_package.add(source.hub)
        if self._is_here(source, label, rows):
            return is_installed("datasets")
        data = self._ask_data(source, label)
        if data is None:
            self.parts_here[label] = describe_rows_here(source, rows)
        else:
            with name_problems(label):
                plan = data.plan(source, rows)
            self.downloads[plan.ref] = plan
        return False

    def _is_here(self, source: Source, label: str, rows: DrawnRows | None) -> bool:
        """Say whether a source is a folder, or was fetched from the Hub already."""
        if source.hub is None or self._is_folder(source.hub):
            return True
        require_no_hub(label)
        with name_problems(label):
            return is_installed("datasets") and is_data_cached(source, rows)

    def _is_to_ask(self, source: Source) -> bool:
        with suppress(InputError):  # raised again for whoever needs it
            # Of what was fetched in part nobody knows yet which rows are drawn.
            return not self._is_here(source, "", lambda size: ())
        return False

    def _ask_data(self, source: Source, label: str) -> RemoteData | None:
        found: RemoteData | None = self._find_once(_name_data(source), label, lambda: ask_data(source))
        return found

    def _parts(self, ref: str) -> list[str]:
        if ref.startswith((FILE_PREFIX, FOLDER_PREFIX, MEMORY)):
            return []
        return [part for part in split_lora(ref.removeprefix(HUB_PREFIX), self._root) if part is not None]

    def _place(self, part: str, label: str) -> Place:
        def find() -> Place:
            model = hub_model(part)
            if self._is_folder(part) or self._is_folder(part.split("/")[0]) or model is None:
                return local_folder(part, self._root, label)
            require_no_hub(label)
            cached = cached_folder(model)
            if cached is not None:
                return cached
            found = remote_model(model)
            self.downloads[part] = found.download
            return found

        return self._find_once(part, label, find)

    def _is_folder(self, part: str) -> bool:
        return local_path(part, self._root, "suite").is_dir()

    def _find_once(self, key: str, label: str, find: Callable[[], T]) -> T | None:
        if key not in self._known:
            try:
                self._known[key] = find()
            except Unreachable as error:
                self._known[key], self.troubles[key] = None, error.trouble
                # A defaultdict: looking the key up makes its empty list, to which labels are added below.
                self.unreachable[key]
            except InputError as error:
                # Kept without the label of who asked first: others that need the same part have their own.
                self._known[key] = InputError(*(p.removeprefix(f"{label}: ") for p in error.problems))
        found: T | InputError | None = self._known[key]
        if isinstance(found, InputError):
            raise InputError(*(f"{label}: {problem}" for problem in found.problems)) from found
        if key in self.unreachable and label:
            self.unreachable[key].append(label)
        return found


def _put_in_order(answers: dict[str, Any], keys: Iterable[str]) -> None:
    for key in keys:
        if key in answers:
            answers[key] = answers.pop(key)


def _name_data(source: Source) -> str:
    return f"data set {source.hub}@{source.revision}" if source.revision else f"data set {source.hub}"


def cached_folder(model: HubModel) -> Path | None:
    """Return the folder of a Hub model in the local cache; None if there is none with all its weights."""
    try:
        folder = snapshot(model, local_files_only=True)
    except (OSError, ValueError):
        return None
    # A snapshot may be half fetched; only the index says which shards make it whole. That of pickles lies beside whole
    # safetensors too, and says nothing then.
    safe = any(folder.glob("*.safetensors"))
    index = INDEX_FILE if safe or (folder / INDEX_FILE).is_file() else PICKLED_INDEX
    try:
        shards = set(json.loads((folder / index).read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError):
        return folder if safe or select_pickled([one.name for one in folder.iterdir()]) else None
    return folder if all((folder / shard).is_file() for shard in shards) else None


def _check_adapter(adapter: RemoteModel, label: str) -> None:
    """Raise InputError if the adapter's config is not that of a LoRA that can be reproduced."""
    # The reader of LoRA configs takes a folder, so the Hub's answer is put into one.
    with tempfile.TemporaryDirectory() as folder:
        if adapter.adapter is not None:
            (Path(folder) / CONFIG_FILE).write_text(json.dumps(dict(adapter.adapter)), encoding="utf-8")
        try:
            read_adapter_config(Path(folder), label)
        except InputError as error:
            raise InputError(*(p.replace(folder, f"'{adapter.ref}' on the Hub") for p in error.problems)) from error


def _apply_adapter(under: Located, adapter: Path) -> Located:
    def open_stored(canonical: Canonical, aliases: Mapping[str, str]) -> Stored:
        return LoraWeights(under.open(canonical, aliases), adapter, under.label, canonical, aliases)

    return replace(under, open=open_stored, trained_for=task_type(adapter), adapter_folder=adapter)

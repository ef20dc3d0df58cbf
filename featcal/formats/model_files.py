"""List the files of a model and its commits on the Hub, without reading or fetching them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from heapq import nsmallest
from pathlib import Path

from featcal.formats.hub import ADAPTERS, HEADS, HUB_FILES, RECORD_FILE, HubModel, cached_commit, hub_model
from featcal.formats.open_clip_config import FILE_PREFIX, PREFIXES
from featcal.formats.sentences import module_folders
from featcal.system.errors import InputError
from featcal.system.paths import local_path
from featcal.system.sandbox import require_no_hub

MOST = 1000
"""Largest number of files of one folder that are listed."""
ENDINGS = (".safetensors", ".json", ".txt", ".model", ".jinja", ".bin", ".pt", ".pth")
"""Endings of weights, configuration and tokenizer files."""
TEMPLATES = "additional_chat_templates"
"""Folder of a tokenizer's further chat templates."""
Commit = tuple[str, str]
"""Name of a model or data set on the Hub in a suite, and its commit in the Hub's cache."""


def settings_files(folder: Path) -> Iterator[Path]:
    """Yield the files beside a checkpoint's weights."""
    yield from (file for kind in HUB_FILES if kind != "*.safetensors" for file in sorted(folder.glob(kind)))


def model_files(reference: str, root: Path) -> Iterator[Path]:
    """Yield every local file of a model: those in its folder, below it those of sentence-transformers' modules and of
    further chat templates, and the heads and adapters in a record of featcal's. Missing files are skipped; opening the
    model reports them.

    In a folder with more than `MOST` files, those with a model's endings are listed first, because a typed reference
    may be any folder.

    Args:
        reference: as `locate` takes it.
        root: folder that relative references start from.
    """
    for place in _places(reference):
        with suppress(InputError, OSError):
            path = local_path(place, root, "model")
            if path.is_dir():
                yield from _files_below(path)
            elif path.is_file():
                yield path
                yield from settings_files(path.parent)


def model_commits(references: Iterable[str], root: Path) -> tuple[Commit, ...]:
    """Return the commit of every part of models on the Hub, sorted, if it is fetched or in the reference.

    Args:
        references: of models, as `locate` takes them.
        root: folder that relative references start from.
    """
    found: set[Commit] = set()
    for place, model in models_on_hub(references, root):
        with suppress(InputError):  # whoever opens the model is told
            require_no_hub("model")
            if commit := cached_commit(model.repo, model.revision):
                found.add((place, commit))
    return tuple(sorted(found))


def unpinned_models(references: Iterable[str], root: Path) -> list[str]:
    """Return the Hub ids of models without a revision, which may change.

    Args:
        references, root: as in `model_commits`.
    """
    return list(dict.fromkeys(place for place, model in models_on_hub(references, root) if model.revision is None))


def models_on_hub(references: Iterable[str], root: Path) -> Iterator[tuple[str, HubModel]]:
    """Yield the ids on the Hub in references: of `REF+ADAPTER` both."""
    for place in (place for reference in references for place in _places(reference)):
        with suppress(InputError):
            model = hub_model(place)
            # As `checkpoint.local_folder` has it, what begins with a folder that is here is not on the Hub.
            if model is not None and not local_path(place.split("/")[0], root, "model").is_dir():
                yield place, model


def _files_below(folder: Path) -> Iterator[Path]:
    yield from _files_in(folder)
    inside = [TEMPLATES, *module_folders(folder)]
    if (folder / RECORD_FILE).is_file():
        for part in (HEADS, ADAPTERS):
            inside += [part, *(f"{part}/{name}" for name in _names_in(folder / part))]
    for name in inside:
        yield from _files_in(folder / name)


def _files_in(folder: Path) -> Iterator[Path]:
    yield from (file for name in _names_in(folder) if not (file := folder / name).is_dir())


def _names_in(folder: Path) -> list[str]:
    """Return the names of the files in a folder, weights and settings first if there are many."""
    try:
        return sorted(nsmallest(MOST, os.listdir(folder), key=lambda name: (not name.endswith(ENDINGS), name)))
    except OSError:  # whoever reads it says what is wrong
        return []


def _places(reference: str) -> Iterator[str]:
    """Yield everything in a reference that may be a path or an id: `REF+ADAPTER`, `open_clip:ARCH:FILE`,
    `local-dir:FOLDER`, `hf-hub:ID`."""
    found: dict[str, None] = {}
    for part in (reference, *map(str.strip, reference.split("+"))):
        prefix = next((one for one in PREFIXES if part.startswith(one)), "")
        rest = part.removeprefix(prefix)
        found |= dict.fromkeys(rest.split(":", 1) if prefix == FILE_PREFIX else [rest])
    yield from filter(None, found)

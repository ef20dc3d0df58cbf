"""Check the modules of a sentence-transformers folder: each exists, and fits the output of the one before."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from featcal.formats.checkpoint import SINGLE_FILE, read_header
from featcal.formats.sentences import LENGTH_FILE, MODULES_FILE, NO_LIMIT
from featcal.preflight.handover.folder import LABEL, OPTIONS, Folder, Obstacle
from featcal.system.errors import InputError
from featcal.system.formatting import printable
from featcal.system.json_files import read_json_rows

_FLAG = "pooling_mode_"
_CONFIG_OF = ("Pooling", "Dense")
"""Kinds of module that have an own file of options."""


def check_modules(folder: Folder) -> Iterator[Obstacle]:
    """Yield missing or misfitting parts of `modules.json` and of its modules."""
    if not folder.has(MODULES_FILE):
        yield Obstacle(
            "modules",
            f"there is no {MODULES_FILE}: sentence-transformers would take the mean over tokens, whatever the model "
            "was trained with; take it from the folder that the model was trained in",
            (MODULES_FILE, LENGTH_FILE),
        )
        return
    try:
        modules = read_modules(folder)
    except InputError as error:
        yield from (Obstacle("modules", one) for one in error.problems)
        return
    kinds = [kind for kind, _ in modules]
    if kinds[:1] != ["Transformer"]:
        yield Obstacle("modules", f"{MODULES_FILE} begins with {kinds[0] if kinds else 'nothing'}, not a Transformer")
    yield from _check_length(folder, modules[0][1] if modules else "")
    width = folder.config.get("hidden_size") or folder.config.get("d_model")
    for kind, place in modules[1:]:
        if kind not in _CONFIG_OF:
            continue
        name = f"{place}/config.json"
        options = folder.json(name)
        if not options:
            yield Obstacle("modules", f"{name} is missing or cannot be read; copy the base's", (name,))
        elif kind == "Pooling":
            yield from _check_pooling(options, name, width)
        else:
            yield from _check_dense(folder, place, options, width)
            width = options.get("out_features")


def read_modules(folder: Folder) -> list[tuple[str, str]]:
    """Return kind and folder of every module in their order.

    Raises:
        InputError: `modules.json` is not a list of modules, or a module is outside the folder.
    """
    if MODULES_FILE in folder.added:
        rows = json.loads(folder.added[MODULES_FILE])
    else:
        rows = read_json_rows(folder.path / MODULES_FILE)
    found = [(str(row.get("type", "")).rpartition(".")[2], str(row.get("path", ""))) for row in rows]
    outside = [place for _, place in found if place and Path(place).name != place]
    if outside:
        raise InputError(
            f"{MODULES_FILE} names '{printable(outside[0], 80)}', which does not lie in the model's folder"
        )
    return found


def _check_length(folder: Folder, place: str) -> Iterator[Obstacle]:
    """Yield a length of texts that is missing, or longer than the model's positions."""
    name = f"{place}/{LENGTH_FILE}" if place else LENGTH_FILE
    options = folder.json(name)
    length = options.get("max_seq_length")
    limit, most = folder.config.get("max_position_embeddings"), folder.json(OPTIONS).get("model_max_length")
    if isinstance(limit, int) and folder.config.get("model_type") in ("roberta", "xlm-roberta"):
        limit -= int(folder.config.get("pad_token_id") or 0) + 1  # positions begin after that of padding
    if options and length is None and isinstance(most, int) and most < NO_LIMIT:
        return  # newer versions keep the length with the tokenizer
    if not isinstance(length, int):
        # sentence-transformers takes the smaller of the two instead.
        longest = min((one for one in (limit, most) if isinstance(one, int)), default="the tokenizer's")
        yield Obstacle(
            "length", f"{name} says no max_seq_length: texts would be cut at {longest} tokens; copy the base's", (name,)
        )
    elif isinstance(limit, int) and length > limit:
        yield Obstacle("length", f"{name}: max_seq_length is {length}, the model has {limit} positions; say {limit}")


def _check_pooling(options: Mapping[str, Any], name: str, width: Any) -> Iterator[Obstacle]:
    own = options.get("word_embedding_dimension", options.get("embedding_dimension"))
    modes = [one for one, on in options.items() if one.startswith(_FLAG) and on is True]
    if not modes and not isinstance(options.get("pooling_mode"), str):
        yield Obstacle("pooling", f"{name} switches no kind of pooling on", (name,))
    if own != width:
        yield Obstacle("pooling", f"{name}: word_embedding_dimension is {own}, what comes in has {width}; say {width}")


def _check_dense(folder: Folder, place: str, options: Mapping[str, Any], width: Any) -> Iterator[Obstacle]:
    given, made = options.get("in_features"), options.get("out_features")
    if given != width:
        yield Obstacle("dense", f"{place}/config.json: in_features is {given}, what comes in has {width}; say {width}")
    name = f"{place}/{SINGLE_FILE}"
    if not folder.has(name):
        yield Obstacle("dense", f"{name} is missing: the weights of the module {place}; copy the base's", (name,))
    elif name not in folder.added:
        try:
            shape = read_header(folder.path / name, LABEL).get("linear.weight", ((), ""))[0]
        except InputError as error:
            yield from (Obstacle("dense", one) for one in error.problems)
            return
        if shape != (made, given):
            yield Obstacle("dense", f"{name}: linear.weight is {list(shape)}, {place}/config.json says {[made, given]}")

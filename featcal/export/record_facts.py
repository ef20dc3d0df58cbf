"""Collect facts about the inputs of a run for its record: the model, hashes of the weight files, and the drawn
samples."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from featcal.family.opening import Family
from featcal.formats.in_memory import HeldModel, HeldWeights
from featcal.formats.weights import Weights, WrappedWeights, raw_bytes
from featcal.models.lane import ExpertPass
from featcal.suite.recipe import MergeRecipe
from featcal.system.distributed import ALONE, Ranks
from featcal.system.errors import InputError
from featcal.system.fingerprints import sha256
from featcal.system.formatting import some
from featcal.system.in_memory import change_error


def input_hashes(family: Family, ranks: Ranks = ALONE) -> dict[str, dict[str, str]]:
    """Return the SHA-256 of every weight file that a run reads, by model and file name; each is read by one rank. For a
    model in memory it is the hash of its tensors (`HeldModel.tensors_digest`).

    Raises:
        InputError: a model in memory has changed since its suite was made.
    """
    files = input_files(family)
    held = _models_in_memory(family)
    elsewhere = {f"expert {task}" for task in family.experts.keys() - ranks.select_led(family.experts).keys()}
    known = [name for name in files if files[name] or name in held]
    mine = [name for name in known if name not in elsewhere and (name.startswith("expert ") or not ranks.rank)]
    found = ranks.union(
        {
            name: _hash_held(name, held[name]) if name in held else {file.name: sha256(file) for file in files[name]}
            for name in mine
        }
    )
    # The order of models, not that in which ranks answered.
    return {name: found[name] for name in known}


def _hash_held(name: str, model: HeldModel) -> dict[str, str]:
    if not model.is_unchanged():
        raise change_error(model, name)
    return {f"{model.kind} in memory": model.content}


def require_unchanged(family: Family) -> None:
    """Raise InputError if a model in memory has changed since its suite was made."""
    for name, held in _models_in_memory(family).items():
        _hash_held(name, held)


def _models_in_memory(family: Family) -> dict[str, HeldModel]:
    found = {name: _find_model_in_memory(weights) for name, weights in _models(family).items()}
    return {name: held for name, held in found.items() if held is not None}


def _find_model_in_memory(weights: Weights) -> HeldModel | None:
    """Return the model in memory to which some weights belong; None if they come from elsewhere."""
    while isinstance(weights, WrappedWeights):
        weights = weights.under
    return weights.held if isinstance(weights, HeldWeights) else None


def _models(family: Family) -> dict[str, Weights]:
    experts = {f"expert {task}": expert for task, expert in family.experts.items()}
    known = {"base": family.base} if family.is_base_known else {}
    return {**known, "merged": family.merged, **experts}


def input_files(family: Family) -> dict[str, Sequence[Path]]:
    """Return the weight files by model; recipes and models in memory have none."""
    return {name: getattr(weights, "files", ()) for name, weights in _models(family).items()}


def require_same_start(record: Mapping[str, Any], family: Family, folder: Path) -> None:
    """Check that base, experts and start of a calibrated folder are still those of its suite.

    Args:
        record: of the folder.
        family: the suite, with the start that the record names as its merged model.

    Raises:
        InputError: the suite's merge has another recipe, or weight files have another content; the message says which.
    """
    merged, then = family.suite.merged, record.get("merged")
    now = merged.model_dump() if isinstance(merged, MergeRecipe) else None
    # A record has a word in the place of the recipe of a merge that is a checkpoint: hashes tell such merges apart.
    is_another = record.get("model") == "merged" and now != (then if isinstance(then, Mapping) else None)
    found = input_hashes(family)
    recorded = record.get("inputs", found)  # a record of an early version may have none
    changed = [
        name
        for name in sorted(recorded.keys() | found.keys())
        if sorted(recorded.get(name, {}).values()) != sorted(found.get(name, {}).values())
    ]
    if is_another or changed:
        weights = f"other weights than are there now ({some(changed)})"
        what = "another merge than the suite's is now" if is_another else weights
        raise InputError(f"{folder} was calibrated from {what}; name the suite as it was, or calibrate again")


def identify_model(family: Family) -> list[str]:
    """Return the identity of the calibrated model: its name for the suite's own, also its content for another."""
    if family.merged_name == "merged":
        # Its files are hashed among the inputs; another model may have none.
        return [family.merged_name]
    digest = hashlib.sha256()
    for name in family.adapter.tower:
        digest.update(raw_bytes(family.merged.read([name])[name]))
    return [family.merged_name, digest.hexdigest()]


def read_draws(passes: Mapping[str, ExpertPass]) -> dict[str, dict[str, Any]]:
    """Return the record's facts about the samples of every task, in the order of the draw: indices, hash of their
    inputs, number of truncated ones. Augmented copies of pictures are counted separately."""

    def describe(one: ExpertPass) -> dict[str, Any]:
        indices = sorted({*one.indices})  # as they were drawn
        copies = {"copies": more} if (more := len(one.indices) - len(indices)) else {}
        entry = {"samples": len(indices), **copies, "truncated": one.truncated, "indices": indices}
        return entry | {"sha256": one.digest}

    return {task: describe(one) for task, one in passes.items()}

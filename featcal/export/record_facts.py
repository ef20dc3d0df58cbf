"""Collect what a record says of the inputs of a run: hashes of the weight files, and the samples that were drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from featcal.family.opening import Family
from featcal.models.lane import ExpertPass
from featcal.system.distributed import ALONE, Ranks
from featcal.system.fingerprints import sha256


def input_hashes(family: Family, ranks: Ranks = ALONE) -> dict[str, dict[str, str]]:
    """Return the SHA-256 of every weight file that a run reads, by model and file name; each is read by one rank."""
    files = {name: own for name, own in input_files(family).items() if own}
    elsewhere = {f"expert {task}" for task in family.experts.keys() - ranks.select_led(family.experts).keys()}
    mine = [name for name in files if name not in elsewhere and (name.startswith("expert ") or not ranks.rank)]
    found = ranks.union({name: {file.name: sha256(file) for file in files[name]} for name in mine})
    # The order of models, not that in which ranks answered.
    return {name: found[name] for name in files}


def input_files(family: Family) -> dict[str, Sequence[Path]]:
    """Return the weight files by model; a recipe has none of its own."""
    models = {"base": family.base, "merged": family.merged}
    models |= {f"expert {task}": expert for task, expert in family.experts.items()}
    return {name: getattr(weights, "files", ()) for name, weights in models.items()}


def read_draws(passes: Mapping[str, ExpertPass]) -> dict[str, dict[str, Any]]:
    """Return what a record says of the samples of every task: indices in their order, hash of their inputs, how many
    were cut. Varied copies of pictures count apart."""

    def describe(one: ExpertPass) -> dict[str, Any]:
        indices = [*dict.fromkeys(one.indices)]
        copies = {"copies": more} if (more := len(one.indices) - len(indices)) else {}
        said = {"samples": len(indices), **copies, "truncated": one.truncated, "indices": indices}
        return said | {"sha256": one.digest}

    return {task: describe(one) for task, one in passes.items()}

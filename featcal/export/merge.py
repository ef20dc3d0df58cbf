"""Merge a suite's experts into a checkpoint folder."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from featcal.export.card import model_card
from featcal.export.record_facts import input_hashes
from featcal.export.write import can_reload, write_model
from featcal.family.ancestry import check_lineage
from featcal.family.opening import Family, ensure_family
from featcal.family.outside_tower import note_left_out
from featcal.formats.output import OutputFolder
from featcal.mergers import breadcrumbs, dare, spectral, task_arithmetic, ties, ties_per_tensor
from featcal.suite.facts import suite_facts
from featcal.suite.name_grammar import known_option, model_name, value_of
from featcal.suite.recipe import METHODS, OPTIONS, MergeRecipe
from featcal.suite.schema import Suite
from featcal.system.environment import machine_facts
from featcal.system.errors import InputError
from featcal.system.formatting import did_you_mean
from featcal.system.versions import all_versions

DEFAULT_SCALES = {
    "task-arithmetic": task_arithmetic.DEFAULT_SCALE,
    "ties": ties.DEFAULT_SCALE,
    "ties-per-tensor": ties_per_tensor.DEFAULT_SCALE,
    "dare": dare.DEFAULT_SCALE,
    "dare-ties": ties.DEFAULT_SCALE,
    "breadcrumbs": breadcrumbs.DEFAULT_SCALE,
    **dict.fromkeys(("tsv-m", "iso-c", "iso-cts", "ace"), spectral.DEFAULT_SCALE),
}

_OF_A_MERGER = {
    "scale": float,
    "density": float,
    "drop": float,
    "seed": int,
    "beta": float,
    "gamma": float,
    "common": float,
    "eps": float,
    "steps": int,
    "time": float,
    "share": float,
    "normalize": bool,
    "dtype": str,
}
"""Options that a name can say of a merge method, and their types."""


def merge_to_folder(
    suite: Suite | Family, method: str | None, scale: float | None, out: str | Path, *, max_memory: int | None = None
) -> dict[str, Any]:
    """Write the experts of a suite merged; everything outside the tower is the base's.

    Args:
        method: as a model is named, such as "ties:density=0.3". The suite's own recipe, with all its options, is what
            others are said over where it is of this method, and what is merged by where this is None.
        max_memory: bytes of resident memory that a whole model must fit into to be verified whole; else it is written
            and verified by blocks. None stands for what the machine has to spare.

    Returns:
        The document of `featcal merge --json`.

    Raises:
        InputError: unknown method, an option that the method does not have, an expert that does not descend from the
            base, or an output that cannot be written.
    """
    family = ensure_family(suite, "cpu")
    return write_merge(
        family, recipe_for(family.suite, method, **({} if scale is None else {"scale": scale})), out, max_memory
    )


def write_merge(family: Family, recipe: MergeRecipe, out: str | Path, max_memory: int | None = None) -> dict[str, Any]:
    """The same by a recipe with all its options; returns and raises as `merge_to_folder`."""
    merged = family.merge(recipe)
    settings = {**recipe.model_dump(exclude_none=True)}
    if recipe.method in DEFAULT_SCALES:
        settings.setdefault("scale", DEFAULT_SCALES[recipe.method])
    notes = [*recipe.notes, *check_lineage(family), *note_left_out(family).values()]
    record = {
        "command": "merge",
        "suite": family.suite.name,
        "suite_file": suite_facts(family.suite),
        **settings,
        "recipe": recipe.model_dump(mode="json", exclude_none=True),
        "inputs": input_hashes(family),
        "versions": all_versions(),
        "machine": machine_facts(family.compute.device),
        "notes": notes,
    }
    with OutputFolder(out) as folder:
        card = model_card(
            family.suite, f"{family.suite.name}, merged", "A merge of task experts.", settings, family.adapter.library
        )
        content = write_model(
            folder,
            family.adapter,
            family.origin,
            merged,
            lambda: record,
            card,
            whole=can_reload(merged.info, max_memory),
        )
    return {"out": str(folder.out), **content}


def recipe_for(suite: Suite, method: str | None, **options: object) -> MergeRecipe:
    """Return the suite's own recipe where it is of that method (or where that is None), with other options where they
    are given; else a plain one.

    Args:
        method: its name, with or without options, such as "ties:density=0.3".
        options: more of them.

    Raises:
        InputError: unknown method, or an option that it does not have, that is given twice or outside its range.
    """
    own = suite.merged if isinstance(suite.merged, MergeRecipe) else None
    if method is None and own is None:
        raise InputError("--method is needed: the suite's merged model is a checkpoint, not a recipe")
    if method is not None:
        method, said = _read(method)
        for name in said.keys() & options.keys():
            raise InputError(f"{name} is given twice, in the method's name and as --{name}; leave one out")
        options |= said
    for name, value in options.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise InputError(f"--{name} must be a finite number, not {value}")
    takes_own = own is not None and method in (None, own.method)
    start = own.model_dump(exclude_none=True) if own is not None and takes_own else {"method": method}
    try:
        return MergeRecipe.model_validate({**start, **options})
    except ValidationError as error:
        raise InputError(*(str(e["msg"]).removeprefix("Value error, ") for e in error.errors())) from error


def _read(method: str) -> tuple[str, dict[str, object]]:
    """Return the method and the options in a name, in the types that they have."""
    kind = method.partition(":")[0]
    if kind not in METHODS:
        raise InputError(f"no merge method '{kind}'; there are {', '.join(METHODS)}.{did_you_mean(kind, METHODS)}")
    known, options = tuple(one for one in (*OPTIONS[kind], "dtype") if one in _OF_A_MERGER), model_name(method).options
    for option, _ in options:
        known_option(option, known, kind)
    return kind, {o: value_of(text, _OF_A_MERGER[o], f"model '{method}': {o}") for o, text in options}

"""Merge a suite's experts into a checkpoint folder."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from featcal.export.card import CardProvenance, model_card
from featcal.export.kept_work import require_checked
from featcal.export.licences import licence_conflicts, read_licences
from featcal.export.record_facts import input_hashes
from featcal.export.write import can_reload, write_model
from featcal.family.ancestry import check_lineage
from featcal.family.opening import Family, ensure_family
from featcal.family.outside_tower import note_left_out
from featcal.formats.output import OutputFolder
from featcal.models.compute import compute_for, require_float64
from featcal.suite.facts import suite_facts
from featcal.suite.methods import INSTALLED, is_merger, merger_names, method
from featcal.suite.name_grammar import model_name, read_options
from featcal.suite.options import options_of_class, type_of
from featcal.suite.recipe import DTYPE, MergeRecipe, explain_recipe
from featcal.suite.schema import Suite
from featcal.system.environment import machine_facts
from featcal.system.errors import InputError
from featcal.system.formatting import did_you_mean
from featcal.system.versions import all_versions


def merge_to_folder(
    suite: Suite | Family,
    method: str | None,
    scale: float | None,
    out: str | Path,
    *,
    max_memory: int | None = None,
    device: str = "cpu",
) -> dict[str, Any]:
    """Merge the experts of a suite and write the result; everything outside the tower is the base's.

    Args:
        method: a name such as "ties:density=0.3". If the suite's own recipe has this method, its options are the
            defaults; None means the suite's recipe.
        max_memory: bytes of resident memory; a model that does not fit is written and verified by blocks. None means
            the machine's free memory.
        device: "cpu" or "cuda", where tensors are merged, independent of the family's device; the last bits differ
            between the two.

    Returns:
        The document of `featcal merge --json`.

    Raises:
        InputError: unknown method, an option that the method does not have, an expert that does not descend from the
            base, or an output that cannot be written.
        UncheckedError: it is written, but could not be verified.
    """
    family = ensure_family(suite, "cpu")
    recipe = recipe_for(family.suite, method, **({} if scale is None else {"scale": scale}))
    return write_merge(family, recipe, out, max_memory, device)


def write_merge(
    family: Family, recipe: MergeRecipe, out: str | Path, max_memory: int | None = None, device: str = "cpu"
) -> dict[str, Any]:
    """Write a merge by a recipe with all its options; document and errors are those of `merge_to_folder`."""
    place = compute_for(device).device
    require_float64(place, f"a merge by {recipe.method}")
    merged = replace(family.merge(recipe), device=place)
    settings = recipe.model_dump()
    if hasattr(merged.merger, "scale"):
        settings.setdefault("scale", merged.merger.scale)
    licences = read_licences(family)
    notes = [*recipe.notes, *check_lineage(family), *note_left_out(family).values(), *licence_conflicts(licences)]
    record = {
        "command": "merge",
        "suite": family.suite.name,
        "suite_file": suite_facts(family.suite),
        **settings,
        "recipe": recipe.model_dump(mode="json"),
        "inputs": input_hashes(family),
        "licences": licences,
        "versions": all_versions(),
        "machine": machine_facts(merged.device),
        "notes": notes,
    }
    with OutputFolder(out) as folder:
        card = model_card(_with_recipe(family, recipe), record, _account(family.suite, recipe, settings))
        content = write_model(
            folder,
            family.adapter,
            family.origin,
            merged,
            lambda: record,
            card,
            whole=can_reload(merged.info, max_memory),
        )
    return require_checked({"out": str(folder.out), **content})


def _with_recipe(family: Family, recipe: MergeRecipe) -> Family:
    """Return the family whose suite has this recipe, for the card."""
    return replace(family, suite=family.suite.model_copy(update={"merged": recipe}))


def _account(suite: Suite, recipe: MergeRecipe, settings: Mapping[str, Any]) -> CardProvenance:
    """Return the description of a merge for its card."""

    def command(word: str) -> str:
        # Options that are given per task have no place in a name; they are the suite's own.
        flags = () if recipe == suite.merged else ("--method", recipe.method_text)
        return shlex.join(["featcal", "merge", word, *flags, "--out", "merged"])

    shown = {name: value for name, value in settings.items() if not isinstance(value, Mapping)}
    return CardProvenance(f"{suite.name}, merged", "A merge of task experts.", shown, command)


def recipe_for(suite: Suite, method: str | None, **options: object) -> MergeRecipe:
    """Return the suite's own recipe if it has that method (or if that is None), with the given options changed; else a
    plain one.

    Args:
        method: its name, with or without options, such as "ties:density=0.3".
        options: more of them.

    Raises:
        InputError: unknown method, or an option that is unknown, given twice or outside its range.
    """
    own = suite.merged if isinstance(suite.merged, MergeRecipe) else None
    if method is None and own is None:
        raise InputError("--method is needed: the suite's merged model is a checkpoint, not a recipe")
    if method is not None:
        method, named_options = _read(method)
        for name in named_options.keys() & options.keys():
            raise InputError(f"{name} is given twice, in the method's name and as --{name}; leave one out")
        options |= named_options
    takes_own = own is not None and method in (None, own.method)
    start = own.model_dump() if own is not None and takes_own else {"method": method}
    try:
        return MergeRecipe.model_validate({**start, **options})
    except ValidationError as error:
        raise explain_recipe(error) from error


def _read(text: str) -> tuple[str, dict[str, object]]:
    """Return the method and the options in a name, with converted values."""
    kind = text.partition(":")[0]
    if not is_merger(kind):
        known = merger_names()
        near = did_you_mean(kind, known)
        raise InputError(f"no merge method '{kind}'; there are {', '.join(known)}.{near} {INSTALLED}")
    alone = [one for one in options_of_class(method(kind)) if one.default is not None]  # others are given per task
    return kind, read_options(model_name(text), {one.name: type_of(one) for one in alone} | {DTYPE: str})

"""Open a merged model whatever files are beside its weights: compare the files, and read the weights with the base's
configuration, or with the first expert's if the base is not known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from featcal.family.opening import Family, open_family, open_model
from featcal.formats.locate import locate
from featcal.formats.located_model import Located
from featcal.formats.weights import FirstRows
from featcal.preflight.beside_weights import FileDifference, Side, Trio, repair_command
from featcal.preflight.check import Preflight, check_suite
from featcal.suite.recipe import MergeRecipe
from featcal.suite.schema import Suite, expert_role
from featcal.system.errors import InputError

_OWN = ("architectures", "quantization_config")
"""Options that describe the weights, and so stay the merged model's own."""


@dataclass(frozen=True)
class OpenMerge:
    """A family with a merged model whose files may differ from its base's."""

    family: Family
    differences: tuple[FileDifference, ...]
    """All differences between the files of the merged model and the base's, weights aside."""
    folder: Path
    """Folder of the merged model's files."""
    copy: str
    """Command that copies the base's files over faulty ones; "" if there are none."""


def check_parents(suite: Suite) -> Preflight:
    """Find all problems of a suite except those of its merged model, which is under diagnosis."""
    return check_suite(_without_merged(suite), probe=False)


def open_merge(suite: Suite, device: str) -> OpenMerge:
    """Open a suite whose merged model is a reference.

    Raises:
        InputError: models that do not fit together; for the merged model, whatever its files say, tensors of other
            names or shapes than the base's, preceded by the faults of the files beside them.
    """
    stand_in = _without_merged(suite)
    family = open_family(stand_in, device)
    located = {task: locate(one.expert, suite.root, expert_role(task)) for task, one in suite.tasks.items()}
    first = next(iter(located))
    others = [task for task in located if family.is_base_known or task != first]
    found = locate(str(suite.merged), suite.root, "merged")
    adapter = family.adapter
    trio = Trio(
        adapter,
        Side("the base" if family.is_base_known else f"expert '{first}'", family.origin, family.base.info),
        Side("the merged model", found, found.open(adapter.canonical, adapter.aliases).info),
        [Side(f"expert '{task}'", located[task], family.experts[task].info) for task in others],
    )
    differences = trio.compare()
    as_base = replace(found, config=_base_settings(family.origin, found.config))
    try:
        merged = open_model(as_base, adapter, family.compute.device, stand_in)
    except InputError as error:
        faults = [f"merged: {one.sentence}" for one in differences if one.is_fault]
        raise InputError(*faults, *error.problems) from error
    container = family.origin if isinstance(merged, FirstRows) else found
    whole = replace(family, suite=suite, merged=merged, container=container)
    copy = repair_command(differences, family.origin.folder, found.folder)
    return OpenMerge(whole, differences, found.folder, copy)


def _without_merged(suite: Suite) -> Suite:
    """Return the suite with its merge replaced by one that can always be made; if the base is not known, one that
    starts with the first expert, whose files are then the reference.
    """
    first = next(iter(suite.tasks.values())).expert
    stand_in = first if suite.base is None else MergeRecipe(method="simple-averaging")
    return suite.model_copy(update={"merged": stand_in})


def _base_settings(base: Located, config: Mapping[str, Any]) -> dict[str, Any]:
    return {**base.config, **{name: config[name] for name in _OWN if name in config}}

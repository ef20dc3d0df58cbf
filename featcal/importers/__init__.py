"""Suites out of the recipes of other tools: mergekit's configurations and FusionBench's model pools."""

from __future__ import annotations

from pathlib import Path

from featcal.errors import InputError
from featcal.importers import fusion_bench, mergekit
from featcal.importers.common import Imported, read_recipe

__all__ = ["Imported", "import_recipe"]


def import_recipe(file: Path, merged: str | None = None) -> Imported:
    """The suite that another tool's recipe describes; whose recipe it is shows in its keys.

    Args:
        file: YAML configuration of mergekit, or YAML model pool of FusionBench.
        merged: folder or Hub id of the model that the tool made; None writes the merge as a recipe of featcal.

    Raises:
        InputError: neither tool's file, or one that cannot be taken over; every reason is listed.
    """
    content = read_recipe(file)
    if "merge_method" in content:
        return mergekit.import_mergekit(file, merged)
    if fusion_bench.is_model_pool(content):
        return fusion_bench.import_fusion_bench(file, merged)
    raise InputError(
        f"{file}: neither a configuration of mergekit, which has 'merge_method', nor a model pool of FusionBench, "
        f"which has '_target_: fusion_bench.modelpool.…' and 'models'; this has {', '.join(map(str, content))}"
    )

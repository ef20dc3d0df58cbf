"""Convert the recipes of other tools, mergekit's configurations and FusionBench's model pools, into suites, and
back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from featcal.authoring.common import Imported, comments, read_recipe, start_folders, write_new_file
from featcal.suite.schema import Suite
from featcal.system.errors import InputError

__all__ = ["Imported", "export_pool_to_file", "import_recipe", "import_to_file"]


def import_recipe(file: Path, merged: str | None = None, start: Path | None = None) -> Imported:
    """Convert another tool's recipe into a suite; its keys show which tool it belongs to.

    Args:
        file: YAML configuration of mergekit, or YAML model pool of FusionBench.
        merged: folder or Hub id of the tool's merged model; None writes the merge as a recipe of featcal.
        start: folder that relative paths start from; None searches them (`start_folders`).

    Raises:
        InputError: neither tool's file, or one that cannot be converted; every reason is listed.
    """
    from featcal.authoring.from_fusion_bench import import_fusion_bench, is_model_pool
    from featcal.authoring.from_mergekit import import_mergekit, is_configuration

    content, starts = read_recipe(file), start_folders(file.parent) if start is None else [start]
    if is_configuration(content):
        return import_mergekit(file, merged, starts)
    if is_model_pool(content):
        return import_fusion_bench(file, merged, starts)
    raise InputError(
        f"{file}: neither a configuration of mergekit, which has 'merge_method', nor a model pool of FusionBench, "
        f"which has '_target_: fusion_bench.modelpool.…'; this has {', '.join(map(str, content)) or 'nothing'}"
    )


def import_to_file(file: Path, merged: str | None, out: Path) -> dict[str, Any]:
    """Write the suite of another tool's recipe; the top of the file lists what must be filled in.

    Returns:
        The document of `featcal suite import --json`: `out`, `missing` and `notes`.

    Raises:
        InputError: neither tool's file, one that cannot be converted, or `out` exists or cannot be written.
    """
    import yaml

    imported = import_recipe(file, merged)
    head = comments({"To be filled in:": imported.missing, "Not quite the recipe:": imported.notes})
    write_new_file(out, head + yaml.safe_dump(imported.suite, sort_keys=False, allow_unicode=True, width=120))
    return {"out": str(out), "missing": list(imported.missing), "notes": list(imported.notes)}


def export_pool_to_file(suite: Suite, out: Path) -> dict[str, Any]:
    """Write a suite's models as a model pool of FusionBench.

    Returns:
        The document of `featcal suite export-pool --json`: `out` and the names of its `models`.

    Raises:
        InputError: FusionBench does not load such models, or `out` exists or cannot be written.
    """
    import yaml

    from featcal.authoring.to_fusion_bench import export_fusion_bench

    pool = export_fusion_bench(suite)
    write_new_file(out, yaml.safe_dump(pool, sort_keys=False, allow_unicode=True, width=120))
    return {"out": str(out), "models": list(pool["models"])}

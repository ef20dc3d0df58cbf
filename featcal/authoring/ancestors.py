"""Find the common ancestor of some models, by the names in their cards and configurations.

A card names `base_model`, an adapter `base_model_name_or_path`, a configuration `_name_or_path`; the models that these
name have cards too, and so on up.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from featcal.formats.card_data import read_card_data
from featcal.formats.checkpoint import local_folder
from featcal.formats.hub import HubModel, hub_model, look_up, snapshot
from featcal.formats.hub_errors import Unreachable
from featcal.formats.lora import split_lora
from featcal.formats.open_clip_config import PREFIXES
from featcal.formats.peft import CONFIG_FILE as ADAPTER_CONFIG
from featcal.system.errors import InputError
from featcal.system.json_files import read_json
from featcal.system.paths import local_path
from featcal.system.sandbox import server_rules

MOST_STEPS = 8
"""Most generations to follow; published models have up to five."""


def find_common_ancestors(models: Sequence[str], asks_hub: bool) -> list[str]:
    """Return the common ancestors of some models, nearest first; a model is no ancestor of itself.

    Args:
        models: references, as `authoring.common.model_reference` gives them.
        asks_hub: whether to ask the Hub for cards that are not in its local cache; weights are never fetched.
    """
    lines = [_walk_up(one, asks_hub) for one in models]
    shared = set.intersection(*(set(line) for line in lines)) if lines else set()
    nearest = sorted(shared, key=lambda name: sum(line[name][0] for line in lines))
    return [lines[0][name][1] for name in nearest]


def is_named_by_all(model: str, others: Iterable[str], asks_hub: bool) -> bool:
    """Say whether all other models descend from a model."""
    return all(_name(model) in _walk_up(one, asks_hub) for one in others)


def is_reachable(model: str, asks_hub: bool) -> bool:
    """Say whether a model's files are on this machine or public on the Hub."""
    if find_folder(model, Path.cwd()) is not None:
        return True
    on_hub = hub_model(model)
    if not asks_hub or on_hub is None:
        return False
    try:
        info = _ask_for_info(on_hub)
        if info.gated:
            look_up(model, "model", lambda api: api.auth_check(on_hub.repo))
    except (InputError, Unreachable):
        return False
    return True


def _walk_up(model: str, asks_hub: bool) -> Mapping[str, tuple[int, str]]:
    """Return every ancestor of a model by its name, with the number of generations between them and its reference."""
    found: dict[str, tuple[int, str]] = {}
    level = [model]
    for step in range(1, MOST_STEPS + 1):
        above = [parent for one in level for parent in _parents(one, asks_hub)]
        level = [one for one in dict.fromkeys(above) if _name(one) not in {_name(model), *found}]
        found |= {_name(one): (step, one) for one in reversed(level)}
    return found


def _name(model: str) -> str:
    """Return a key that is equal for references to the same model: a folder, or a repository in any revision."""
    on_hub = None if local_path(model, Path.cwd(), "model").is_dir() else hub_model(model)
    return model if on_hub is None else f"{on_hub.repo}/{on_hub.folder}".lower()


def _parents(model: str, asks_hub: bool) -> Iterator[str]:
    """Yield the models from which a model was made, as its own files or the Hub name them."""
    under, adapter = split_lora(model, Path.cwd())
    if adapter is not None:
        yield under
        return
    folder, on_hub = find_folder(model, Path.cwd()), hub_model(model)
    if folder is not None:
        stated = [
            read_card_data(folder).get("base_model"),
            _read(folder / ADAPTER_CONFIG).get("base_model_name_or_path"),
            _read(folder / "config.json").get("_name_or_path"),
        ]
    elif asks_hub and on_hub is not None:
        stated = [_ask_for_card(on_hub).get("base_model")]
    else:
        stated = []
    for one in stated:
        for parent in one if isinstance(one, list) else [one]:
            with suppress(InputError):  # a text of another kind, which is no reference
                if isinstance(parent, str) and (found := _find_reference(parent, folder)):
                    yield found


def _find_reference(named: str, beside: Path | None) -> str:
    """Return the reference of a model that a file names: a folder as an absolute path, else an id of the Hub; "" for
    neither.

    Args:
        beside: folder of the file. The file does not say where its relative paths start, so the nearest match counts.
    """
    nearest = [] if beside is None or server_rules() else [beside, *beside.absolute().parents, Path.cwd()]
    folders = (local_path(named, start, "model") for start in nearest)
    # A folder that merely has the name is none of a model.
    found = next((str(folder.resolve()) for folder in folders if (folder / "config.json").is_file()), None)
    return found or (named if hub_model(named) is not None else "")


def find_folder(model: str, root: Path) -> Path | None:
    """Return the folder of a model on this machine or in the Hub's local cache; None if it is elsewhere.

    Args:
        root: folder from which relative references start.
    """
    if model.startswith(PREFIXES):
        return None
    if (root / model).is_dir():
        return local_folder(model, root, "model")
    on_hub = hub_model(model)
    if on_hub is None:
        return None
    try:
        found = snapshot(on_hub, local_files_only=True)
    except (OSError, ValueError):
        return None
    return found if found.is_dir() else None


def _ask_for_info(model: HubModel) -> Any:
    return look_up(model.ref, "model", lambda api: api.model_info(model.repo, revision=model.revision))


def _ask_for_card(model: HubModel) -> Mapping[str, Any]:
    """Return the front matter of a card on the Hub; {} if there is none, or the Hub does not answer."""
    try:
        card = _ask_for_info(model).card_data
    except (InputError, Unreachable):
        return {}
    return {} if card is None else card.to_dict()


def _read(file: Path) -> dict[str, Any]:
    """Return the content of a JSON file; {} if it cannot be read."""
    try:
        return read_json(file) if file.is_file() else {}
    except InputError:
        return {}

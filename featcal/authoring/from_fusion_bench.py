"""Read FusionBench's model pools as suites.

A pool names models and data sets by the Python functions that load them. featcal never calls these; it maps known ones
to its own references and sources.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from featcal.authoring.common import Imported, model_reference, read_recipe, samples_missing
from featcal.suite.schema import task_catalogue
from featcal.system.errors import InputError
from featcal.system.formatting import did_you_mean

POOLS = {"CLIPVisionModelPool": "pixels", "Seq2SeqLMPool": "seq2seq", "CausalLMPool": "causal"}
"""Pool → modality of its models."""
ARGUMENTS: dict[str, tuple[str, str | None]] = {
    "from_pretrained": ("pretrained_model_name_or_path", None),
    "load_fft_vision_model_hf": ("model_name", None),
    "load_lora_vision_model_hf": ("base_model_name", "peft_name"),
    "load_lora_model": ("base_model_path", "peft_model_path"),
}
"""Function that loads a model → its arguments for the model and for a LoRA adapter."""
_SAME_WEIGHTS = {"_target_", "_recursive_", "torch_dtype", "dtype", "device_map", "merge_and_unload"}
"""Arguments of these functions that do not change the loaded weights."""
DATA = {"calibration": "train_datasets", "validation": "val_datasets", "test": "test_datasets"}
_DEFAULT_SPLIT = {"calibration": "train", "validation": "validation", "test": "test"}
LOAD_DATASET = "datasets.load_dataset"
_KEYS = ("_target_", "defaults", "models", "processor", "tokenizer", "model_kwargs", *DATA.values())
BASE = "_pretrained_"
_MERGE = {"method": "task-arithmetic", "scale": 0.3}


def is_model_pool(content: Mapping[str, Any]) -> bool:
    """Say whether the content of a file looks like a model pool."""
    return str(content.get("_target_")).startswith("fusion_bench.") or "defaults" in content


def import_fusion_bench(file: Path, merged: str | None, starts: Sequence[Path]) -> Imported:
    """Convert a model pool into a suite: its models, and samples if they are data sets on the Hub or in the catalogue.

    Args:
        merged: folder or Hub id of the merged model; None is Task Arithmetic, since a pool has no merge recipe.
        starts: folders that relative paths may start from.

    Raises:
        InputError: lists all problems: values that only Hydra can fill in, another kind of pool, unknown keys, models
            that are loaded by unknown functions.
    """
    content = read_recipe(file)
    # Keys of a file that Hydra has not filled in yet would look unknown: one remedy at a time.
    problems = list(_list_unresolved(content)) or list(_list_unknown(content))
    models: dict[str, str] = {}
    for name, value in _mapping(content.get("models")).items():
        try:
            models[name] = _model(value, f"models.{name}", starts)
        except InputError as error:
            problems += error.problems
    tasks: dict[str, dict[str, Any]] = {name: {"expert": models[name]} for name in models if not _special(name)}
    if not tasks and not problems:
        problems.append("models: no expert is named; give every expert under the name of its task")
    if problems:
        raise InputError(*(f"{file}: {problem}" for problem in dict.fromkeys(problems)))
    pool = content["_target_"].rpartition(".")[2]
    text = POOLS[pool] != "pixels"
    notes = [*_add_samples(tasks, content, text), *_notes(content)]
    missing = [] if BASE in models else [f"base: the model that the experts were fine-tuned from; no {BASE} is named"]
    missing += samples_missing(name for name, task in tasks.items() if not {"calibration", "use"} & set(task))
    if text and (plain := [name for name, task in tasks.items() if set(DATA) & set(task)]):
        missing.append(f"text of {', '.join(plain)}: 'input' and 'target' of each source, templates over its columns")
    if merged is None:
        notes.append("a pool has no merge recipe: merged is Task Arithmetic with scale 0.3; change it if necessary")
    suite: dict[str, Any] = {"name": file.stem, "description": f"Imported from {file.name} (FusionBench, {pool})."}
    suite |= {"base": models[BASE]} if BASE in models else {}
    suite["merged"] = model_reference(merged, None, starts) if merged else {**_MERGE}
    return Imported({**suite, "tasks": tasks}, tuple(missing), tuple(notes))


def _list_unresolved(content: Mapping[str, Any]) -> Iterator[str]:
    """List the entries that only Hydra can fill in: groups of other files, variables, and missing values."""
    write_out = "let Hydra write the whole pool (`fusion_bench modelpool=… --cfg job --package modelpool --resolve`)"
    groups = [one for one in content.get("defaults") or [] if one != "_self_"]
    if groups:
        named = [
            f"{group}: {', '.join(choice) if isinstance(choice, list) else choice}"
            for one in groups
            for group, choice in (one if isinstance(one, dict) else {"defaults": one}).items()
        ]
        yield f"'defaults' refer to other files ({'; '.join(named)}); {write_out}"
    open_places = [f"{place} is {value!r}" for place, value in _strings(content) if "${" in value or value == "???"]
    if open_places:
        yield f"values are still to be filled in ({'; '.join(open_places)}); {write_out}"


def _strings(value: Any, place: str = "") -> Iterator[tuple[str, str]]:
    """Yield every string below `value` with its place, except notes for readers."""
    if isinstance(value, str):
        yield place, value
    elif isinstance(value, dict):
        for key, one in value.items():
            if key != "_usage_":
                yield from _strings(one, f"{place}.{key}".removeprefix("."))
    elif isinstance(value, list):
        for i, one in enumerate(value):
            yield from _strings(one, f"{place}[{i}]")


def _list_unknown(content: Mapping[str, Any]) -> Iterator[str]:
    target = str(content.get("_target_"))
    if not target.startswith("fusion_bench.") or target.rpartition(".")[2] not in POOLS:
        yield f"_target_: '{target}' is not a pool that featcal knows; it knows {', '.join(POOLS)}"
    for key, value in content.items():
        if key in ("models", *DATA.values()) and not isinstance(value, dict | None):
            yield f"{key}: must be a mapping from names"
        elif key not in _KEYS and isinstance(value, dict | list):  # single values are variables of Hydra's
            yield f"{key}: unknown key.{did_you_mean(str(key), _KEYS)}"


def _model(value: Any, where: str, starts: Sequence[Path]) -> str:
    """Return a model as a suite's reference; InputError for a function or arguments that featcal does not know."""
    if isinstance(value, str):
        return model_reference(value, None, starts)
    arguments = dict(_mapping(value))
    target = str(arguments.get("_target_", "from_pretrained"))
    model, adapter = ARGUMENTS.get(target.rpartition(".")[2], (None, None))
    if model is None:
        known = ", ".join(ARGUMENTS)
        raise InputError(f"{where}: '{target}' is not called by featcal, which has a replacement only for {known}")
    used = {model, adapter, *(["revision", "subfolder"] if adapter is None else []), *_SAME_WEIGHTS}
    unknown = [f"'{name}'" for name in arguments if name not in used]
    if unknown:
        raise InputError(f"{where}: {', '.join(unknown)} may change which weights are loaded; give a plain reference")
    lacking = [name for name in (model, adapter) if name is not None and not isinstance(arguments.get(name), str)]
    if lacking:
        raise InputError(f"{where}: {' and '.join(lacking)} is missing")
    path = "/".join(str(one) for one in (arguments[model], arguments.get("subfolder")) if one)
    found = model_reference(path, arguments.get("revision"), starts)
    return found if adapter is None else f"{found}+{model_reference(arguments[adapter], None, starts)}"


def _add_samples(tasks: dict[str, dict[str, Any]], content: Mapping[str, Any], text: bool) -> list[str]:
    """Set the sources of the tasks, from the pool or else from the catalogue; return notes about them."""
    notes = []
    for split, key in DATA.items():
        for name, value in (content.get(key) or {}).items():
            source = _source(value, _DEFAULT_SPLIT[split])
            if name in tasks and source is not None:
                tasks[name][split] = source
            else:
                why = f"'{LOAD_DATASET}' alone is known" if name in tasks else "no expert has this name"
                notes.append(f"{key}.{name} is not taken over: {why}")
    known = [name for name in tasks if _is_in_catalogue(name, text)]
    for name in known:  # a pool says enough to read pictures; for text it lacks the templates
        own = tasks[name] if not text else {"expert": tasks[name]["expert"]}
        tasks[name] = {"use": name, **own}
    if known:
        notes.append(f"what the pool leaves open for {', '.join(known)} was taken from featcal's own task catalogue")
    return notes


def _is_in_catalogue(name: str, text: bool) -> bool:
    entry = task_catalogue().get(name)
    return entry is not None and ("input" in entry["calibration"]) == text


def _source(value: Any, split: str) -> dict[str, str] | None:
    """Return a data set as a suite's source; None for an unknown function or further options."""
    if isinstance(value, str):
        return {"hub": value, "split": split}
    arguments = {name: one for name, one in _mapping(value).items() if one is not None}
    positional = arguments.pop("_args_", [])
    leading = dict(zip(("path", "name")[: len(positional)], positional[:2], strict=True))
    arguments = {"split": split, **leading, **arguments}
    names = {"path": "hub", "name": "config", "split": "split", "revision": "revision"}
    unknown = set(arguments) - {*names, "_target_", "_recursive_", "trust_remote_code"} or positional[2:]
    if arguments.get("_target_") != LOAD_DATASET or unknown or "path" not in arguments:
        return None
    return {ours: str(arguments[theirs]) for theirs, ours in names.items() if theirs in arguments}


def _notes(content: Mapping[str, Any]) -> Iterator[str]:
    models = _mapping(content.get("models"))
    for key in ("processor", "tokenizer"):
        given = content.get(key)
        named = given if isinstance(given, str) else _mapping(given).get("pretrained_model_name_or_path")
        base = models.get(BASE)
        base = base if isinstance(base, str) else _mapping(base).get("pretrained_model_name_or_path")
        if named is not None and named != base:
            yield f"{key}: {named} is not taken over: featcal reads samples with the base's own"
    if content.get("model_kwargs"):
        yield "model_kwargs is not taken over: featcal reads models in the dtype they are stored in"
    for name in models:
        if _special(name) and name != BASE:
            yield f"models.{name} is not taken over: it is neither the base nor an expert"


def _special(name: str) -> bool:
    return name.startswith("_") and name.endswith("_")


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}

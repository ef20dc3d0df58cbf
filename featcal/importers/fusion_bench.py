"""FusionBench's model pools as suites, and suites as model pools.

A pool names models and data sets by the Python functions that load them. None of these is ever called: those that are
known are mapped to featcal's own references and sources.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from featcal.errors import InputError
from featcal.importers.common import Imported, read_recipe, reference, samples_missing
from featcal.models.lora import split_lora
from featcal.suite import Suite, did_you_mean

_POOLS = {
    "CLIPVisionModelPool": ("pixels", "transformers.CLIPVisionModel.from_pretrained"),
    "Seq2SeqLMPool": ("seq2seq", "transformers.AutoModelForSeq2SeqLM.from_pretrained"),
    "CausalLMPool": ("causal", "transformers.AutoModelForCausalLM.from_pretrained"),
}
"""Pool → modality of its models, and how it loads them."""
_LOADERS = {
    "from_pretrained": ("pretrained_model_name_or_path", None),
    "load_fft_vision_model_hf": ("model_name", None),
    "load_lora_vision_model_hf": ("base_model_name", "peft_name"),
    "load_lora_model": ("base_model_path", "peft_model_path"),
}
"""Function that loads a model → its arguments for the model and for a LoRA adapter."""
_LORA_TARGETS = {
    "pixels": "fusion_bench.models.linearized.vision_model.load_lora_vision_model_hf",
    "seq2seq": "fusion_bench.modelpool.seq2seq_lm.modelpool.load_lora_model",
}
_HARMLESS = {"_target_", "_recursive_", "torch_dtype", "dtype", "merge_and_unload", "trust_remote_code", "revision"}
"""Arguments that do not change which weights or samples are meant, or that a reference has room for."""
_SPLITS = {"calibration": "train", "validation": "validation", "test": "test"}
_DATASETS = {"calibration": "train_datasets", "validation": "val_datasets", "test": "test_datasets"}
_LOAD_DATASET = "datasets.load_dataset"
_KEYS = ("models", "processor", "tokenizer", "model_kwargs", "platform", *_DATASETS.values())
_BASE = "_pretrained_"


def is_model_pool(content: Mapping[str, Any]) -> bool:
    """Whether the content of a file is meant to be a model pool."""
    target = str(content.get("_target_", ""))
    return target.startswith("fusion_bench.") or ("defaults" in content and not content.get("merge_method"))


def import_fusion_bench(file: Path, merged: str | None = None) -> Imported:
    """The suite of a model pool: its models, and samples where it names data sets on the Hub.

    Args:
        merged: folder or Hub id of the merged model; None is Task Arithmetic, since a pool says nothing of merging.

    Raises:
        InputError: listing all that is wrong or cannot be taken over: another pool, groups and variables that only
            Hydra can fill in, unknown keys, models loaded by unknown functions.
    """
    content = read_recipe(file)
    _check_written_out(content, file)
    pool = str(content.get("_target_")).rpartition(".")[2]
    problems = list(_unknown(content, pool))
    models, notes = content.get("models"), list(_notes(content, merged))
    references: dict[str, str] = {}
    for name, value in (models if isinstance(models, dict) else {}).items():
        try:
            references[name] = _model_reference(value, f"models.{name}", file.parent)
        except InputError as error:
            problems += error.problems
    tasks = {name: {"expert": ref} for name, ref in references.items() if not _is_special(name)}
    if not tasks and not problems:
        problems.append(f"models: no expert besides {_BASE}")
    if problems:
        raise InputError(*(f"{file}: {problem}" for problem in problems))
    incomplete = []
    for split, key in _DATASETS.items():
        for name, value in (content.get(key) or {}).items():
            source = _source(value, _SPLITS[split])
            if name not in tasks or source is None:
                why = "no expert has its name" if name not in tasks else "only datasets.load_dataset is known"
                notes.append(f"{key}.{name} is left out: {why}")
            else:
                tasks[name][split] = source
                incomplete.append(name)
    missing = [] if _BASE in references else [f"base: the model that the experts come from; models has no {_BASE}"]
    missing += samples_missing(name for name, task in tasks.items() if "calibration" not in task)
    if incomplete and _POOLS[pool][0] != "pixels":
        names = ", ".join(dict.fromkeys(incomplete))
        missing.append(f"text of {names}: add to each source the templates 'input' and 'target' over its columns")
    suite = {
        "name": file.stem,
        "description": f"Imported from {file.name} (FusionBench, {pool}).",
        **({"base": references[_BASE]} if _BASE in references else {}),
        "merged": {"method": "task-arithmetic", "scale": 0.3} if merged is None else reference(merged, None, file.parent),
        "tasks": tasks,
    }
    return Imported(suite, tuple(missing), tuple(notes))


def export_fusion_bench(suite: Suite) -> dict[str, Any]:
    """A model pool with the base and the experts of a suite, and with those of its samples that are on the Hub.

    How the merged model came about, class names and templates have no place in a pool.

    Raises:
        InputError: the base cannot be found, or a model is one that FusionBench does not load.
    """
    from featcal.models.adapter import architecture_for
    from featcal.models.locate import locate

    modality = architecture_for(locate(suite.base, suite.root, "base").config, "base").modality
    pool = next(name for name, (takes, _) in _POOLS.items() if takes == modality)
    models = {_BASE: suite.base, **{name: task.expert for name, task in suite.tasks.items()}}
    content: dict[str, Any] = {
        "_target_": f"fusion_bench.modelpool.{pool}",
        "_recursive_": False,
        "models": {name: _loaded(ref, name, suite.root, *_POOLS[pool]) for name, ref in models.items()},
        "processor" if modality == "pixels" else "tokenizer": _parts(suite.base, suite.root)[0],
    }
    for split, key in _DATASETS.items():
        sources = {name: task.source(split) for name, task in suite.tasks.items()}
        hub = {name: source for name, source in sources.items() if source is not None and source.hub is not None}
        given = {
            name: {"path": source.hub, "name": source.config, "split": source.split, "revision": source.revision}
            for name, source in hub.items()
        }
        content[key] = {
            name: {"_target_": _LOAD_DATASET, **{k: v for k, v in arguments.items() if v is not None}}
            for name, arguments in given.items()
        } or None
    return content

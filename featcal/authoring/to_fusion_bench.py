"""Export suites as FusionBench's model pools, to run its methods and tables on the same models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from featcal.authoring.from_fusion_bench import ARGUMENTS, BASE, DATA, LOAD_DATASET, POOLS
from featcal.formats.hub import hub_model
from featcal.formats.locate import locate
from featcal.formats.lora import split_lora
from featcal.formats.open_clip_config import PREFIXES
from featcal.models.families.registry import architecture_for
from featcal.suite.schema import Suite
from featcal.system.errors import InputError
from featcal.system.paths import local_path

_LOADERS = {
    "pixels": "transformers.CLIPVisionModel.from_pretrained",
    "seq2seq": "transformers.AutoModelForSeq2SeqLM.from_pretrained",
    "causal": "transformers.AutoModelForCausalLM.from_pretrained",
}
_LORA_LOADERS = {
    "pixels": "fusion_bench.models.linearized.vision_model.load_lora_vision_model_hf",
    "seq2seq": "fusion_bench.modelpool.seq2seq_lm.modelpool.load_lora_model",
}


def export_fusion_bench(suite: Suite) -> dict[str, Any]:
    """Return a model pool with the base and the experts of a suite, and with those of its samples that are on the Hub.

    A pool cannot hold the merge recipe, class names and text templates.

    Raises:
        InputError: the base cannot be found, or FusionBench does not load such models.
    """
    if suite.base is None:
        raise InputError("the base is not known, and a pool needs one; name it in the suite file ('base: REFERENCE')")
    models = {BASE: suite.base, **{name: task.expert for name, task in suite.tasks.items()}}
    foreign = [name for name, ref in models.items() if ref.startswith(PREFIXES)]
    if foreign:
        raise InputError(*(f"model '{name}': export it to transformers' layout for a pool" for name in foreign))
    sources = [source for task in suite.tasks.values() for source in map(task.source, DATA) if source is not None]
    classifies = any(source.has_classes for source in sources)
    architecture = architecture_for(locate(suite.base, suite.root, "base").config, "base", classifies)
    modality = architecture.modality
    if modality not in _LOADERS or (modality == "pixels" and architecture.family != "clip"):
        heads = " with a classifier per task" if modality == "text" else ""
        raise InputError(f"FusionBench has no known pool for models of type '{architecture.family}'{heads}")
    pool = next(pool for pool, takes in POOLS.items() if takes == modality)
    loaded = {name: _model(ref, modality, suite.root, f"model '{name}'") for name, ref in models.items()}
    return {
        "_target_": f"fusion_bench.modelpool.{pool}",
        "_recursive_": False,
        "models": loaded,
        **_tokenizer(loaded[BASE], modality),
        **{key: _data_sets(suite, split) for split, key in DATA.items()},
    }


def _model(ref: str, modality: str, root: Path, label: str) -> str | dict[str, Any]:
    """Return the entry by which FusionBench loads a model: a folder or Hub id if the pool takes one, or a function with
    its arguments."""
    under, adapter = split_lora(ref, root)
    path, within = _place(under, root)
    if adapter is None:
        if not within and modality != "seq2seq":
            return path
        return {"_target_": _LOADERS[modality], "pretrained_model_name_or_path": path, **within}
    adapter_path, within_adapter = _place(adapter, root)
    target = _LORA_LOADERS.get(modality)
    if target is None or within or within_adapter:
        raise InputError(
            f"{label}: a pool of FusionBench cannot name '{ref}'; write base and adapter as one model first"
        )
    model_key, adapter_key = ARGUMENTS[target.rpartition(".")[2]]
    return {"_target_": target, model_key: path, str(adapter_key): adapter_path}


def _tokenizer(base: str | dict[str, Any], modality: str) -> dict[str, Any]:
    """Return the pool's entry for the base's tokenizer or processor; pools of encoder-decoders need it."""
    if modality == "seq2seq" and not isinstance(base, str):
        return {"tokenizer": {**base, "_target_": "transformers.AutoTokenizer.from_pretrained"}}
    return {"processor" if modality == "pixels" else "tokenizer": base} if isinstance(base, str) else {}


def _place(ref: str, root: Path) -> tuple[str, dict[str, str]]:
    """Return an absolute folder, or a repository on the Hub with the reference's revision and inner folder."""
    folder = local_path(ref, root, "model")
    if folder.is_dir():
        return str(folder.resolve()), {}
    model = hub_model(ref)
    if model is None:
        return ref, {}
    return model.repo, {name: one for name, one in (("revision", model.revision), ("subfolder", model.folder)) if one}


def _data_sets(suite: Suite, split: str) -> dict[str, Any] | None:
    found = {}
    for name, task in suite.tasks.items():
        source = task.source(split)
        if source is not None and source.hub is not None:
            arguments = {"path": source.hub, "name": source.config, "split": source.split, "revision": source.revision}
            given = {key: value for key, value in arguments.items() if value is not None}
            found[name] = {"_target_": LOAD_DATASET, **given}
    return found or None

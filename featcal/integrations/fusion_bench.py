"""Calibrate inside FusionBench: a method that calibrates what another method of FusionBench merged.

`fusion_bench 'hydra.searchpath=[pkg://featcal.integrations.configs]' method=featcal` runs it.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from transformers.models.clip import modeling_clip

if not hasattr(modeling_clip, "CLIPVisionTransformer"):  # which FusionBench's task pools for CLIP import
    modeling_clip.CLIPVisionTransformer = modeling_clip.CLIPVisionModel

from fusion_bench.method import BaseAlgorithm
from fusion_bench.mixins import auto_register_config
from fusion_bench.modelpool import BaseModelPool
from fusion_bench.tasks.clip_classification import get_classnames_and_templates
from fusion_bench.utils import instantiate
from omegaconf import OmegaConf

import featcal

SPLITS = ("train", "val", "test")


@auto_register_config
class FeatureCalibration(BaseAlgorithm):  # type: ignore[misc]  # FusionBench is a guest, whose types are not known here
    """Calibrate the model that a merger made of a model pool, on the pool's own data sets.

    Args:
        merger: configuration of a method of FusionBench, or such a method; its model is what is calibrated.
        calibration: options of `featcal.CalibrationConfig`; what is left out or null is the recipe's own.
        split: data sets of the pool that calibration samples are drawn from: "train", "val" or "test".
        data: task → source, in place of the pool's data set: a path, or what a suite file says of one.
        device: "auto", "cpu", "cuda" or "mps".
    """

    result: featcal.CalibrationResult
    """The calibration of the last run: its record, and `save` for a folder with card and record."""

    def __init__(
        self,
        merger: Any,
        calibration: Mapping[str, Any] | None = None,
        split: str = "train",
        data: Mapping[str, Any] | None = None,
        device: str = "auto",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if split not in SPLITS:
            raise featcal.InputError(f"split is '{split}'; a model pool has {', '.join(SPLITS)}")
        given = {} if calibration is None else _plain(calibration)
        self.options = {name: value for name, value in given.items() if value is not None}

    def run(self, modelpool: Any) -> Any:
        """Return the calibrated model, of the class of the merged one.

        Raises:
            featcal.InputError: the merger made no model of transformers, there are no samples for a task, or an option
                means nothing to the models.
            featcal.NumericalError: the closed form has no trustworthy solution with these options.
        """
        pool = modelpool if isinstance(modelpool, BaseModelPool) else BaseModelPool(modelpool)
        # Mergers write into the models of a pool that holds them itself.
        own = deepcopy if pool.has_instance_models else _same
        prompts = bool(self.options.get("decisions")) and hasattr(pool, "load_clip_model")
        base = own(_load_base(pool, prompts)) if pool.has_pretrained else None
        experts = {name: own(pool.load_model(name)) for name in pool.model_names}
        suite = featcal.Suite.of(
            base=base,
            experts=experts,
            merged=self._merge(pool),
            samples=self._samples(pool),
            calibration=self.options,
            **_tools(pool),
            **(_prompts(pool.model_names) if prompts else {}),
        )
        self.result = featcal.calibrate(suite, device=self.device)
        return self.result.to_model()

    def _merge(self, pool: Any) -> Any:
        """Run the merger as the program runs any method, in the same surroundings."""
        merger = self.merger if isinstance(self.merger, BaseAlgorithm) else instantiate(self.merger, _recursive_=False)
        for name in ("_program", "_fabric_instance"):
            if getattr(self, name, None) is not None:
                setattr(merger, name, getattr(self, name))
        merger.on_run_start()
        merged = merger.run(pool)
        merger.on_run_end()
        return merged

    def _samples(self, pool: Any) -> dict[str, Any]:
        """Return the calibration samples of every task, as the pool loads them or as `data` says."""
        given = {} if self.data is None else _plain(self.data)
        names, load = getattr(pool, f"{self.split}_dataset_names"), getattr(pool, f"load_{self.split}_dataset")
        lacking = [name for name in pool.model_names if name not in given and name not in names]
        if lacking:
            raise featcal.InputError(
                f"model pool: {self.split}_datasets has none for {', '.join(lacking)}; name one there, or a source "
                "under data"
            )
        found = {name: given[name] if name in given else load(name) for name in pool.model_names}
        tokens = [name for name, one in found.items() if "input_ids" in getattr(one, "column_names", ())]
        if tokens:
            raise featcal.InputError(
                f"model pool: {self.split}_datasets of {', '.join(tokens)} hold token ids, and featcal reads the texts "
                "themselves; name them under data, as in {jsonl: FILE, input: '{question}'}"
            )
        return found


def _same(model: Any) -> Any:
    return model


def _plain(given: Any) -> dict[str, Any]:
    """Return a mapping of Hydra's, or a plain one, as a plain one."""
    return dict(OmegaConf.to_container(OmegaConf.create(given), resolve=True))


def _load_base(pool: Any, with_text: bool) -> Any:
    """Return the pretrained model of a pool, with its text tower if prompts are made from class names."""
    if with_text and pool.has_instance_models:
        raise featcal.InputError(
            "decisions needs the text tower of _pretrained_; name its folder or Hub id in the pool"
        )
    return pool.load_clip_model("_pretrained_") if with_text else pool.load_pretrained_model()


def _tools(pool: Any) -> dict[str, Any]:
    """Return the pool's tokenizer or processor, by the keyword of `Suite.of`."""
    if getattr(pool, "_processor", None) is not None:
        return {"processor": pool.load_processor()}
    return {"tokenizer": pool.load_tokenizer()} if getattr(pool, "_tokenizer", None) is not None else {}


def _prompts(tasks: list[str]) -> dict[str, Any]:
    """Return class names and templates of tasks as FusionBench has them, by keywords of `Suite.of`."""
    known = {task: get_classnames_and_templates(task) for task in tasks}
    return {
        "classes": {task: list(names) for task, (names, _) in known.items()},
        "task_options": {task: {"templates": [one("{}") for one in makers]} for task, (_, makers) in known.items()},
    }

"""FusionBench runs featcal as one of its methods: tiny CLIP experts, merged by FusionBench, calibrated through its
program, scored by its task pool. Numbers are those of featcal itself, bit for bit."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file
from tiny_clip import CLASSES, SIDE, TASKS, write_base, write_expert
from torch import Tensor

import featcal
from featcal.suite.calibration_options import OPTIONS

CONFIG = Path(featcal.__file__).parent / "integrations" / "configs" / "method" / "featcal.yaml"


def test_the_configuration_lists_every_option() -> None:
    """So that each can be set on the command line of Hydra, which refuses what is not there."""
    listed = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))["calibration"]
    assert listed == dict.fromkeys(OPTIONS)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with models, pictures, a suite file, and the configurations of a model pool and a task pool."""
    pytest.importorskip("fusion_bench", reason="fusion-bench is not installed")
    root = tmp_path_factory.mktemp("fusion-bench")
    base = write_base(root / "base")
    for seed, task in enumerate(TASKS):
        write_expert(root / task, base, root / "base", seed + 1, 0.3)
        for split in ("train", "test"):
            write_pictures(root / f"{task}-{split}.parquet", 2 * seed + (split == "test"))
    write_configurations(root)
    return root


def write_pictures(file: Path, seed: int) -> None:
    from datasets import ClassLabel, Dataset, Features, Image

    generator = np.random.default_rng(seed)
    pictures = [generator.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8) for _ in range(16)]
    labels = generator.integers(0, len(CLASSES), 16).tolist()
    features = Features({"image": Image(), "label": ClassLabel(names=list(CLASSES))})
    Dataset.from_dict({"image": pictures, "label": labels}, features=features).to_parquet(file)


def write_configurations(root: Path) -> None:
    def data_sets(split: str) -> dict[str, Any]:
        files = {task: str(root / f"{task}-{split}.parquet") for task in TASKS}
        return {
            task: {"_target_": "datasets.load_dataset", "path": "parquet", "data_files": file, "split": "train"}
            for task, file in files.items()
        }

    base = str(root / "base")
    models = {"_pretrained_": base, **{task: str(root / task) for task in TASKS}}
    pool = {"_target_": "fusion_bench.modelpool.CLIPVisionModelPool", "_recursive_": False, "models": models}
    pool |= {"processor": base, "train_datasets": data_sets("train")}
    tasks = {"_target_": "fusion_bench.taskpool.CLIPVisionModelTaskPool", "_recursive_": False, "clip_model": base}
    tasks |= {"processor": base, "test_datasets": data_sets("test"), "dataloader_kwargs": {"batch_size": 4}}
    for group, content in (("modelpool", pool), ("taskpool", tasks)):
        (root / "configs" / group).mkdir(parents=True)
        (root / "configs" / group / "tiny.yaml").write_text(yaml.safe_dump(content))


@pytest.fixture
def known_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tasks are known to FusionBench, as those of its own benchmarks are."""
    from fusion_bench.tasks.clip_classification import CLIPTemplateFactory

    own = {"classnames": list(CLASSES), "templates": [lambda name: f"a photo of a {name}."]}
    for task in TASKS:
        monkeypatch.setitem(CLIPTemplateFactory._dataset_mapping, task, own)


def expected(root: Path, out: Path, options: Mapping[str, Any]) -> featcal.CalibrationResult:
    """The calibration that featcal makes by itself of the same merge, from files."""
    from fusion_bench.method import TaskArithmeticAlgorithm

    TaskArithmeticAlgorithm(scaling_factor=0.3).run(read_pool(root)).save_pretrained(out / "merged")
    tasks = {
        task: {
            "expert": str(root / task),
            "calibration": {"parquet": str(root / f"{task}-train.parquet")},
            "test": {"parquet": str(root / f"{task}-test.parquet")},
            "classes": list(CLASSES),
        }
        for task in TASKS
    }
    content = {"name": "own", "base": str(root / "base"), "merged": "merged", "tasks": tasks}
    (out / "suite.yaml").write_text(yaml.safe_dump({**content, "calibration": dict(options)}))
    return featcal.calibrate(featcal.load_suite(out / "suite.yaml"), device="cpu")


def read_pool(root: Path) -> Any:
    from fusion_bench.utils import instantiate
    from omegaconf import OmegaConf

    return instantiate(OmegaConf.load(root / "configs" / "modelpool" / "tiny.yaml"), _recursive_=False)


def tensors(model: Any) -> dict[str, Tensor]:
    return {name.removeprefix("vision_model."): tensor for name, tensor in model.state_dict().items()}


CHOSEN: dict[str, dict[str, Any]] = {
    "paper": {"samples": 8},
    "refined": {"recipe": "refined", "samples": 12, "biases": False, "augment": 1, "seed": 7},
    "informed": {"recipe": "informed", "samples": 8, "lam": 0.01, "weigh_tokens": True, "blocks": ["block 1"]},
    "decisions": {"recipe": "informed", "samples": 8, "decisions": 0.7},
    "fast": {"recipe": "refined", "alpha": 0.3, "beta": 0.0, "samples": 4, "maps": ["mlp"], "precision": "fast"},
}


@pytest.mark.slow
@pytest.mark.usefixtures("known_classes")
@pytest.mark.parametrize("options", CHOSEN.values(), ids=CHOSEN)
def test_a_method_gives_the_bits_of_featcal(options: dict[str, Any], root: Path, tmp_path: Path) -> None:
    from omegaconf import OmegaConf

    from featcal.integrations.fusion_bench import FeatureCalibration

    own = tensors(expected(root, tmp_path, options).to_model())
    merger = {"_target_": "fusion_bench.method.TaskArithmeticAlgorithm", "scaling_factor": 0.3}
    every = OmegaConf.create(dict.fromkeys(OPTIONS) | options)
    method = FeatureCalibration(OmegaConf.create(merger), calibration=every, device="cpu")
    theirs = tensors(method.run(read_pool(root)))
    merged = tensors(load_merged(tmp_path))
    assert own.keys() == theirs.keys()
    assert all(torch.equal(theirs[name], tensor) for name, tensor in own.items())
    assert any(not torch.equal(merged[name], tensor) for name, tensor in own.items())


def load_merged(out: Path) -> Any:
    from transformers import CLIPVisionModel

    return CLIPVisionModel.from_pretrained(out / "merged")


PROGRAM = f"""
import sys
from fusion_bench.tasks.clip_classification import CLIPTemplateFactory
for task in {TASKS}:
    own = {{"classnames": {list(CLASSES)}, "templates": [lambda name: f"a photo of a {{name}}."]}}
    CLIPTemplateFactory._dataset_mapping[task] = own
from fusion_bench.scripts.cli import _hydra_main
_hydra_main()
"""
"""The command `fusion_bench`, with the class names of the tasks."""


@pytest.mark.slow
def test_the_command_calibrates_and_its_task_pool_scores(root: Path, tmp_path: Path) -> None:
    result = expected(root, tmp_path, {"samples": 8, "lam": 0.1})
    words = ["method=featcal", "method@method.merger=task_arithmetic", "method.merger.scaling_factor=0.3"]
    words += ["method.calibration.samples=8", "method.calibration.lam=0.1", "method.device=cpu"]
    words += ["modelpool=tiny", "taskpool=tiny", f"merged_model_save_path={tmp_path / 'calibrated'}"]
    words += [f"report_save_path={tmp_path / 'report.json'}", "fabric.accelerator=cpu"]
    search = f"hydra.searchpath=[pkg://featcal.integrations.configs,file://{root / 'configs'}]"
    command = [sys.executable, "-c", PROGRAM, search, *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    written = load_file(tmp_path / "calibrated" / "model.safetensors")
    own = {name.removeprefix("vision_model."): one for name, one in result.to_model().state_dict().items()}
    assert {name.removeprefix("vision_model."): one.shape for name, one in written.items()} == {
        name: one.shape for name, one in own.items()
    }
    assert all(torch.equal(one, own[name.removeprefix("vision_model.")]) for name, one in written.items())
    scored = featcal.evaluate(featcal.load_suite(tmp_path / "suite.yaml"), result, device="cpu")
    report = json.loads((tmp_path / "report.json").read_text())
    found = {task: report[task]["accuracy"] for task in TASKS}
    assert found == pytest.approx({task: scored.tasks[task].value for task in TASKS}, abs=1e-6)


@pytest.mark.slow
def test_what_a_pool_lacks_is_said(root: Path) -> None:
    import featcal.integrations.fusion_bench as door

    method = door.FeatureCalibration({"_target_": "fusion_bench.method.SimpleAverageAlgorithm"}, split="val")
    with pytest.raises(featcal.InputError, match=r"val_datasets has none for pets, signs; name one there"):
        method.run(read_pool(root))
    with pytest.raises(featcal.InputError, match="split is 'training'; a model pool has train, val, test"):
        door.FeatureCalibration({}, split="training")


@pytest.mark.slow
def test_models_that_a_pool_holds_stay_as_they_are(root: Path) -> None:
    """Mergers write into them; experts and base are calibrated with as they were."""
    from fusion_bench.method import TaskArithmeticAlgorithm
    from fusion_bench.modelpool import CLIPVisionModelPool

    from featcal.integrations.fusion_bench import FeatureCalibration

    plain = read_pool(root)
    held = {name: plain.load_model(name) for name in plain.all_model_names}
    sources = {task: {"parquet": str(root / f"{task}-train.parquet")} for task in TASKS}
    pool = CLIPVisionModelPool(held, processor=str(root / "base"))
    found = []
    for one in (plain, pool):
        method = FeatureCalibration(
            TaskArithmeticAlgorithm(scaling_factor=0.3), {"samples": 8}, data=sources, device="cpu"
        )
        found.append(tensors(method.run(one)))
    assert all(torch.equal(found[0][name], tensor) for name, tensor in found[1].items())

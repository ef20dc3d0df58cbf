"""mergekit itself merges tiny Llama experts; its configuration is imported, and its merge calibrated and reloaded."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from command_line import Run, document
from safetensors.torch import load_file, save_file
from tiny_text import TASKS, token_samples, write_text_base, write_text_expert
from torch import Tensor

import featcal
from featcal.authoring.recipes import import_recipe, import_to_file
from featcal.suite.schema import Suite

pytest.importorskip("mergekit", reason="mergekit is not installed")
pytestmark = pytest.mark.slow

WEIGHTS = {"left": 0.5, "right": 0.25}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a base, two experts and samples of both tasks."""
    root = tmp_path_factory.mktemp("llama")
    base = write_text_base(root / "base", "llama")
    samples: dict[str, Tensor] = {}
    for seed, task in enumerate(TASKS):
        write_text_expert(root / task, base, "llama", seed + 1, 0.1)
        samples |= {f"{task}.{name}": tensor for name, tensor in token_samples("llama", seed).items()}
    save_file(samples, root / "samples.safetensors")
    return root


CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "task-arithmetic": {"merge_method": "task_arithmetic", "parameters": {"lambda": 0.8}},
    "ties": {"merge_method": "ties", "parameters": {"lambda": 1.3, "density": 0.4}},
    "ties-in-half": {"merge_method": "ties", "parameters": {"lambda": 1.3, "density": 0.4}, "out_dtype": "bfloat16"},
    "linear": {"merge_method": "linear", "base_model": None},
    "linear-with-base": {"merge_method": "linear", "parameters": {"weight": 1.0}},
}
Merge = Callable[[str], tuple[Path, Path]]


@pytest.fixture(scope="module")
def merge(models: Path) -> Merge:
    """Runs mergekit on a configuration, once; returns its file and mergekit's output folder."""

    @cache
    def run(name: str) -> tuple[Path, Path]:
        inputs = [{"model": str(models / task), "parameters": {"weight": WEIGHTS[task]}} for task in TASKS]
        content = {"base_model": str(models / "base"), "models": inputs, "dtype": "float32", **CONFIGURATIONS[name]}
        file, out = models / f"{name}.yml", models / f"out-{name}"
        file.write_text(yaml.safe_dump({key: value for key, value in content.items() if value is not None}))
        command = [sys.executable, "-m", "mergekit.scripts.run_yaml", file, out, "--quiet", "--no-write-model-card"]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
        assert done.returncode == 0, done.stderr[-2000:]
        return file, out

    return run


@pytest.mark.parametrize("name", [name for name in CONFIGURATIONS if name != "ties-in-half"])
def test_the_recipe_gives_the_tensors_that_mergekit_writes(merge: Merge, models: Path, name: str) -> None:
    file, out = merge(name)
    content = {"base": str(models / "base"), **import_recipe(file).suite}
    ours = featcal.open_family(Suite.model_validate(content), device="cpu").merged
    theirs = load_file(out / "model.safetensors")
    assert set(theirs) == set(ours.info)
    for tensor, values in ours.read(theirs).items():
        assert values.dtype == theirs[tensor].dtype
        torch.testing.assert_close(values, theirs[tensor], rtol=1e-6, atol=1e-6)


def test_half_precision_is_rounded_once_at_the_end(merge: Merge) -> None:
    """Merged in float32 and stored in bfloat16, as `out_dtype` says: the same numbers but for ties in rounding."""
    file, out = merge("ties-in-half")
    ours = featcal.open_family(Suite.model_validate(import_recipe(file).suite), device="cpu").merged
    theirs = load_file(out / "model.safetensors")
    merged = ours.read(theirs)
    assert all(values.dtype is torch.bfloat16 for values in merged.values())
    different = sum(int((merged[name] != theirs[name]).sum()) for name in theirs)
    assert different <= 1e-3 * sum(values.numel() for values in theirs.values())


def test_a_folder_that_mergekit_wrote_is_diagnosed_with_nothing_else(models: Path, tmp_path: Path, run: Run) -> None:
    inputs = [{"model": str(models / task), "parameters": {"weight": WEIGHTS[task]}} for task in TASKS]
    content = {"base_model": str(models / "base"), "models": inputs, **CONFIGURATIONS["task-arithmetic"]}
    (tmp_path / "own.yml").write_text(yaml.safe_dump({**content, "dtype": "float32"}))
    command = [sys.executable, "-m", "mergekit.scripts.run_yaml", tmp_path / "own.yml", tmp_path / "merge", "--quiet"]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    found = document(run("diagnose", tmp_path / "merge", "--eval-samples", "6", "--json"))
    said = {one["about"]: one for one in found["sentences"]}
    assert said["state"]["numbers"] == {"broken": False, "files": False}
    assert said["contents"]["text"].endswith("as its recipe says.")
    expected = {task: 0.8 * weight for task, weight in WEIGHTS.items()}
    assert found["contents"]["coefficients"] == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("as_recipe", [True, False])
def test_imported_calibrated_and_reloaded(merge: Merge, models: Path, tmp_path: Path, as_recipe: bool) -> None:
    from transformers import AutoModelForCausalLM

    file, out = merge("ties")
    suite_file = tmp_path / "suite.yaml"
    document = import_to_file(file, None if as_recipe else str(out), suite_file)
    assert [line.partition(":")[0] for line in document["missing"]] == ["calibration samples of left, right"]
    content = yaml.safe_load(suite_file.read_text())
    for task in TASKS:
        source = {"tensors": str(models / "samples.safetensors"), "key": f"{task}.ids", "mask": f"{task}.mask"}
        content["tasks"][task]["calibration"] = source
    suite_file.write_text(yaml.safe_dump(content))
    suite = featcal.load_suite(suite_file)
    featcal.calibrate_to_folder(suite, featcal.CalibrationConfig(lam=0.05, samples=8), tmp_path / "calibrated")
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path / "calibrated", output_loading_info=True)
    assert not report["missing_keys"]
    merged = load_file(out / "model.safetensors")
    reloaded = model.state_dict()
    changed = {name for name, values in merged.items() if not torch.allclose(reloaded[name], values, atol=1e-6)}
    assert changed
    assert all(".layers." in name for name in changed)
    assert all(bool(torch.isfinite(values).all()) for values in reloaded.values())

"""mergekit merges tiny Qwen3 and Gemma-2 experts; its merge is imported, calibrated, loaded by transformers and scored
by lm-evaluation-harness. Runs where both tools are installed: they pin libraries of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from tiny_decoders import ROWS, tiny_decoder
from torch import Tensor

import featcal
from featcal.authoring.recipes import import_recipe, import_to_file
from featcal.evaluation.lm_eval import run_lm_eval
from featcal.suite.schema import Suite
from featcal.testing.trial import TASKS, Trial, write_trial

pytest.importorskip("mergekit", reason="mergekit is not installed")
pytestmark = pytest.mark.slow

KINDS = ("qwen3", "gemma2")
WEIGHTS = {"left": 0.6, "right": 0.4}
METHODS: dict[str, dict[str, Any]] = {
    "task-arithmetic": {"merge_method": "task_arithmetic", "parameters": {"lambda": 0.8}},
    "ties": {"merge_method": "ties", "parameters": {"lambda": 1.1, "density": 0.5}},
}
WORDS = ["<pad>", "</s>", "<unk>", *[f"w{number}" for number in range(29)]]
QUESTIONS, RIGHT = 24, 17
CHOICES = [3, 4, 5, 6]


def write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    specials = {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **specials).save_pretrained(folder)


@pytest.fixture(scope="module", params=KINDS)
def trial(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trial:
    """Base, experts and samples of one architecture; the base with a tokenizer of words."""
    facts = ROWS[request.param]
    made = write_trial(tiny_decoder(facts), facts, tmp_path_factory.mktemp(request.param))
    write_tokenizer(made.root / "base")
    return made


@pytest.fixture(scope="module", params=METHODS)
def merge(request: pytest.FixtureRequest, trial: Trial) -> tuple[Path, Path]:
    """A configuration, and the folder that mergekit writes for it."""
    root, name = trial.root, request.param
    inputs = [
        {"model": str(root / "experts" / task), "parameters": {"weight": weight}} for task, weight in WEIGHTS.items()
    ]
    content = {"base_model": str(root / "base"), "models": inputs, "dtype": "float32", **METHODS[name]}
    file, out = root / f"{name}.yml", root / f"out-{name}"
    file.write_text(yaml.safe_dump(content))
    command = [sys.executable, "-m", "mergekit.scripts.run_yaml", file, out, "--quiet", "--no-write-model-card"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    assert done.returncode == 0, done.stderr[-2000:]
    return file, out


def test_the_recipe_gives_the_tensors_that_mergekit_writes(merge: tuple[Path, Path], trial: Trial) -> None:
    file, out = merge
    ours = featcal.open_family(Suite.model_validate(import_recipe(file).suite), device="cpu").merged
    theirs = stored(out)
    assert set(theirs) - {"lm_head.weight"} == set(ours.info) - {"lm_head.weight"}
    for tensor, values in ours.read(theirs.keys() & ours.info.keys()).items():
        torch.testing.assert_close(values, theirs[tensor], rtol=1e-6, atol=1e-6)


def stored(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@torch.no_grad()
def test_calibrated_loaded_and_scored(merge: tuple[Path, Path], trial: Trial, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed")
    file, out = merge
    suite_file = tmp_path / "suite.yaml"
    import_to_file(file, str(out), suite_file)
    content = yaml.safe_load(suite_file.read_text())
    for task in TASKS:
        named = f"{task}.calibration"
        source = {"tensors": str(trial.root / "samples.safetensors"), "key": f"{named}.ids", "mask": f"{named}.mask"}
        content["tasks"][task]["calibration"] = source
    suite_file.write_text(yaml.safe_dump(content))
    suite = featcal.load_suite(suite_file)
    done = tmp_path / "calibrated"
    featcal.calibrate_to_folder(suite, featcal.CalibrationConfig(lam=0.05, samples=8), done)
    before, after = (featcal.measure_drift(suite, model) for model in ("merged", str(done)))
    for task in TASKS:
        assert after.tasks[task].layers[-1].relative_drift < before.tasks[task].layers[-1].relative_drift
    model, report = AutoModelForCausalLM.from_pretrained(done, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    merged = stored(out)
    reloaded = model.state_dict()
    changed = {name for name, values in merged.items() if not torch.allclose(reloaded[name], values, atol=1e-6)}
    assert changed
    assert all(".layers." in name for name in changed)
    found = run_lm_eval(done, ["tiny"], write_task(tmp_path / "harness", questions(model.eval())))["tasks"]["tiny"]
    assert found["n"] == QUESTIONS
    assert found["metrics"]["acc,none"] == pytest.approx(RIGHT / QUESTIONS)


def questions(model: Any) -> list[dict[str, Any]]:
    """Random words, and one of four that may follow: of the first `RIGHT` the one that the library's own forward finds
    likeliest, of the others another, so that a single answer of the harness that differs moves its score."""
    generator = torch.Generator().manual_seed(5)
    rows = torch.randint(3, len(WORDS), (QUESTIONS, 6), generator=generator)
    likeliest = model(input_ids=rows).logits[:, -1, CHOICES].argmax(1).tolist()
    assert len(set(likeliest)) > 1
    return [
        {
            "prompt": " ".join(WORDS[one] for one in row),
            "choices": [WORDS[one] for one in CHOICES],
            "gold": best if number < RIGHT else (best + 1) % len(CHOICES),
        }
        for number, (row, best) in enumerate(zip(rows.tolist(), likeliest, strict=True))
    ]


def write_task(folder: Path, asked: list[dict[str, Any]]) -> list[str]:
    """A local task of the harness; the options that find it."""
    folder.mkdir()
    rows = "".join(json.dumps(row) + "\n" for row in asked)
    (folder / "tiny.jsonl").write_text(rows)
    task = {
        "task": "tiny",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "tiny.jsonl")}},
        "output_type": "multiple_choice",
        "test_split": "test",
        "doc_to_text": "{{prompt}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "gold",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    (folder / "tiny.yaml").write_text(yaml.safe_dump(task))
    return ["--include_path", str(folder), "--device", "cpu", "--batch_size", "4"]

"""The files of ``t5-mini`` by themselves: layout, names, texts, and experts that know their task."""

from __future__ import annotations

import gzip
import importlib.util
import json
from collections import Counter
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase, T5ForConditionalGeneration

FOLDER = Path(__file__).resolve().parents[2] / "data" / "t5-mini"
SUITE: dict[str, Any] = yaml.safe_load((FOLDER / "suite.yaml").read_text())
TASKS = tuple(SUITE["tasks"])
SPLITS = {"calibration": 256, "validation": 128, "test": 500}
MODELS = {"base": FOLDER / SUITE["base"]} | {task: FOLDER / SUITE["tasks"][task]["expert"] for task in TASKS}
FROZEN = {"shared.weight", "lm_head.weight"}


@cache
def texts(task: str) -> dict[str, list[tuple[str, str]]]:
    """Prompts and answers of each split, as the suite file asks for them."""
    with gzip.open(FOLDER / f"{task}.jsonl.gz", "rt") as lines:
        rows = [json.loads(line) for line in lines]
    found = {}
    for split in SPLITS:
        source = SUITE["tasks"][task][split]
        assert source["jsonl"] == f"{task}.jsonl.gz"
        assert source["split"] == split
        chosen = [row for row in rows if row["split"] == split]
        found[split] = [(source["input"].format(**row), source["target"].format(**row)) for row in chosen]
    return found


@cache
def weights(name: str) -> dict[str, Tensor]:
    return load_file(MODELS[name] / "model.safetensors")


@cache
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(MODELS["base"])


def load(name: str) -> T5ForConditionalGeneration:
    model, report = T5ForConditionalGeneration.from_pretrained(
        MODELS[name], dtype=torch.float32, output_loading_info=True
    )
    assert not any(report.values()), report
    return model.eval()


def exact_match(model: T5ForConditionalGeneration, pairs: list[tuple[str, str]]) -> float:
    """Share of greedy answers that are the wanted text."""
    batch = tokenizer()([prompt for prompt, _ in pairs], return_tensors="pt", padding=True)
    answers = model.generate(**batch, max_length=10, do_sample=False)
    found = tokenizer().batch_decode(answers, skip_special_tokens=True)
    return sum(a == wanted for a, (_, wanted) in zip(found, pairs, strict=True)) / len(pairs)


def test_it_stays_small() -> None:
    files = [path for path in FOLDER.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert sum(path.stat().st_size for path in files) <= 8e6


@pytest.mark.parametrize("task", TASKS)
def test_splits_are_whole_balanced_and_disjoint(task: str) -> None:
    found = texts(task)
    assert {split: len(pairs) for split, pairs in found.items()} == SPLITS
    prompts = [prompt for pairs in found.values() for prompt, _ in pairs]
    assert len(set(prompts)) == len(prompts)
    for pairs in found.values():
        counts = Counter(answer for _, answer in pairs)
        assert max(counts.values()) - min(counts.values()) <= 1


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script that made the folder."""
    monkeypatch.syspath_prepend(FOLDER)
    spec = importlib.util.spec_from_file_location("t5_mini_build", FOLDER / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_texts_are_those_of_the_script_and_nobody_trained_on_them(build: ModuleType, tmp_path: Path) -> None:
    build.write_texts(tmp_path)
    assert set(build.TASKS) == set(TASKS)
    for task in TASKS:
        file = f"{task}.jsonl.gz"
        assert gzip.decompress((tmp_path / file).read_bytes()) == gzip.decompress((FOLDER / file).read_bytes())
        held = {prompt for pairs in texts(task).values() for prompt, _ in pairs}
        rows = build.pool(task, plain=True) + build.pool(task, plain=False)
        assert len(rows) == build.PLAIN_POOL + build.HARD_POOL
        assert not held & {SUITE["tasks"][task]["test"]["input"].format(**row) for row in rows}


@pytest.mark.parametrize("task", TASKS)
def test_every_word_is_known(task: str) -> None:
    words, labels = tokenizer(), set()
    for pairs in texts(task).values():
        for text in (prompt for prompt, _ in pairs):
            numbers = words(text)["input_ids"]
            assert words.unk_token_id not in numbers, text
            assert len(numbers) <= words.model_max_length
            assert numbers[-1] == words.eos_token_id
        labels |= {answer for _, answer in pairs}
    for label in labels:  # one word, and back again
        numbers = words(label)["input_ids"]
        assert numbers == [words.convert_tokens_to_ids(label), 1]
        assert words.decode(numbers, skip_special_tokens=True) == label


def test_special_tokens_are_those_of_t5() -> None:
    assert (tokenizer().pad_token_id, tokenizer().eos_token_id, tokenizer().unk_token_id) == (0, 1, 2)


@pytest.mark.parametrize("name", MODELS)
def test_output_layer_is_untied_in_the_file_and_after_loading(name: str) -> None:
    stored, model = weights(name), load(name)
    assert json.loads((MODELS[name] / "config.json").read_text())["tie_word_embeddings"] is False
    assert {tensor.dtype for tensor in stored.values()} == {torch.float16}
    assert not [key for key in stored if "embed_tokens" in key]
    assert model.lm_head.weight.data_ptr() != model.shared.weight.data_ptr()
    assert not torch.equal(stored["lm_head.weight"], stored["shared.weight"])
    loaded = model.state_dict()
    assert set(stored) == {key for key in loaded if "embed_tokens" not in key}
    assert all(torch.equal(loaded[key], tensor.float()) for key, tensor in stored.items())
    assert not model.config.scale_decoder_outputs
    assert model.generation_config.decoder_start_token_id == 0


@pytest.mark.parametrize("task", TASKS)
def test_experts_leave_embedding_and_output_layer_alone(task: str) -> None:
    base, expert = weights("base"), weights(task)
    assert set(base) == set(expert)
    same = {key for key in base if torch.equal(base[key], expert[key])}
    assert same >= FROZEN
    moved = {key for key in base if base[key].ndim == 2} - FROZEN - same
    assert len(moved) == 3 * 7 + 2 * 11 + 2  # every linear map of three and two blocks, two position tables


@pytest.mark.parametrize("task", TASKS)
def test_expert_knows_its_task_and_base_does_not(task: str) -> None:
    pairs = texts(task)["test"][:100]
    assert exact_match(load("base"), pairs) <= 0.75
    assert exact_match(load(task), pairs) >= 0.9

"""The ready suite gpt2-glue on stand-ins with the files of its models and data sets: a base with the names, buffers and
tokenizer of the first GPT-2, experts with classifiers, GLUE's columns, splits and names of classes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
import transformers
from glue_files import CLASSES, COLUMNS, LETTERS, cached_models, from_files, rows_of, write_glue
from safetensors.torch import load_file, save_file

from featcal import Family, calibrate, evaluate, load_suite, measure_drift, open_family
from featcal.calibration.calibrate import config_for
from featcal.preflight.check import check
from featcal.system.resources import ready_suites

END = len(LETTERS)
"""The token that ends a text, behind those of single bytes: GPT-2 has no other special one, and none to pad with."""
OPTIONS = {"vocab_size": END + 1, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": END,
           "eos_token_id": END}  # fmt: skip


def write_models(folders: dict[str, Path]) -> None:
    """As they are on the Hub; folders by task, and of "base"."""
    torch.manual_seed(0)
    base = transformers.GPT2LMHeadModel(transformers.GPT2Config(**OPTIONS))
    with torch.no_grad():
        for parameter in base.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    base.save_pretrained(folders["base"])
    file = folders["base"] / "model.safetensors"
    bare = {name.removeprefix("transformer."): tensor for name, tensor in load_file(file).items()}
    seen = {f"h.{i}.attn.bias": torch.ones(64, 64).tril()[None, None] for i in range(2)}
    save_file(bare | seen, file, {"format": "pt"})
    (folders["base"] / "vocab.json").write_text(json.dumps({t: i for i, t in enumerate([*LETTERS, "<|endoftext|>"])}))
    (folders["base"] / "merges.txt").write_text("#version: 0.2\n")
    (folders["base"] / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    for task, classes in CLASSES.items():
        config = transformers.GPT2Config(**OPTIONS, num_labels=len(classes), pad_token_id=END)
        expert = transformers.GPT2ForSequenceClassification(config)
        expert.transformer.load_state_dict(base.transformer.state_dict())
        with torch.no_grad():
            for parameter in expert.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        expert.save_pretrained(folders[task])


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The suite over stand-ins; data sets lie in folders of their names beside a copy of its file."""
    root = tmp_path_factory.mktemp("gpt2-glue")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(root / "hub"))
        suite = load_suite(shutil.copy(ready_suites()["gpt2-glue"], root))
        write_models(cached_models(suite))
        write_glue(root / "nyu-mll" / "glue")
        yield open_family(from_files(suite), device="cpu")


def test_it_is_in_order(family: Family) -> None:
    assert check(family.suite).problems == ()
    adapter = family.adapter
    assert (adapter.modality, adapter.classifier, len(adapter.blocks())) == ("text", ("score",), 2)
    assert adapter.aliases == {"lm_head.weight": "transformer.wte.weight"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("task", CLASSES)
def test_the_data_sets_are_read_as_their_files_are(
    family: Family, task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the configurations and splits that the suite names."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    datasets.disable_progress_bars()
    whole = open_family(load_suite(family.suite.root / "gpt2-glue.yaml"), device="cpu")
    for split in ("calibration", "test"):
        theirs, files = (one.samples(task, split, None, 0) for one in (whole, family))
        assert theirs.inputs["input_ids"].equal(files.inputs["input_ids"])
        assert (theirs.class_names, theirs.texts) == (files.class_names, files.texts)


@pytest.mark.parametrize("task", CLASSES)
def test_samples_and_scores_are_those_of_the_library(family: Family, task: str) -> None:
    """By the expert's own tokenizing and forward, with the end of a text as padding."""
    rows = rows_of(task, "validation")
    tokenizer = transformers.AutoTokenizer.from_pretrained(family.base_folder)
    assert tokenizer.pad_token is None
    tokenizer.pad_token = tokenizer.eos_token
    inputs = tokenizer(*([row[column] for row in rows] for column in COLUMNS[task]), padding=True, return_tensors="pt")
    folder = cached_models(family.suite)[task]
    model = transformers.GPT2ForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        said = model(**inputs).logits.argmax(1)
    drawn = family.samples(task, "test", None, 0)
    assert drawn.inputs["attention_mask"].equal(inputs["attention_mask"])
    assert (drawn.inputs["input_ids"] * drawn.inputs["attention_mask"]).equal(
        inputs["input_ids"] * inputs["attention_mask"]
    )
    assert drawn.class_names == CLASSES[task]
    score = evaluate(family, f"expert:{task}", split="test").tasks[task]
    assert score.predictions.equal(said)
    assert score.labels.tolist() == [row["label"] for row in rows]


def test_what_is_calibrated_is_gpt2_again(family: Family, tmp_path: Path) -> None:
    calibrate(family, config_for(family, lam=0.05)).save(tmp_path / "out")
    model, report = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.lm_head.weight is model.transformer.wte.weight
    before, after = measure_drift(family), measure_drift(family, str(tmp_path / "out"))
    block, head = (
        [after.tasks[task].layers[at].relative_drift / before.tasks[task].layers[at].relative_drift for task in CLASSES]
        for at in (-2, -1)
    )
    assert max(block) < 1  # of all tokens; the classifier reads the last one of six texts alone
    assert sum(head) / len(head) < 1
    scores = evaluate(family, str(tmp_path / "out"), split="test")
    assert {one.metric for one in scores.tasks.values()} == {"accuracy"}

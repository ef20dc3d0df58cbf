"""The ready suite roberta-base-glue on stand-ins with the files of its models: a base as a masked language model, and
experts with classifiers, each in a folder of one repository that also holds pickles and other models."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
import transformers
import yaml
from glue_files import CLASSES, COLUMNS, LETTERS, cached_models, from_files, rows_of, write_glue
from safetensors.torch import load_file, save_file

from featcal import Family, calibrate, evaluate, load_suite, measure_drift, open_family
from featcal.calibration.calibrate import config_for
from featcal.evaluation.evaluate import task_features
from featcal.evaluation.scoring_heads import head_of
from featcal.preflight.check import check
from featcal.system.resources import ready_suites

WORDS = ["<s>", "<pad>", "</s>", "<unk>", *LETTERS, "<mask>"]
OPTIONS = {"vocab_size": len(WORDS), "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
           "intermediate_size": 24, "max_position_embeddings": 66, "type_vocab_size": 1, "pad_token_id": 1,
           "bos_token_id": 0, "eos_token_id": 2}  # fmt: skip


def write_tokenizer(folder: Path) -> None:
    (folder / "vocab.json").write_text(json.dumps({word: i for i, word in enumerate(WORDS)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 64}))
    transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(folder)


def write_models(folders: dict[str, Path]) -> None:
    """As they are on the Hub; folders by task, and of "base"."""
    torch.manual_seed(0)
    base = transformers.RobertaForMaskedLM(transformers.RobertaConfig(**OPTIONS))
    with torch.no_grad():
        for parameter in base.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    base.save_pretrained(folders["base"])
    file = folders["base"] / "model.safetensors"
    pooler = {"roberta.pooler.dense.weight": torch.randn(16, 16), "roberta.pooler.dense.bias": torch.randn(16)}
    seen = {"roberta.embeddings.position_ids": torch.arange(66)[None]}
    save_file(load_file(file) | pooler | seen, file, {"format": "pt"})
    write_tokenizer(folders["base"])
    for task, classes in CLASSES.items():
        config = transformers.RobertaConfig(**OPTIONS, num_labels=len(classes))
        expert = transformers.RobertaForSequenceClassification(config)
        expert.roberta.load_state_dict(base.roberta.state_dict())
        with torch.no_grad():
            for parameter in expert.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
        expert.save_pretrained(folders[task])
        write_tokenizer(folders[task])
        (folders[task] / "trainer_state.json").write_text("{}")


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The suite over stand-ins; data sets lie in folders of their names beside a copy of its file."""
    root = tmp_path_factory.mktemp("roberta-base-glue")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(root / "hub"))
        suite = load_suite(shutil.copy(ready_suites()["roberta-base-glue"], root))
        write_models(cached_models(suite))
        write_glue(root / "nyu-mll" / "glue")
        yield open_family(from_files(suite), device="cpu")


def test_it_is_in_order(family: Family) -> None:
    found = check(family.suite)
    assert found.problems == ()
    assert found.downloads == ()
    adapter = family.adapter
    assert (adapter.modality, adapter.classifier) == ("text", ("classifier.dense", "classifier.out_proj"))
    assert len(adapter.blocks()) == 2


@pytest.mark.parametrize("task", CLASSES)
@torch.no_grad()
def test_samples_and_scores_are_those_of_the_library(family: Family, task: str) -> None:
    """Of a batch of texts of several lengths, whose positions begin behind that of padding."""
    rows, folder = rows_of(task, "validation"), cached_models(family.suite)[task]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(*([row[column] for row in rows] for column in COLUMNS[task]), padding=True, return_tensors="pt")
    drawn = family.samples(task, "test", None, 0)
    assert all(drawn.inputs[name].equal(inputs[name]) for name in ("input_ids", "attention_mask"))
    assert 0 < int(inputs["attention_mask"].sum()) < inputs["attention_mask"].numel()
    assert drawn.class_names == CLASSES[task]
    model = transformers.RobertaForSequenceClassification.from_pretrained(folder).eval()
    scores = model(**inputs).logits
    features = task_features(family, family.experts[task], task, [drawn.inputs])
    torch.testing.assert_close(
        head_of(family, family.experts[task], task).scores(features), scores, rtol=1e-5, atol=1e-5
    )
    score = evaluate(family, f"expert:{task}", split="test").tasks[task]
    assert score.predictions.equal(scores.argmax(1))
    assert score.labels.tolist() == [row["label"] for row in rows]


def test_what_is_calibrated_is_roberta_again(family: Family, tmp_path: Path) -> None:
    calibrate(family, config_for(family, lam=0.05)).save(tmp_path / "out")
    model, report = transformers.RobertaForMaskedLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["mismatched_keys"]
    written = family.model(str(tmp_path / "out")).read(family.adapter.tower)
    assert all(model.state_dict()[name].equal(tensor) for name, tensor in written.items())
    before, after = measure_drift(family), measure_drift(family, str(tmp_path / "out"))
    block, head = (
        [after.tasks[task].layers[at].relative_drift / before.tasks[task].layers[at].relative_drift for task in CLASSES]
        for at in (1, -1)
    )
    assert max(block) < 1  # of all tokens; the head reads the first one of six texts alone
    assert sum(head) / len(head) < 1
    assert {one.metric for one in evaluate(family, str(tmp_path / "out"), split="test").tasks.values()} == {"accuracy"}


def test_the_card_names_every_expert_by_its_folder(family: Family, tmp_path: Path) -> None:
    """The Hub itself knows repositories alone, each of them once."""
    calibrate(family, config_for(family, samples=2)).save(tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    front = yaml.safe_load(card.split("---")[1])
    assert front["base_model"] == ["FacebookAI/roberta-base", "SphereLab/nlu_models_in_FDA"]
    refs = [task.expert for task in family.suite.tasks.values()]
    assert f"| models on the Hub | {', '.join([family.suite.base, *refs])} |" in card

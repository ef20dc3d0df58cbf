"""The ready suites gpt2-glue and roberta-base-glue on stand-ins with the files of their models and data sets.

GPT-2: a base with the names, buffers and tokenizer of the first one, experts with classifiers. RoBERTa: a base as a
masked language model, and experts with classifiers, each in a folder of one repository that also holds pickles and
other models. GLUE: its columns, splits and names of classes.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import lanes
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
from featcal.preflight.check import check_suite
from featcal.system.resources import ready_suites

END = len(LETTERS)
"""The token that ends a text, after those of single bytes: GPT-2 has no other special one, and none to pad with."""
GPT2 = {"vocab_size": END + 1, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": END,
        "eos_token_id": END}  # fmt: skip
WORDS = ["<s>", "<pad>", "</s>", "<unk>", *LETTERS, "<mask>"]
ROBERTA = {"vocab_size": len(WORDS), "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
           "intermediate_size": 24, "max_position_embeddings": 66, "type_vocab_size": 1, "pad_token_id": 1,
           "bos_token_id": 0, "eos_token_id": 2}  # fmt: skip


@torch.no_grad()
def shaken(model: Any, distance: float) -> None:
    for parameter in model.parameters():
        parameter.add_(distance * torch.randn_like(parameter))


def write_gpt2(folders: dict[str, Path]) -> None:
    """As they are on the Hub; folders by task, and of "base"."""
    torch.manual_seed(0)
    base = transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2))
    shaken(base, 0.2)
    base.save_pretrained(folders["base"])
    file = folders["base"] / "model.safetensors"
    bare = {name.removeprefix("transformer."): tensor for name, tensor in load_file(file).items()}
    seen = {f"h.{i}.attn.bias": torch.ones(64, 64).tril()[None, None] for i in range(2)}
    save_file(bare | seen, file, {"format": "pt"})
    (folders["base"] / "vocab.json").write_text(json.dumps({t: i for i, t in enumerate([*LETTERS, "<|endoftext|>"])}))
    (folders["base"] / "merges.txt").write_text("#version: 0.2\n")
    (folders["base"] / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    for task, classes in CLASSES.items():
        config = transformers.GPT2Config(**GPT2, num_labels=len(classes), pad_token_id=END)
        expert = transformers.GPT2ForSequenceClassification(config)
        expert.transformer.load_state_dict(base.transformer.state_dict())
        shaken(expert, 0.1)
        expert.save_pretrained(folders[task])


def write_tokenizer(folder: Path) -> None:
    (folder / "vocab.json").write_text(json.dumps({word: i for i, word in enumerate(WORDS)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 64}))
    transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(folder)


def write_roberta(folders: dict[str, Path]) -> None:
    """As they are on the Hub; folders by task, and of "base"."""
    torch.manual_seed(0)
    base = transformers.RobertaForMaskedLM(transformers.RobertaConfig(**ROBERTA))
    shaken(base, 0.2)
    base.save_pretrained(folders["base"])
    file = folders["base"] / "model.safetensors"
    pooler = {"roberta.pooler.dense.weight": torch.randn(16, 16), "roberta.pooler.dense.bias": torch.randn(16)}
    seen = {"roberta.embeddings.position_ids": torch.arange(66)[None]}
    save_file(load_file(file) | pooler | seen, file, {"format": "pt"})
    write_tokenizer(folders["base"])
    for task, classes in CLASSES.items():
        config = transformers.RobertaConfig(**ROBERTA, num_labels=len(classes))
        expert = transformers.RobertaForSequenceClassification(config)
        expert.roberta.load_state_dict(base.roberta.state_dict())
        shaken(expert, 0.05)
        expert.save_pretrained(folders[task])
        write_tokenizer(folders[task])
        (folders[task] / "trainer_state.json").write_text("{}")


@dataclass(frozen=True)
class Kind:
    """What one suite has of its own."""

    write: Callable[[dict[str, Path]], None]
    base: str
    """Class of the library for the base, and for what is calibrated."""
    expert: str
    heads: tuple[str, ...]
    aliases: dict[str, str]
    improved: int
    """The layer whose drift falls for every task."""


KINDS = {
    "gpt2-glue": Kind(
        write_gpt2,
        "GPT2LMHeadModel",
        "GPT2ForSequenceClassification",
        ("score",),
        {"lm_head.weight": "transformer.wte.weight"},
        improved=-2,  # the last block
    ),
    "roberta-base-glue": Kind(
        write_roberta,
        "RobertaForMaskedLM",
        "RobertaForSequenceClassification",
        ("classifier.dense", "classifier.out_proj"),
        {"lm_head.decoder.weight": "roberta.embeddings.word_embeddings.weight"},
        improved=1,
    ),
}


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Family]]:
    """The suites over stand-ins; data sets lie in folders of their names beside a copy of the suite's file."""
    root, opened = tmp_path_factory.mktemp("glue"), dict[str, Family]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(root / "hub"))

        def family(name: str) -> Family:
            if name not in opened:
                if not opened:
                    write_glue(root / "nyu-mll" / "glue")
                suite = load_suite(shutil.copy(ready_suites()[name], root))
                KINDS[name].write(cached_models(suite))
                opened[name] = open_family(from_files(suite), device="cpu")
            return opened[name]

        yield family


@pytest.fixture(params=lanes.rows(KINDS, quick=("gpt2-glue",), slow=("roberta-base-glue",)))
def name(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture
def family(name: str, families: Callable[[str], Family]) -> Family:
    return families(name)


def test_it_is_in_order(family: Family, name: str) -> None:
    found = check_suite(family.suite)
    assert found.problems == ()
    assert found.downloads == ()
    adapter = family.adapter
    assert (adapter.modality, adapter.classifier, len(adapter.blocks())) == ("text", KINDS[name].heads, 2)
    assert adapter.aliases == KINDS[name].aliases


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("task", CLASSES)
def test_the_data_sets_are_read_as_their_files_are(
    families: Callable[[str], Family], task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the configurations and splits that the suite names."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    datasets.disable_progress_bars()
    family = families("gpt2-glue")
    whole = open_family(load_suite(family.suite.root / "gpt2-glue.yaml"), device="cpu")
    for split in ("calibration", "test"):
        theirs, files = (one.samples(task, split, None, 0) for one in (whole, family))
        assert theirs.inputs["input_ids"].equal(files.inputs["input_ids"])
        assert (theirs.class_names, theirs.texts) == (files.class_names, files.texts)


@pytest.mark.parametrize("task", lanes.rows(CLASSES, quick=("cola", "mnli"), slow=CLASSES))
@torch.no_grad()
def test_samples_and_scores_are_those_of_the_library(family: Family, name: str, task: str) -> None:
    """By the expert's own tokenizing and forward, of texts of several lengths: GPT-2's with the end of a text as
    padding, RoBERTa's with positions that begin after that of padding."""
    rows, folder = rows_of(task, "validation"), cached_models(family.suite)[task]
    bare = name == "gpt2-glue"
    tokenizer = transformers.AutoTokenizer.from_pretrained(family.base_folder if bare else folder)
    if bare:
        assert tokenizer.pad_token is None
        tokenizer.pad_token = tokenizer.eos_token
    inputs = tokenizer(*([row[column] for row in rows] for column in COLUMNS[task]), padding=True, return_tensors="pt")
    drawn = family.samples(task, "test", None, 0)
    mask = inputs["attention_mask"]
    assert drawn.inputs["attention_mask"].equal(mask)
    assert 0 < int(mask.sum()) < mask.numel()
    assert (drawn.inputs["input_ids"] * mask).equal(inputs["input_ids"] * mask)
    if not bare:  # whatever stands under GPT-2's padding is no token of its own
        assert drawn.inputs["input_ids"].equal(inputs["input_ids"])
    assert drawn.class_names == CLASSES[task]
    scores = getattr(transformers, KINDS[name].expert).from_pretrained(folder).eval()(**inputs).logits
    features = task_features(family, family.experts[task], task, [drawn.inputs])
    torch.testing.assert_close(
        head_of(family, family.experts[task], task).scores(features), scores, rtol=1e-5, atol=1e-5
    )
    score = evaluate(family, f"expert:{task}", split="test").tasks[task]
    assert score.predictions.equal(scores.argmax(1))
    assert score.labels.tolist() == [row["label"] for row in rows]


@pytest.mark.slow
def test_what_is_calibrated_is_such_a_model_again(family: Family, name: str, tmp_path: Path) -> None:
    calibrate(family, config_for(family, lam=0.05)).save(tmp_path / "out")
    library = getattr(transformers, KINDS[name].base)
    model, report = library.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["mismatched_keys"]
    if name == "gpt2-glue":
        assert not report["unexpected_keys"]
        assert model.lm_head.weight is model.transformer.wte.weight
    written = family.model(str(tmp_path / "out")).read(family.adapter.tower)
    assert all(model.state_dict()[name].equal(tensor) for name, tensor in written.items())
    before, after = measure_drift(family), measure_drift(family, str(tmp_path / "out"))
    block, head = (
        [after.tasks[task].layers[at].relative_drift / before.tasks[task].layers[at].relative_drift for task in CLASSES]
        for at in (KINDS[name].improved, -1)
    )
    assert max(block) < 1  # of all tokens; the head reads a single one of six texts alone
    assert sum(head) / len(head) < 1
    assert {one.metric for one in evaluate(family, str(tmp_path / "out"), split="test").tasks.values()} == {"accuracy"}


@pytest.mark.slow
def test_the_card_names_every_expert_by_its_folder(families: Callable[[str], Family], tmp_path: Path) -> None:
    """The Hub itself knows repositories alone, each of them once."""
    family = families("roberta-base-glue")
    calibrate(family, config_for(family, samples=2)).save(tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    front = yaml.safe_load(card.split("---")[1])
    assert front["base_model"] == ["FacebookAI/roberta-base", "SphereLab/nlu_models_in_FDA"]
    refs = [task.expert for task in family.suite.tasks.values()]
    assert f"| models on the Hub | {', '.join([family.suite.base, *refs])} |" in card

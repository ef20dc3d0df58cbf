"""Answers on the Hub's repositories against loops that know transformers, peft and datasets alone, and their files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import datasets
import peft
import pytest
import torch
import transformers
import yaml
from glue_files import COLUMNS
from hub.box import SUITES, Box, play
from hub.session import environment, run_session
from safetensors.torch import load_file

pytestmark = pytest.mark.slow

Answers = dict[str, list[Any]]
State = dict[str, torch.Tensor]
SCALE = 0.3
PROMPTS = {
    "cola": (
        "Indicate if the following sentence is grammatically correct or not: \"{sentence}\". Answere 'acceptable' or "
        "'unacceptable'."
    ),
    "mnli": (
        "Does the premise: '{premise}' logically imply, contradict, or is neutral to the hypothesis: '{hypothesis}'? "
        "Answere with 'entailment', 'contradiction', or 'neutral'."
    ),
    "mrpc": (
        "Are the following sentences '{sentence1}' and '{sentence2}' conveying the same meaning? Answere with 'yes' or "
        "'no'."
    ),
    "qnli": (
        "Given the context: '{sentence}', does the question '{question}' have an answer based on the information "
        "provided? Answer with 'yes' or 'no'."
    ),
    "qqp": "Do the questions '{question1}' and '{question2}' have the same intent? Answere with 'yes' or 'no'.",
    "rte": "Does the text: '{sentence1}' entail that '{sentence2}' is true? Provide 'yes' or 'no'.",
    "sst2": "Given the sentence '{sentence}', determine the sentiment. Is it positive or negative?",
    "stsb": (
        "Consider the sentences '{sentence1}' and '{sentence2}'. On a scale from 1 (completely different) to 5 "
        "(completely similar), rate the similarity."
    ),
}
TARGETS = {
    "cola": ["unacceptable", "acceptable"],
    "mnli": ["entailment", "neutral", "contradiction"],
    "mrpc": ["no", "yes"],
    "qnli": ["yes", "no"],
    "qqp": ["no", "yes"],
    "rte": ["yes", "no"],
    "sst2": ["negative", "positive"],
}
"""Prompts and answers that FusionBench trained the experts on, its slip "Answere" included."""


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Box]:
    with play(tmp_path_factory.mktemp("hub")) as played:
        yield played


def ask_featcal(box: Box, suite: str, home: Path, *models: str) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Return the rows of answers by model and task, of the command line with the Hub of the box."""
    box.stock(suite)
    words = ["evaluate", suite, "--json", "--answers", *(word for one in models for word in ("--model", one))]
    ((status, out, err),) = run_session([words], environment(box.address, home), home)
    assert status == 0, err[-2000:]
    found = json.loads(out)["models"]
    return {
        name: {task: rows["answers"] for task, rows in one["tasks"].items()}
        for name, one in zip(models, found, strict=True)
    }


def experts_of(suite: str) -> dict[str, str]:
    return {
        task: one["expert"] for task, one in yaml.safe_load((SUITES / f"{suite}.yaml").read_text())["tasks"].items()
    }


def folder_of(box: Box, model: str) -> Path:
    owner, name, *inside = model.split("/")
    return Path(box.hub.root, "models", owner, name, "main", *inside)


def rows_of(box: Box, data: str, files: str) -> datasets.Dataset:
    """Return rows of a data set, read from its Parquet files."""
    found = sorted(map(str, (box.hub.root / "datasets" / data / "main").glob(files)))
    cache = str(box.hub.root.parent / "read")
    return datasets.load_dataset("parquet", data_files=found, split="train", cache_dir=cache)


def glue(box: Box, task: str) -> datasets.Dataset:
    return rows_of(box, "nyu-mll/glue", f"{task}/validation{'_matched' if task == 'mnli' else ''}-*")


def merge(base: Mapping[str, torch.Tensor], experts: list[State]) -> State:
    """Return base + 0.3 Σ (expert − base) in float64, of the tensors that every expert has."""
    shared = [name for name, one in base.items() if one.is_floating_point() and all(name in own for own in experts)]
    assert shared
    wide = {name: base[name].double() for name in shared}
    return {
        name: (one + SCALE * sum(own[name].double() - one for own in experts)).float() for name, one in wide.items()
    }


def texts_of(rows: list[dict[str, Any]]) -> list[Any]:
    return [row["said"] for row in rows]


# ----------------------------------------------------------------------------------------------------------- CLIP


def load_clip(base: Path, tower: State) -> Any:
    """Return the whole model of the pickled base, with a vision tower in place of its own."""
    model = transformers.CLIPModel(transformers.CLIPConfig.from_pretrained(base)).eval()
    assert not list(base.glob("*.safetensors"))
    state = {**torch.load(base / "pytorch_model.bin", weights_only=True), **tower}
    known = model.state_dict().keys()
    model.load_state_dict({name: one for name, one in state.items() if name in known})
    return model


@torch.no_grad()
def classify(model: Any, base: Path, entry: Mapping[str, Any], rows: datasets.Dataset) -> torch.Tensor:
    """Return the cosine of every picture with every class, a class being the mean of its prompts."""
    tokenizer = transformers.CLIPTokenizer.from_pretrained(base)
    classes = []
    for name in entry["classes"]:
        prompts = tokenizer([one.format(name) for one in entry["templates"]], padding=True, return_tensors="pt")
        pooled = model.text_projection(model.text_model(**prompts).pooler_output)
        classes.append(torch.nn.functional.normalize(pooled, dim=-1).mean(0))
    processor = transformers.CLIPImageProcessor.from_pretrained(base)
    pictures = processor([one.convert("RGB") for one in rows["image"]], return_tensors="pt")
    features = model.visual_projection(model.vision_model(pictures["pixel_values"]).pooler_output)
    normed = torch.nn.functional.normalize(torch.stack(classes), dim=-1)
    return torch.nn.functional.normalize(features, dim=-1) @ normed.T


def test_zero_shot_answers_of_a_pickled_clip(box: Box, tmp_path: Path) -> None:
    suite, tasks = "clip-vit-base-patch32-ta8", ("eurosat", "svhn", "mnist", "gtsrb")
    found = ask_featcal(box, suite, tmp_path, "base", "merged", "expert")
    catalogue = yaml.safe_load((SUITES / "tasks" / "pictures.yaml").read_text("utf-8"))
    base = folder_of(box, "openai/clip-vit-base-patch32")
    towers = {task: load_file(folder_of(box, ref) / "model.safetensors") for task, ref in experts_of(suite).items()}
    own = torch.load(base / "pytorch_model.bin", weights_only=True)
    models = {"base": {}, "merged": merge(own, [*towers.values()])}
    differ, several = 0, set()
    for task in tasks:
        test = catalogue[task]["test"]
        rows = rows_of(box, test["hub"], f"{test.get('config', 'mnist' if task == 'mnist' else 'data')}/test-*")
        for name, tower in {**models, "expert": towers[task]}.items():
            cosines = classify(load_clip(base, tower), base, catalogue[task], rows)
            said = texts_of(found[name][task])
            assert [row["right"] for row in found[name][task]] == rows["label"]
            for cosine, answer in zip(cosines, said, strict=True):
                several.add(answer)
                differ += int(cosine.argmax()) != answer
                assert cosine.max() - cosine[answer] < 1e-4  # a tie at most: featcal scales pictures by torchvision
    assert differ <= 2
    assert len(several) > 5


# ------------------------------------------------------------------------------------------------------------- T5


@torch.no_grad()
def write_answers(model: Any, tokenizer: Any, prompts: list[str]) -> list[str]:
    given = tokenizer(prompts, padding=True, return_tensors="pt")
    written = model.eval().generate(**given, max_new_tokens=10, do_sample=False)
    return tokenizer.batch_decode(written, skip_special_tokens=True)


def assert_written_alike(box: Box, suite: str, home: Path, load_expert: Callable[[Path, str], Any]) -> None:
    """Compare prompts' answers of merged and experts, and the right ones, on all eight tasks."""
    found = ask_featcal(box, suite, home, "merged", "expert")
    references = experts_of(suite)
    base = folder_of(box, yaml.safe_load((SUITES / f"{suite}.yaml").read_text())["base"])
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    models = {task: load_expert(base, ref) for task, ref in references.items()}
    merged = transformers.T5ForConditionalGeneration.from_pretrained(base)
    states = [one.state_dict() for one in models.values()]
    merged.load_state_dict({**merged.state_dict(), **merge(load_file(base / "model.safetensors"), states)})
    several = set()
    for task, expert in models.items():
        rows = [*glue(box, task)]
        prompts = [PROMPTS[task].format(**row) for row in rows]
        right = [f"{row['label']:.1f}" if task == "stsb" else TARGETS[task][row["label"]] for row in rows]
        for name, model in (("merged", merged), ("expert", expert)):
            assert texts_of(found[name][task]) == write_answers(model, tokenizer, prompts), (name, task)
            assert [row["right"] for row in found[name][task]] == right
            several |= {*texts_of(found[name][task])}
    assert len(several) > 10


def test_answers_of_flan_t5(box: Box, tmp_path: Path) -> None:
    def load(_: Path, ref: str) -> Any:
        return transformers.T5ForConditionalGeneration.from_pretrained(folder_of(box, ref))

    assert_written_alike(box, "flan-t5-base-glue", tmp_path, load)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:Input and output embeddings:UserWarning")  # of peft
def test_answers_of_adapters(box: Box, tmp_path: Path) -> None:
    def load(base: Path, ref: str) -> Any:
        model = transformers.T5ForConditionalGeneration.from_pretrained(base)
        return peft.PeftModel.from_pretrained(model, folder_of(box, ref.split("+")[1])).merge_and_unload()

    assert_written_alike(box, "flan-t5-large-glue-lora16", tmp_path, load)


# ---------------------------------------------------------------------------------------------------- classifiers


@torch.no_grad()
def decide(model: Any, tokenizer: Any, rows: list[dict[str, Any]], columns: tuple[str, ...]) -> list[int]:
    """Return the class of every row, each alone and so without padding."""
    given = (tokenizer(*(row[one] for one in columns), return_tensors="pt") for row in rows)
    return [int(model.eval()(**one).logits.argmax()) for one in given]


@pytest.mark.parametrize(("suite", "prefix"), [("roberta-base-glue", ""), ("gpt2-glue", "transformer.")])
def test_decisions_of_classifiers(suite: str, prefix: str, box: Box, tmp_path: Path) -> None:
    found = ask_featcal(box, suite, tmp_path, "merged", "expert")
    references = experts_of(suite)
    base = folder_of(box, yaml.safe_load((SUITES / f"{suite}.yaml").read_text())["base"])
    own = {f"{prefix}{name}": one for name, one in load_file(base / "model.safetensors").items()}
    states = [load_file(folder_of(box, ref) / "model.safetensors") for ref in references.values()]
    body = merge(own, states)
    several = set()
    for task, ref in references.items():
        rows = [*glue(box, task)]
        model = transformers.AutoModelForSequenceClassification.from_pretrained(folder_of(box, ref))
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder_of(box, ref))
        for name, tensors in (("expert", {}), ("merged", body)):
            model.load_state_dict({**model.state_dict(), **tensors})
            assert texts_of(found[name][task]) == decide(model, tokenizer, rows, COLUMNS[task]), (name, task)
            assert [row["right"] for row in found[name][task]] == [row["label"] for row in rows]
            several.add((task, *texts_of(found[name][task])))
    assert len(several) > len(references)

"""The ready suites and the task catalogue: complete, unchanged, and open with small stand-ins of the same names."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from tiny_clip import SIDE, clip_inputs, write_base, write_expert
from tiny_decoders import ROWS, tiny_decoder
from tiny_text import write_text_base, write_text_expert

from featcal.family.opening import open_family
from featcal.samples.sources import draw_samples
from featcal.suite.calibration_options import CalibrationConfig
from featcal.suite.schema import load_suite, suite_from_dict, task_catalogue
from featcal.suite.template import fill_template
from featcal.system.errors import InputError
from featcal.system.resources import embedded_suites, ready_suites

CLIP = {
    f"clip-vit-{size}-ta{count}": count
    for size in ("base-patch32", "base-patch16", "large-patch14")
    for count in (8, 14, 20)
}
MERGEBENCH = (
    *(f"mergebench-gemma-2-{size}" for size in ("2b", "2b-it", "9b", "9b-it")),
    *(f"mergebench-llama-{size}-pretrained" for size in ("3.2-3b", "3.1-8b")),
)
"""Those of all five domains; the paper has three, of the Llama-Instruct models alone."""
TASKS = {
    **CLIP,
    **dict.fromkeys(MERGEBENCH, 5),
    "flan-t5-base-glue": 8,
    "flan-t5-large-glue-lora16": 8,
    "gpt2-glue": 7,
    "roberta-base-glue": 7,
    "mergebench-llama-3.2-3b": 3,
    "mergebench-llama-3.1-8b": 3,
}
# classes, templates and hash of both: the experts were trained on these very prompts
PROMPTS = {
    "sun397": (397, 2, "19b4780d8a38"),
    "stanford-cars": (196, 8, "0d22bd2df28f"),
    "resisc45": (45, 18, "3642784ea2c9"),
    "eurosat": (10, 3, "06ba55474f15"),
    "svhn": (10, 1, "2886561c388e"),
    "gtsrb": (43, 3, "b90ab45ae000"),
    "mnist": (10, 1, "2886561c388e"),
    "dtd": (47, 8, "e9ba80ec3b0c"),
    "oxford_flowers102": (102, 1, "5b7211584a8f"),
    "pcam": (2, 1, "39c58d87bca4"),
    "fer2013": (7, 6, "c6edc066992a"),
    "oxford-iiit-pet": (37, 1, "5858bf0dbe1a"),
    "stl10": (10, 2, "46a16cf8f0dd"),
    "cifar100": (100, 18, "ba9674e7989f"),
    "cifar10": (10, 18, "8fd45ee96f83"),
    "food101": (101, 1, "7e638cafebbb"),
    "fashion_mnist": (10, 2, "4b4aa0544632"),
    "emnist_letters": (26, 1, "0a38a47cb23e"),
    "kmnist": (10, 1, "41688576aa2e"),
    "rendered-sst2": (2, 1, "a6c32e68a3b2"),
}


def prompt_hash(task: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps([task["classes"], task["templates"]]).encode()).hexdigest()[:12]


@pytest.mark.parametrize("name", TASKS)
def test_every_ready_suite_loads(name: str) -> None:
    suite = load_suite(name)
    assert (suite.name, len(suite.tasks)) == (name, TASKS[name])
    assert suite.tasks.keys() <= {task.removeprefix("glue-").removeprefix("mergebench-") for task in task_catalogue()}
    assert "calibration" in suite.splits()
    assert all(
        suite.base.split("/")[1].lower().removesuffix("-instruct") in t.expert.lower() for t in suite.tasks.values()
    )
    CalibrationConfig(**suite.calibration.explicit_options())
    assert suite.unpinned_data()


def test_they_are_all_and_none_is_called_like_an_embedded_one() -> None:
    assert ready_suites().keys() == TASKS.keys()
    assert not ready_suites().keys() & embedded_suites().keys()


def test_settings_of_the_paper() -> None:
    given = {name: load_suite(name).calibration.explicit_options() for name in TASKS}
    values = {name: tuple(map(one.get, ("lam", "rho", "alpha", "samples"))) for name, one in given.items()}
    assert {values[name] for name in CLIP} == {(0.05, 2.0, 0.3, 256)}
    assert values["flan-t5-base-glue"] == values["flan-t5-large-glue-lora16"] == (1e-5, 2.0, 0.6, 256)
    assert values["gpt2-glue"] == values["roberta-base-glue"] == (None, None, None, 256)  # the paper has none
    assert values["mergebench-llama-3.2-3b"] == (1e-5, 0.5, 0.15, 256)
    assert values["mergebench-llama-3.1-8b"] == (3.0, 0.5, 0.15, 256)
    assert {values[name] for name in MERGEBENCH} == {(None, 0.5, 0.15, 256)}


def test_mergebench_has_an_expert_of_the_base_for_every_domain() -> None:
    domains = ("coding", "math", "instruction", "multilingual", "safety")
    for name in MERGEBENCH:
        suite = load_suite(name)
        model = suite.base.split("/")[1]
        assert {task: one.expert for task, one in suite.tasks.items()} == {
            domain: f"MergeBench/{model}_{domain}" for domain in domains
        }
        data = [str(one.calibration.hub) for one in suite.tasks.values() if one.calibration]
        assert data == [f"MergeBench/{domain}_val" for domain in domains]


def test_the_smaller_clip_suites_are_the_beginnings_of_the_larger() -> None:
    for name in CLIP:
        larger = list(load_suite(name.rsplit("-", 1)[0] + "-ta20").tasks)
        assert list(load_suite(name).tasks) == larger[: CLIP[name]]


def test_prompts_are_unchanged() -> None:
    pictures = {name: task for name, task in task_catalogue().items() if "classes" in task}
    found = {n: (len(t["classes"]), len(t["templates"]), prompt_hash(t)) for n, t in pictures.items()}
    assert found == PROMPTS


def test_every_entry_of_the_catalogue_is_valid() -> None:
    tasks = {name: {"use": name, "expert": "e"} for name in task_catalogue()}
    suite = suite_from_dict({"name": "s", "base": "b", "merged": "m", "tasks": tasks}, Path())
    metrics = {name: task.metric for name, task in suite.tasks.items()}
    assert {name for name, metric in metrics.items() if metric == "spearman"} == {"glue-stsb"}
    classes = {f"glue-{task}-classes" for task in load_suite("gpt2-glue").tasks}
    assert {name for name, metric in metrics.items() if metric == "accuracy"} == PROMPTS.keys() | classes


@pytest.mark.parametrize(
    ("task", "row", "text"),
    [
        (
            "cola",
            {"sentence": "They sang."},
            'Indicate if the following sentence is grammatically correct or not: "They sang.". '
            "Answere 'acceptable' or 'unacceptable'.",
        ),
        (
            "mnli",
            {"premise": "A", "hypothesis": "B"},
            "Does the premise: 'A' logically imply, contradict, or is neutral to the hypothesis: 'B'? "
            "Answere with 'entailment', 'contradiction', or 'neutral'.",
        ),
        (
            "stsb",
            {"sentence1": "A", "sentence2": "B"},
            "Consider the sentences 'A' and 'B'. On a scale from 1 (completely different) to 5 (completely similar), "
            "rate the similarity.",
        ),
    ],
)
def test_prompts_of_glue(task: str, row: dict[str, Any], text: str) -> None:
    source = load_suite("flan-t5-base-glue").task(task).calibration
    assert source is not None
    assert fill_template(str(source.input), row) == text


def test_own_keys_take_the_place_of_the_entrys() -> None:
    task = {"use": "dtd", "expert": "mine", "templates": ["{}!"], "test": {"imagefolder": "x"}}
    dtd = suite_from_dict({"name": "s", "base": "b", "merged": "m", "tasks": {"a": task}}, Path()).task("a")
    assert (dtd.expert, dtd.templates, len(dtd.classes or ())) == ("mine", ("{}!",), 47)
    assert dtd.test is not None
    assert dtd.calibration is not None
    assert (dtd.test.imagefolder, dtd.calibration.hub) == ("x", "tanganke/dtd")


def test_unknown_entries_suggest() -> None:
    tasks = {"a": {"use": "sun398", "expert": "e"}, "b": {"use": ["dtd"], "expert": "e"}}
    with pytest.raises(InputError) as caught:
        suite_from_dict({"name": "s", "base": "b", "merged": "m", "tasks": tasks}, Path())
    assert len(caught.value.problems) == 2
    assert "tasks.a.use: no task 'sun398' in the catalogue. Did you mean 'sun397'?" in str(caught.value)


def test_an_entry_needs_an_expert() -> None:
    with pytest.raises(InputError, match=r"tasks\.a\.expert: Field required"):
        suite_from_dict({"name": "s", "base": "b", "merged": "m", "tasks": {"a": {"use": "dtd"}}}, Path())


# ------------------------------------------------------------------------------------------------- stand-ins


@pytest.fixture
def in_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Where a model has to be written so that the Hub's cache has it."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))

    def folder(name: str) -> Path:
        place = tmp_path / "hub" / f"models--{name.replace('/', '--')}"
        (place / "refs").mkdir(parents=True)
        (place / "refs" / "main").write_text("0" * 40)
        (place / "snapshots").mkdir()
        return place / "snapshots" / ("0" * 40)

    return folder


def test_clip_suite_opens_with_stand_ins(in_cache: Callable[[str], Path]) -> None:
    suite = load_suite("clip-vit-base-patch32-ta8")
    base_folder = in_cache(suite.base)
    base = write_base(base_folder)
    for seed, task in enumerate(suite.tasks.values()):
        write_expert(in_cache(task.expert), base, base_folder, seed, 0.1)
    family = open_family(suite, device="cpu")
    assert list(family.experts) == list(suite.tasks)
    assert family.base_folder == base_folder


def test_t5_suite_opens_with_stand_ins(in_cache: Callable[[str], Path]) -> None:
    suite = load_suite("flan-t5-base-glue")
    base = write_text_base(in_cache(suite.base), "t5")
    for seed, task in enumerate(suite.tasks.values()):
        write_text_expert(in_cache(task.expert), base, "t5", seed)
    family = open_family(suite, device="cpu")
    assert list(family.experts) == list(suite.tasks)
    assert family.adapter.modality == "seq2seq"


@pytest.mark.parametrize("name", MERGEBENCH)
def test_mergebench_opens_with_stand_ins(name: str, in_cache: Callable[[str], Path]) -> None:
    suite = load_suite(name)
    kind = "gemma2" if "gemma" in name else "llama"
    for number, ref in enumerate([suite.base, *(task.expert for task in suite.tasks.values())]):
        model = tiny_decoder(ROWS[kind])
        with torch.no_grad():
            model.model.norm.weight += number
        model.save_pretrained(in_cache(ref))
    family = open_family(suite, device="cpu")
    assert list(family.experts) == list(suite.tasks)
    assert (family.adapter.modality, len(list(family.adapter.blocks()))) == ("causal", 2)
    moved = {task: one.read(["model.norm.weight"])["model.norm.weight"] for task, one in family.experts.items()}
    base = family.base.read(["model.norm.weight"])["model.norm.weight"]
    assert [float((moved[task] - base).mean()) for task in suite.tasks] == [1.0, 2.0, 3.0, 4.0, 5.0]


@pytest.mark.parametrize(
    ("task", "row", "text", "answer"),
    [
        ("multilingual", {"inputs": "Q", "targets": "A"}, "### Instruction:\nQ\n\n### Response:\n", "A"),
        ("safety", {"prompt": "Q", "response": "A"}, "### Instruction:\nQ\n\n### Response:\n", "A"),
    ],
)
def test_columns_of_mergebench(task: str, row: dict[str, Any], text: str, answer: str) -> None:
    source = load_suite("mergebench-gemma-2-2b").task(task).calibration
    assert source is not None
    assert fill_template(str(source.input), row) == text
    assert fill_template(str(source.target), row) == answer


def test_a_missing_model_is_named(in_cache: Callable[[str], Path]) -> None:
    suite = load_suite("clip-vit-base-patch32-ta8")
    write_base(in_cache(suite.base))
    with pytest.raises(InputError, match="tanganke/clip-vit-base-patch32_gtsrb"):
        open_family(suite, device="cpu")


@pytest.fixture
def local_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for copies of ready suites beside data sets in folders of the same names."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    return tmp_path


@pytest.mark.filterwarnings("ignore")
def test_a_copy_of_a_suite_reads_folders_beside_it(local_data: Path, in_cache: Callable[[str], Path]) -> None:
    file = shutil.copy(ready_suites()["clip-vit-base-patch32-ta14"], local_data)
    picture = local_data / "x.png"
    Image.new("RGB", (SIDE, SIDE), (9, 9, 9)).save(picture)
    folder = local_data / "tanganke" / "dtd" / "data"
    folder.mkdir(parents=True)
    rows = [{"image": {"bytes": picture.read_bytes(), "path": None}, "label": label} for label in (46, 3)]
    for split in ("train", "test"):
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{split}-00000-of-00001.parquet")
    base = in_cache("openai/clip-vit-base-patch32")
    write_base(base)
    drawn = draw_samples(load_suite(file), "dtd", "test", None, 0, clip_inputs(base))
    assert drawn.labels is not None
    assert drawn.class_names is not None
    assert [drawn.class_names[label] for label in drawn.labels.tolist()] == ["zigzagged", "bubbly"]
    assert drawn.inputs["pixel_values"].shape == (2, 3, SIDE, SIDE)

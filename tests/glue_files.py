"""What the ready suites on GLUE fetch, as stand-ins: the Hub's cache, and GLUE's columns, splits and class names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import yaml
from tokenizers.pre_tokenizers import ByteLevel

from featcal import Suite
from featcal.formats.hub import hub_model
from featcal.schema.source import Source
from featcal.suite import Task

CLASSES = {
    "cola": ("unacceptable", "acceptable"),
    "mnli": ("entailment", "neutral", "contradiction"),
    "mrpc": ("not_equivalent", "equivalent"),
    "qnli": ("entailment", "not_entailment"),
    "qqp": ("not_duplicate", "duplicate"),
    "rte": ("entailment", "not_entailment"),
    "sst2": ("negative", "positive"),
}
COLUMNS = {
    "cola": ("sentence",),
    "mnli": ("premise", "hypothesis"),
    "mrpc": ("sentence1", "sentence2"),
    "qnli": ("question", "sentence"),
    "qqp": ("question1", "question2"),
    "rte": ("sentence1", "sentence2"),
    "sst2": ("sentence",),
}
LETTERS = sorted(ByteLevel.alphabet())
"""Tokens of single bytes, as GPT-2 and RoBERTa write them in their files."""
COMMIT = "0" * 40
ROWS = 6


def cached(ref: str) -> Path:
    """Where the Hub's client leaves a model of the branch main behind."""
    model = hub_model(ref)
    assert model is not None
    place = Path(huggingface_hub.constants.HF_HUB_CACHE) / f"models--{model.repo.replace('/', '--')}"
    (place / "refs").mkdir(parents=True, exist_ok=True)
    (place / "refs" / "main").write_text(COMMIT)
    folder = place / "snapshots" / COMMIT / model.folder
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def cached_models(suite: Suite) -> dict[str, Path]:
    """The places of a suite's models by task, and of "base"."""
    return {"base": cached(suite.base), **{name: cached(task.expert) for name, task in suite.tasks.items()}}


def rows_of(task: str, split: str) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(len(task) * len(split))

    def text() -> str:
        length = int(torch.randint(3, 20, (), generator=generator))
        return "".join(chr(97 + int(i)) for i in torch.randint(26, (length,), generator=generator))

    label = [-1 if split == "test" else i % len(CLASSES[task]) for i in range(ROWS)]
    return [{**{column: text() for column in COLUMNS[task]}, "label": label[i], "idx": i} for i in range(ROWS)]


def write_glue(folder: Path) -> None:
    """A folder of Parquet files for every configuration, listed in its card."""
    listed = []
    for task, classes in CLASSES.items():
        (folder / task).mkdir(parents=True)
        matched = ("_matched", "_mismatched") if task == "mnli" else ("",)
        splits = ("train", *(f"{kind}{end}" for kind in ("validation", "test") for end in matched))
        label = {"names": list(classes), "_type": "ClassLabel"}
        texts = {column: {"dtype": "string", "_type": "Value"} for column in COLUMNS[task]}
        features = {**texts, "label": label, "idx": {"dtype": "int32", "_type": "Value"}}
        described = {"huggingface": json.dumps({"info": {"features": features}})}
        for split in splits:
            table = pa.Table.from_pylist(rows_of(task, split.partition("_")[0])).replace_schema_metadata(described)
            pq.write_table(table, folder / task / f"{split}-00000-of-00001.parquet")
        files = [{"split": split, "path": f"{task}/{split}-*"} for split in splits]
        listed.append({"config_name": task, "data_files": files})
    (folder / "README.md").write_text(f"---\n{yaml.safe_dump({'configs': listed})}---\n")


def from_files(suite: Suite) -> Suite:
    """The same suite with the files of its data sets in their place, which need no package to be read."""

    def source(task: str, one: Source | None) -> Source | None:
        place = {"hub": None, "config": None, "parquet": f"nyu-mll/glue/{task}"}
        return None if one is None else one.model_copy(update=place)

    def task(name: str, one: Task) -> Task:
        return one.model_copy(update={split: source(name, one.source(split)) for split in ("calibration", "test")})

    tasks = {name: task(name, one) for name, one in suite.tasks.items()}
    return suite.model_copy(update={"tasks": tasks})

"""Rows of a text set, split for training, calibration, choice and test."""

from __future__ import annotations

import gzip
import json
import random
import zlib
from dataclasses import dataclass
from pathlib import Path

import yaml

Row = dict[str, str]
SPLITS = ("calibration", "validation", "test")


@dataclass(frozen=True)
class Texts:
    """Rows of one set: what trains, what chooses, what calibrates and what is held back, disjoint."""

    labels: tuple[str, ...]
    train: tuple[Row, ...]
    validation: tuple[Row, ...]
    calibration: tuple[Row, ...]
    test: tuple[Row, ...]


def read(folder: Path, task: str, validation: int, calibration: int, test: int | None = None) -> Texts:
    """A set of the data folder, its training rows split three ways by a shuffle of its name.

    Texts that stand in several rows are in the first of them alone. `test` keeps so many of the held-back rows,
    evenly spread over them; None keeps all.
    """
    with gzip.open(folder / f"{task}.jsonl.gz", "rt", encoding="utf-8") as lines:
        every = {texts(row): row for row in reversed([json.loads(line) for line in lines])}
    rows = list(reversed(every.values()))
    held_back = [row for row in rows if row["split"] == "test"]
    rest = [row for row in rows if row["split"] == "train"]
    random.Random(zlib.crc32(task.encode())).shuffle(rest)
    held = calibration + validation
    count = min(test or len(held_back), len(held_back))
    kept = [held_back[i * len(held_back) // count] for i in range(count)]
    parts = (rest[held:], rest[calibration:held], rest[:calibration], kept)
    return Texts(tuple(sorted({row["label"] for row in rows})), *map(tuple, parts))


def texts(row: Row) -> tuple[str, ...]:
    """The text of a row, or both of a pair."""
    return (row["text"],) if "text" in row else (row["text_a"], row["text_b"])


def write_splits(one: Texts, file: Path) -> None:
    """A copy of all rows but the training ones, which say in `split` what they are for."""
    lines = [json.dumps(row | {"split": name}) for name in SPLITS for row in getattr(one, name)]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(gzip.compress("\n".join([*lines, ""]).encode(), mtime=0))


def write_suite(file: Path, name: str, description: str, tasks: dict[str, object]) -> None:
    """A suite of a base in `base`, merged by Task Arithmetic at 0.3."""
    merged = {"method": "task-arithmetic", "scale": 0.3}
    content = {"name": name, "description": description, "base": "base", "merged": merged, "tasks": tasks}
    file.write_text(yaml.safe_dump(content, sort_keys=False))

"""Every problem of a suite at once, before anything is computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from featcal.errors import InputError
from featcal.family import Family, open_family
from featcal.suite import SPLITS, Suite
from featcal.tasks.sources import open_pool


@dataclass(frozen=True)
class Preflight:
    """What a check found: problems, and what there is to work with if there are none."""

    suite: str
    problems: tuple[str, ...]
    family: Family | None

    def to_json(self) -> dict[str, Any]:
        """The document of `featcal check --json`."""
        document: dict[str, Any] = {"suite": self.suite, "ok": not self.problems, "problems": list(self.problems)}
        if self.family is not None:
            document |= describe(self.family)
        return document


def check(suite: Suite) -> Preflight:
    """Open every model from its headers and draw two samples from every source; collect all problems."""
    problems: list[str] = []
    family = None
    try:
        family = open_family(suite, device="cpu")
    except InputError as error:
        problems += error.problems
    for task, spec in suite.tasks.items():
        for split in SPLITS:
            source = spec.source(split)
            if source is None:
                continue
            try:
                if family is not None:
                    family.samples(task, split, 2, seed=0)
                else:
                    open_pool(source, split, suite.root, f"task '{task}', {split} samples")
            except InputError as error:
                problems += error.problems
    return Preflight(suite.name, tuple(problems), family)


def describe(family: Family) -> dict[str, Any]:
    """Size of the models and what a calibration will hold in memory and write, from headers alone."""
    info = family.merged.info
    tower = [info[name] for name in family.adapter.tower]
    parameters = sum(_count(one.shape) for one in tower)
    stored = sum(_count(one.shape) * one.dtype.itemsize for one in info.values())
    blocks = family.adapter.blocks()
    largest = max(sum(_count(info[name].shape) for name in block.names) for block in blocks)
    return {
        "family": family.adapter.family,
        "blocks": len(blocks),
        "parameters": parameters,
        "dtypes": sorted({str(one.dtype).removeprefix("torch.") for one in tower}),
        "tasks": len(family.experts),
        "bytes_written": stored,
        "bytes_of_weights_in_memory": 3 * 4 * largest,
    }


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for side in shape:
        count *= side
    return count

"""Record what there is to record on a GPU, the day there is one: `python benchmarks/gpu.py --out FOLDER`.

In at most `LIMIT` seconds, part after part, each in a process of its own, of which any may fail: the calibration stage
of CLIP ViT-B/32 with 8 experts by recipe, precision and samples (`b32.py`), attribution of drift and generation beside
the CPU's numbers, whole commands (`whole.py`), and tests that walk the path of a GPU. The folder then has `gpu.json`
and `gpu.md`, a page with card, versions and commands. The goal is 3 s for 256 samples in "exact" and 1.5 s in "fast".

`--device cpu --small` rehearses it. `--dry-run` needs no GPU either: it calibrates a small tower on a pretended one,
which fails where tensors of two places meet, and prints for every recipe what crosses the bus per block, how often the
processor waits for a number, how much lies on the device at most, and how far the weights are from the CPU's.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import families
import measure
from torch import Tensor

from featcal.calibration.calibrate import calibrate_family, config_for
from featcal.family.opening import open_family
from featcal.suite.calibration_options import PRECISIONS, RECIPES
from featcal.suite.schema import load_suite

sys.path.insert(0, str(measure.BENCHMARKS.parent / "tests" / "fixtures"))
from pretended_device import PretendedDevice

LIMIT = 8 * 60
TASKS, SAMPLES, GOALS = 8, (256, 32), {"exact": 3.0, "fast": 1.5}
STAGE = "calibration stage"
"""Begins the name of its parts."""
CARD = "cuda:0"
DRY = families.ClipShape(width=64, hidden=128, blocks=2, heads=2, patch=8, image=32)
DRY_TASKS, DRY_SAMPLES = 2, 8
HERE = measure.BENCHMARKS
TESTS = ("tests/models/test_activations.py", "tests/testing/test_pretended_device.py")
KEPT = 2000
"""Characters of a failed part's last words."""


@dataclass(frozen=True)
class Part:
    """One part of the record: a command that prints a JSON document, or nothing that counts but its exit status."""

    name: str
    words: Sequence[str]
    """Given to Python."""
    beside: Sequence[str] = ()
    """Command line of the CPU run whose numbers are compared; empty to compare nothing."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("gpu"), help="folder for gpu.json and gpu.md")
    parser.add_argument("--device", default=CARD)
    parser.add_argument("--small", action="store_true", help="small models, to try the script itself")
    parser.add_argument("--dry-run", action="store_true", help="a small tower on a pretended GPU, printed")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "featcal-benchmarks")
    options = parser.parse_args()
    if options.dry_run:
        suite = families.clip_suite(options.work, DRY, DRY_TASKS, DRY_SAMPLES)
        measure.show({"rows": [walk(suite, recipe, precision) for recipe in RECIPES for precision in PRECISIONS]})
    else:
        options.out.mkdir(parents=True, exist_ok=True)
        found: dict[str, Any] = {"machine": measure.machine(options.device), "parts": []}
        for one in run_parts(parts(options), LIMIT):
            found["parts"].append(one)
            measure.say(f"{one['name']}: {one['ended']} after {one['seconds']:.0f} s")
            # After every part: what is known stays where the rest is cut off.
            (options.out / "gpu.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
            (options.out / "gpu.md").write_text(page(found), encoding="utf-8")


def parts(options: argparse.Namespace) -> list[Part]:
    """Return all parts, what matters most first."""
    same = ["--device", options.device, "--work", str(options.work)]
    largest, *others = (8,) if options.small else SAMPLES
    drift = ["-m", "featcal", "drift", "clip-mini", "--attribution", "--eval-samples", "8", "--json", "--device"]
    answers = ["-m", "featcal", "evaluate", "lm-mini", "--eval-samples", "32", "--json", "--device"]
    whole = [str(HERE / "whole.py"), *same, "--states", "warm"]
    tests = ["-m", "pytest", "-q", "-m", "", *TESTS]
    if options.small:
        whole, tests = [*whole, "--small", "--commands", "drift"], [*tests, "-k", "pretended"]
    return [
        *_stages(options, largest, same),
        Part("attribution", [*drift, options.device], [*drift, "cpu"]),
        Part("generation", [*answers, options.device], [*answers, "cpu"]),
        Part("whole commands", whole),
        Part("tests", tests),
        *(part for samples in others for part in _stages(options, samples, same)),
    ]


def _stages(options: argparse.Namespace, samples: int, same: Sequence[str]) -> Iterator[Part]:
    """Yield the calibration stage by precision and recipe, at so many samples of each task."""
    sizes = ["--shape", "small", "--tasks", "2"] if options.small else ["--tasks", str(TASKS)]
    for precision, recipe in product(PRECISIONS, RECIPES[:1] if options.small else RECIPES):
        words = [str(HERE / "b32.py"), *sizes, "--samples", str(samples), "--precision", precision, "--recipe", recipe]
        yield Part(f"{STAGE}, {recipe}", [*words, *same])


def run_parts(every: Sequence[Part], limit: float) -> Iterator[dict[str, Any]]:
    """Run parts one after the other within so many seconds; yield for each how it ended and what it found."""
    end = time.monotonic() + limit
    for part in every:
        started = time.monotonic()
        ended, document = _run(part.words, end)
        one = {"name": part.name, "command": _shown(part.words), "ended": ended, "found": document}
        if part.beside and document is not None:
            ended, other = _run(part.beside, end)
            one["largest_difference"] = None if other is None else largest_difference(document, other)
        yield one | {"seconds": time.monotonic() - started}


def _run(words: Sequence[str], end: float) -> tuple[str, Any]:
    """Return how a command ended, "well" or its last words, and the JSON document that it printed, if any."""
    try:
        left = max(end - time.monotonic(), 0.1)
        done = subprocess.run(
            [sys.executable, *words], cwd=HERE.parent, capture_output=True, text=True, timeout=left, check=False
        )
    except subprocess.TimeoutExpired:
        return "out of time", None
    if done.returncode != 0:
        return f"status {done.returncode}: {(done.stderr or done.stdout)[-KEPT:]}", None
    try:
        return "well", json.loads(done.stdout)
    except ValueError:
        return "well", None


def _shown(words: Sequence[str]) -> str:
    """Return a command without places of this machine."""
    work = words.index("--work") if "--work" in words else len(words)
    return " ".join(["python", *words[:work], *words[work + 2 :]]).replace(f"{HERE.parent}/", "")


def largest_difference(one: Any, other: Any) -> float:
    """Return the largest difference of two numbers at the same place of two documents, relative to the larger; infinite
    where the documents are not of one form."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return max((largest_difference(one[key], other[key]) for key in one), default=0.0)
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return max((largest_difference(*both) for both in zip(one, other, strict=True)), default=0.0)
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) / max(abs(one), abs(other), 1e-6)
    return 0.0 if one == other else math.inf


def page(found: Mapping[str, Any]) -> str:
    """Return the page of a record: card and versions, parts with their commands, the calibration stage by row."""
    machine = found["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    lines = ["# On a GPU", "", f"{machine['gpu'] or machine['cpu']}, CUDA {machine['cuda']}; {versions}.", ""]
    lines += ["| part | command | ended | seconds | furthest from the CPU |", "|---|---|---|---:|---:|"]
    for part in found["parts"]:
        ended, far = " ".join(part["ended"].split())[-200:].replace("|", "/"), part.get("largest_difference")
        row = (
            part["name"],
            f"`{part['command']}`",
            ended,
            f"{part['seconds']:.0f}",
            "" if far is None else f"{far:.1e}",
        )
        lines.append(f"| {' | '.join(row)} |")
    lines += ["", "| recipe | precision | samples | s | goal, s | of the roofline | GB on the card |"]
    lines += ["|---|---|---:|---:|---:|---:|---:|"]
    for part in found["parts"]:
        row = part["found"]
        if row is None or not part["name"].startswith(STAGE):
            continue
        goal = GOALS[row["precision"]] if row["samples"] == max(SAMPLES) else ""
        held = "" if row["cuda_peak_bytes"] is None else f"{row['cuda_peak_bytes'] / 1e9:.2f}"
        recipe, fraction = part["name"].removeprefix(f"{STAGE}, "), f"{row['roofline']['fraction']:.2f}"
        cells = [recipe, row["precision"], row["samples"], f"{row['seconds']:.2f}", goal, fraction, held]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    lines += ["", "| command | s | of the ideal |", "|---|---:|---:|"]
    runs = (part["found"]["runs"] for part in found["parts"] if part["found"] and part["name"] == "whole commands")
    for row in (row for rows in runs for row in rows):
        fraction = "" if row["fraction"] is None else f"{row['fraction']:.2f}"
        lines.append(f"| {row['command']} | {row['wall']:.1f} | {fraction} |")
    return "\n".join(lines) + "\n"


def walk(suite: Path, recipe: str, precision: str) -> dict[str, Any]:
    """Calibrate on a pretended GPU and on the CPU; return what crossed the bus, and how far the weights are apart.

    Raises:
        RuntimeError: tensors of the GPU and of the CPU met in one operation.
    """
    expected = _calibrated(suite, "cpu", recipe, precision)
    with PretendedDevice(CARD) as card:
        found = _calibrated(suite, CARD, recipe, precision)
    return {
        "recipe": recipe,
        "precision": precision,
        "up_bytes_per_block": card.bus.up / DRY.blocks,
        "down_bytes_per_block": card.bus.down / DRY.blocks,
        "waits_per_block": sum(card.bus.waits.values()) / DRY.blocks,
        "device_peak_bytes": card.peak,
        "largest_difference": max(
            float((found[name].double() - tensor.double()).norm() / tensor.double().norm())
            for name, tensor in expected.items()
        ),
    }


def _calibrated(suite: Path, device: str, recipe: str, precision: str) -> Mapping[str, Tensor]:
    family = open_family(load_suite(suite), device, precision)
    made = calibrate_family(family, config_for(family, samples=DRY_SAMPLES, recipe=recipe, precision=precision))
    tensors = made.weights.read([name for block in family.adapter.blocks() for name in block.names])
    return {name: tensor.cpu() for name, tensor in tensors.items()}


if __name__ == "__main__":
    main()

"""Record what there is to record on a GPU, the day there is one: `python benchmarks/gpu.py --out gpu.json`.

CLIP ViT-B/32 with 8 experts: every recipe and precision at 32 and 256 samples per task, each run in a process of its
own, with its roofline, device memory and energy (`b32.py`). The goal is 3 s for 256 samples in "fast" on an H200.

`--dry-run` needs no GPU: it calibrates a small tower on a pretended one, which fails where tensors of two places meet,
and prints for every recipe what crosses the bus per block, how often the processor waits for a number, how much lies
on the device at most, and how far the weights are from the CPU's.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import b32
import families
import measure
from torch import Tensor

from featcal.calibration.calibrate import calibrate, config_for
from featcal.family.opening import open_family
from featcal.suite.calibration_options import PRECISIONS, RECIPES
from featcal.suite.schema import load_suite
from featcal.testing.pretended_device import PretendedDevice

TASKS, SAMPLES, GOAL = 8, (32, 256), 3.0
CARD = "cuda:0"
DRY = families.ClipShape(width=64, hidden=128, blocks=2, heads=2, patch=8, image=32)
DRY_TASKS, DRY_SAMPLES = 2, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="file for the rows; left out, they are printed alone")
    parser.add_argument("--dry-run", action="store_true", help="a small tower on a pretended GPU")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "featcal-benchmarks")
    options = parser.parse_args()
    if options.dry_run:
        suite = families.clip_suite(options.work, DRY, DRY_TASKS, DRY_SAMPLES)
        rows = [walk(suite, recipe, precision) for recipe in RECIPES for precision in PRECISIONS]
    else:
        rows = record(options)
    if options.out:
        options.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    measure.show({"rows": rows})


def record(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return one row per size, precision and recipe, measured on the GPU of this machine."""
    rows = []
    for samples in SAMPLES:
        suite = families.clip_suite(options.work, families.B32, TASKS, samples)
        for precision in PRECISIONS:
            for recipe in RECIPES:
                asked = argparse.Namespace(
                    tasks=TASKS,
                    samples=samples,
                    precision=precision,
                    device=CARD,
                    threads=None,
                    recipe=recipe,
                    again=False,
                )
                row = {"recipe": recipe, **b32.one(suite, families.B32, asked)}
                if samples == max(SAMPLES) and precision == "fast":
                    row["goal_seconds"] = GOAL
                rows.append(row)
    return rows


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
    made = calibrate(family, config_for(family, samples=DRY_SAMPLES, recipe=recipe, precision=precision))
    tensors = made.weights.read([name for block in family.adapter.blocks() for name in block.names])
    return {name: tensor.cpu() for name, tensor in tensors.items()}


if __name__ == "__main__":
    main()

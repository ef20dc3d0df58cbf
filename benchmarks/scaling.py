"""How time grows with blocks, tasks and samples, and memory with experts: `python benchmarks/scaling.py`.

Prints JSON: for each quantity its points, the slope of the line through them and R². Times are the calibration stage
in this process, the least of a few interleaved rounds; memory is that of whole processes. Small widths by default,
`--full` takes B/32.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import families
import measure
import memory
import stage
import torch

from featcal.family.opening import open_family
from featcal.suite.calibration_options import CalibrationConfig
from featcal.suite.schema import load_suite


@dataclass(frozen=True)
class Point:
    """One size of the problem."""

    blocks: int
    tasks: int
    samples: int


GRID = {"blocks": (2, 4, 6, 8), "tasks": (2, 4, 6, 8), "samples": (32, 64, 96, 128)}
FULL_GRID = {"blocks": (3, 6, 9, 12), "tasks": (2, 4, 6, 8), "samples": (64, 96, 128, 160)}
"""Samples start where a task has more tokens than the widest layer: below, another and cheaper form is used."""
CENTRE, FULL_CENTRE = Point(4, 4, 64), Point(12, 4, 64)
EXPERTS = (2, 5, 10, 20)
KINDS = ("seconds", "cpu_seconds")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--full", action="store_true", help="widths of B/32")
    parser.add_argument("--precision", choices=["exact", "fast"], default="exact")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, help="left out: as many as torch takes")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "featcal-benchmarks")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    shape, grid, centre = families.SMALL, GRID, CENTRE
    if options.full:
        shape, grid, centre = families.B32, FULL_GRID, FULL_CENTRE
    points = {name: [replace(centre, **{name: value}) for value in values] for name, values in grid.items()}
    best = fastest(options.work, shape, points, options.precision, options.rounds)
    threads = torch.get_num_threads()
    found = {
        kind: {name: summary(grid[name], [best[point][kind] for point in ones]) for name, ones in points.items()}
        for kind in KINDS
    }
    growth = memory.against_experts(options.work, shape, EXPERTS, 16, threads)
    measure.show(
        {
            "shape": asdict(shape),
            "centre": asdict(centre),
            "precision": options.precision,
            "threads": threads,
            **found,
            "memory": {"experts": [run["experts"] for run in growth["runs"]], "runs": growth["runs"]},
            "memory_ratio": growth["ratio"],
            "machine": measure.machine(),
        }
    )


def fastest(
    work: Path, shape: families.ClipShape, points: dict[str, list[Point]], precision: str, rounds: int
) -> dict[Point, dict[str, float]]:
    """Least seconds of the calibration stage at every point, by kind; the rounds are interleaved."""
    best: dict[Point, dict[str, float]] = {}
    for _ in range(rounds):
        for point in dict.fromkeys(point for ones in points.values() for point in ones):
            suite = families.clip_suite(work, replace(shape, blocks=point.blocks), point.tasks, point.samples)
            family = open_family(load_suite(suite), "cpu", precision)
            config = CalibrationConfig(samples=point.samples, precision=precision)
            _, cost = measure.timed(stage.ours(family, config, "cpu"), "cpu")
            best[point] = {kind: min(cost[kind], best.get(point, cost)[kind]) for kind in KINDS}
            measure.say(f"{point}: {cost['seconds']:.2f} s, {cost['cpu_seconds']:.2f} s of all cores")
    return best


def summary(sizes: Sequence[int], seconds: Sequence[float]) -> dict[str, Any]:
    """Points and the line through them."""
    return {"sizes": list(sizes), "seconds": list(seconds), **asdict(measure.line(sizes, seconds))}


if __name__ == "__main__":
    main()

"""The calibration stage at the paper's size: `python benchmarks/b32.py --tasks 8 --samples 32 --precision exact`.

Random CLIP ViT-B/32, each run in a process of its own, pictures in memory, weights from files. Prints JSON: seconds
in all and by stage, peak memory of the process tree in that time, operations against measured peak, and on NVIDIA
memory and energy. `--against-reference` alternates with `reference.py` and prints the ratios; `--recipes` alternates
the recipes, and the ratios are those of each to the paper's; `--again` times the second calibration of a session.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import families
import measure
import roofline
import stage
from safetensors.torch import load_file

from featcal.suite.calibration_options import INFORMED, PAPER, RECIPES

KINDS = ("rss", "anonymous", "pss")
SHAPES = {"b32": families.B32, "small": families.SMALL}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", type=int, default=8)
    stage.arguments(parser)
    against = parser.add_mutually_exclusive_group()
    against.add_argument("--against-reference", action="store_true", help="alternate with reference.py")
    against.add_argument("--recipes", action="store_true", help="alternate the recipes")
    parser.add_argument("--recipe", choices=RECIPES, default=PAPER, help="of a run that alternates with nothing")
    parser.add_argument("--rounds", type=int, default=2, help="of that alternation")
    parser.add_argument("--shape", choices=SHAPES, default="b32", help="small: to try the script itself")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "featcal-benchmarks")
    options = parser.parse_args()
    if options.against_reference and options.again:
        parser.error("--again is of featcal alone; the reference has no sessions")
    shape = SHAPES[options.shape]
    suite = families.clip_suite(options.work, shape, options.tasks, options.samples)
    if options.against_reference:
        scripts = {"featcal": ["stage.py"], "reference": ["reference.py"]}
        measure.show(compare(suite, shape, options, scripts, to="reference"))
    elif options.recipes:
        scripts = {recipe: ["stage.py", "--recipe", recipe] for recipe in RECIPES}
        scripts["informed, decisions"] = ["stage.py", "--recipe", INFORMED, "--decisions", "0.7"]
        measure.show(compare(suite, shape, options, scripts, to=PAPER))
    else:
        measure.show(one(suite, shape, options))


def one(suite: Path, shape: families.ClipShape, options: argparse.Namespace) -> dict[str, Any]:
    """One run of featcal, with its roofline."""
    run = _run("stage.py", suite, options, "--peaks", "--recipe", options.recipe)
    informed = options.recipe == INFORMED and not options.again  # a session keeps its priors
    flops = roofline.clip_flops(shape, options.tasks, options.samples, informed=informed)
    ideal = roofline.ideal_seconds(flops, run.document["peaks"], options.precision, run.document["lam"])
    return {
        "shape": asdict(shape),
        "tasks": options.tasks,
        "samples": options.samples,
        "precision": options.precision,
        **_costs(run),
        **{key: run.document[key] for key in ("threads", "device", "cuda_peak_bytes", "gpu_joules")},
        "flops": {**asdict(flops), "total": flops.total},
        "peaks": run.document["peaks"],
        "roofline": {"ideal_seconds": ideal, "fraction": ideal / run.document["seconds"]},
        "machine": run.document["machine"],
    }


def compare(
    suite: Path, shape: families.ClipShape, options: argparse.Namespace, scripts: Mapping[str, Sequence[str]], to: str
) -> dict[str, Any]:
    """Run scripts in turn; give the ratios of their medians (times) and maxima (memory) to those of the one called
    `to`, and how far their tensors are from its."""
    runs: dict[str, list[measure.Run]] = {name: [] for name in scripts}
    with tempfile.TemporaryDirectory(dir=options.work) as folder:
        files = {name: Path(folder) / f"{name}.safetensors" for name in scripts}
        for _ in range(options.rounds):
            for name, script in scripts.items():
                runs[name].append(_run(script[0], suite, options, *script[1:], "--weights", str(files[name])))
        others = [name for name in scripts if name != to]
        differences = {name: largest_difference(files[name], files[to]) for name in others}
    document = runs[to][0].document
    return {
        "shape": asdict(shape),
        "tasks": options.tasks,
        "samples": options.samples,
        "precision": options.precision,
        "threads": document["threads"],
        "to": to,
        "time_ratio": {name: _ratio("seconds", runs[name], runs[to]) for name in others},
        "cpu_time_ratio": {name: _ratio("cpu_seconds", runs[name], runs[to]) for name in others},
        "memory_ratio": {
            name: {
                kind: max(_peaks(runs[name], kind)) / max(_peaks(runs[to], kind))
                for kind in KINDS
                if _peaks(runs[name], kind) and _peaks(runs[to], kind)
            }
            for name in others
        },
        "largest_difference": differences,
        "costs": {name: [_costs(run) for run in own] for name, own in runs.items()},
        "machine": document["machine"],
    }


def largest_difference(ours: Path, theirs: Path) -> dict[str, Any]:
    """The largest relative difference of a calibrated tensor (Frobenius norms), and which tensor it is."""
    reference = load_file(theirs)
    found = {
        name: float((tensor.double() - reference[name].double()).norm() / reference[name].double().norm())
        for name, tensor in load_file(ours).items()
    }
    worst = max(found, key=lambda name: found[name])
    return {"value": found[worst], "tensor": worst}


def _run(script: str, suite: Path, options: argparse.Namespace, *more: str) -> measure.Run:
    command = [sys.executable, str(measure.BENCHMARKS / script), str(suite), "--samples", str(options.samples)]
    command += ["--precision", options.precision, "--device", options.device, *more]
    if options.threads:
        command += ["--threads", str(options.threads)]
    if options.again:
        command += ["--again"]
    run = measure.run(command, options.threads)
    measure.say(f"{script}: {run.document['seconds']:.1f} s")
    return run


def _costs(run: measure.Run) -> dict[str, Any]:
    before = run.before(run.document["window"][0])
    return {
        "seconds": run.document["seconds"],
        "cpu_seconds": run.document["cpu_seconds"],
        "by_stage": run.document["by_stage"],
        "memory": run.peak(run.document["window"]),
        "memory_before": None if before is None else asdict(before),
    }


def _ratio(kind: str, ours: Sequence[measure.Run], theirs: Sequence[measure.Run]) -> float:
    return float(median(run.document[kind] for run in ours) / median(run.document[kind] for run in theirs))


def _peaks(runs: Sequence[measure.Run], kind: str) -> list[int]:
    """Return the peaks of the runs that were long enough for a look at this kind of memory."""
    seen = (run.peak(run.document["window"])[kind] for run in runs)
    return [peak for peak in seen if peak is not None]


if __name__ == "__main__":
    main()

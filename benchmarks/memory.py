"""Peak memory of `featcal calibrate` and `featcal drift` as whole process trees.

`python benchmarks/memory.py experts` compares runs with few and with many B/32 experts;
`python benchmarks/memory.py budget` calibrates a Llama-shaped model in four shards that is larger than the limit it is
given; `python benchmarks/memory.py drift --shape l14|llama` takes the drift of a large model apart, with attribution,
within its limit; `python benchmarks/memory.py mergers` merges eight B/32 experts with every method; `python
benchmarks/memory.py pickled --samples 8` calibrates a whole B/32 whose base is safetensors, and one whose base is a
pickle, converted in the first run and found in the second. All print JSON. RSS counts the pages of mapped weight files
until they are unmapped, `anonymous` does not.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import families
import measure

from featcal.suite.methods import merger_names


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["experts", "budget", "drift", "mergers", "pickled"])
    parser.add_argument("--shape", choices=["l14", "llama"], default="l14", help="of the drift run")
    parser.add_argument("--experts", type=int, nargs="+", default=[2, 20])
    parser.add_argument("--methods", nargs="+", default=merger_names(), help="of the run of mergers")
    parser.add_argument("--blocks", type=int, default=families.B32.blocks, help="of the models that are merged")
    parser.add_argument("--max-memory", default="2GB", help="limit of the budget, the drift and the mergers' run")
    parser.add_argument("--samples", type=int, default=16, help="per task")
    parser.add_argument("--length", type=int, default=64, help="tokens of a row of text")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "featcal-benchmarks")
    options = parser.parse_args()
    if options.what == "experts":
        found = against_experts(options.work, families.B32, options.experts, options.samples, options.threads)
    elif options.what == "budget":
        found = within_budget(
            options.work, families.LlamaShape(), options.max_memory, options.samples, options.length, options.threads
        )
    elif options.what == "pickled":
        found = against_safetensors(options.work, families.B32, 8, options.samples, options.threads)
    elif options.what == "mergers":
        shape = replace(families.B32, blocks=options.blocks)
        found = by_merger(options.work, shape, 8, options.methods, options.max_memory, options.threads)
    else:
        shape = families.L14 if options.shape == "l14" else families.LLAMA_1B
        found = drift_within(options.work, shape, options.max_memory, options.samples, options.length, options.threads)
    measure.show({**found, "machine": measure.machine()})


def against_experts(
    work: Path, shape: families.ClipShape, experts: Sequence[int], samples: int, threads: int
) -> dict[str, Any]:
    """Peak memory by number of experts, and how much more the last takes than the first."""
    runs = []
    for count in experts:
        run = calibrate(work, families.clip_suite(work, shape, count, samples), samples, threads)
        runs.append({"experts": count, **_costs(run)})
        measure.say(f"{count} experts: {runs[-1]['memory']}")
    first, last = runs[0]["memory"], runs[-1]["memory"]
    ratio = {kind: last[kind] / first[kind] for kind in first if first[kind]}
    return {"shape": asdict(shape), "samples": samples, "threads": threads, "runs": runs, "ratio": ratio}


def within_budget(
    work: Path, shape: families.LlamaShape, limit: str, samples: int, length: int, threads: int
) -> dict[str, Any]:
    """A model in four shards, calibrated with `--max-memory`."""
    suite = families.llama_suite(work, shape, 2, samples, length)
    run = calibrate(work, suite, samples, threads, "--max-memory", limit)
    return {
        "shape": asdict(shape),
        "model_bytes": families.weight_bytes(suite.parent / "base"),
        "max_memory": limit,
        "samples": samples,
        "tokens_per_row": length,
        "threads": threads,
        "spilled_bytes": run.document.get("spilled_bytes"),
        "verified": run.document.get("verified"),
        **_costs(run),
    }


def drift_within(
    work: Path,
    shape: families.ClipShape | families.LlamaShape,
    limit: str,
    samples: int,
    length: int,
    threads: int,
) -> dict[str, Any]:
    """The drift of a model from two experts with attribution and `--max-memory`."""
    if isinstance(shape, families.ClipShape):
        suite = families.clip_suite(work, shape, 2, samples)
    else:
        suite = families.llama_suite(work, shape, 2, samples, length)
    command = [sys.executable, "-m", "featcal", "drift", str(suite), "--attribution", "--json", "--device", "cpu"]
    run = measure.run([*command, "--eval-samples", str(samples), "--max-memory", limit], threads)
    tasks = run.document["tasks"].values()
    return {
        "shape": asdict(shape),
        "model_bytes": families.weight_bytes(suite.parent / "base"),
        "max_memory": limit,
        "samples": samples,
        "tokens_per_sample": shape.tokens if isinstance(shape, families.ClipShape) else length,
        "threads": threads,
        "identity_residual": max(task["identity_residual"] for task in tasks),
        "share_sum": [sum(layer["share"] for layer in task["layers"]) for task in tasks],
        "seconds": run.seconds,
        "memory": run.peak(),
    }


def by_merger(
    work: Path, shape: families.ClipShape, tasks: int, methods: Sequence[str], limit: str, threads: int
) -> dict[str, Any]:
    """`featcal merge` with every method, beside the bytes of a block of the base and of each expert."""
    suite = families.clip_suite(work, shape, tasks, 1)
    block = 4 * shape.width * (4 * shape.width + 2 * shape.hidden)
    found = {}
    for method in methods:
        with tempfile.TemporaryDirectory(dir=work) as folder:
            command = [
                sys.executable,
                "-m",
                "featcal",
                "merge",
                str(suite),
                "--method",
                method,
                "--json",
                "--max-memory",
                limit,
            ]
            run = measure.run([*command, "--out", str(Path(folder) / "out")], threads)
        found[method] = {"seconds": run.seconds, "memory": run.peak()}
        measure.say(f"{method}: {found[method]}")
    models = {"model_bytes": families.weight_bytes(suite.parent / "base"), "blocks_bytes": (tasks + 1) * block}
    return {"shape": asdict(shape), "tasks": tasks, "max_memory": limit, "threads": threads, **models, "methods": found}


def against_safetensors(
    work: Path, shape: families.ClipShape, tasks: int, samples: int, threads: int
) -> dict[str, Any]:
    """Calibrate with a base in safetensors, with the same one as a pickle, and with that again, each with no more in
    featcal's cache than the run before it left there."""
    suites = families.whole_clip_suites(work, shape, tasks, samples)
    runs = {}
    for name, stored in [("safetensors", "safetensors"), ("pickled, converted", "pickled"), ("pickled", "pickled")]:
        # Conversions are kept there; the results of the run are thrown away with it.
        os.environ["FEATCAL_CACHE"] = str(work / "caches" / stored)
        if name != "pickled":
            shutil.rmtree(os.environ["FEATCAL_CACHE"], ignore_errors=True)
        runs[name] = _costs(calibrate(work, suites[stored], samples, threads))
        measure.say(f"{name}: {runs[name]['seconds']:.1f} s, {runs[name]['memory']}")
    first = runs["safetensors"]["memory"]
    ratio = {
        name: {kind: run["memory"][kind] / first[kind] for kind in first if first[kind]} for name, run in runs.items()
    }
    return {
        "shape": asdict(shape),
        "tasks": tasks,
        "samples": samples,
        "threads": threads,
        "runs": runs,
        "ratio": ratio,
    }


def calibrate(work: Path, suite: Path, samples: int, threads: int, *more: str) -> measure.Run:
    """`featcal calibrate` from start to exit, its output thrown away."""
    with tempfile.TemporaryDirectory(dir=work) as folder:
        out = str(Path(folder) / "out")
        command = [sys.executable, "-m", "featcal", "calibrate", str(suite), "--out", out, "--json"]
        return measure.run([*command, "--samples", str(samples), "--device", "cpu", *more], threads)


def _costs(run: measure.Run) -> dict[str, Any]:
    by_stage = run.document["seconds"]
    highest, _ = max(run.looks, key=lambda look: look[1].rss)
    after = highest - run.looks[0][0]
    return {"seconds": run.seconds, "by_stage": by_stage, "memory": run.peak(), "highest_rss_after_seconds": after}


if __name__ == "__main__":
    main()

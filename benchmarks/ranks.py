"""What several processes cost: `python benchmarks/ranks.py --processes 1 2 4 --tasks 8 --samples 32`.

`featcal calibrate` as a whole, started by torchrun where there are several, one thread each, on a random CLIP tower
or, with `LENGTH` tokens in a row and lam = `LAM`, a random Llama. Prints JSON: for every run its seconds, those of all
cores (imports, hashes and verification included), the longest calibration stage of a rank, and bytes that every rank
read of the models, sent and received.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import families
import measure

SHAPES = {
    "small": families.SMALL,
    "middle": families.ClipShape(width=512, hidden=2048, blocks=6, heads=8),
    "fine": families.ClipShape(width=256, hidden=1024, blocks=6, heads=4, patch=16),
    "s16": families.ClipShape(width=384, hidden=1536, blocks=12, heads=6, patch=16),
    "b32": families.B32,
    "l14": families.L14,
    "decoder": families.LlamaShape(blocks=8),
    "1b": families.LLAMA_1B,
    "8b": families.LLAMA_8B,
    "8b-block": replace(families.LLAMA_8B, blocks=1, vocabulary=32000),
}
LENGTH, LAM = 64, 1e-3
"""Tokens of a row of text; below this lam, products are float64."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--tasks", type=int, default=8)
    parser.add_argument("--samples", type=int, default=32, help="per task")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--shape", choices=SHAPES, default="b32")
    parser.add_argument("--max-memory", help="as of featcal calibrate")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "featcal-benchmarks")
    options = parser.parse_args()
    asked = {"shape": options.shape, "tasks": options.tasks, "samples": options.samples}
    shape = SHAPES[options.shape]
    if isinstance(shape, families.ClipShape):
        suite = families.clip_suite(options.work, shape, options.tasks, options.samples)
    else:
        suite = families.llama_suite(options.work, shape, options.tasks, options.samples, LENGTH)
    runs = [run(suite, processes, options) for processes in options.processes]
    measure.show({"runs": [asked | one for one in runs], "sizes": asdict(shape), "machine": measure.machine()})


def run(suite: Path, processes: int, options: argparse.Namespace) -> dict[str, Any]:
    """One calibration by so many processes, from start to exit; what it wrote is thrown away."""
    before = _core_seconds()
    with tempfile.TemporaryDirectory(dir=options.work) as folder:
        start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        command = [*(start if processes > 1 else []), "-m", "featcal", "calibrate", str(suite), "--json"]
        command += ["--out", str(Path(folder) / "out"), "--samples", str(options.samples), "--device", options.device]
        command += ["--lam", str(LAM)] if isinstance(SHAPES[options.shape], families.LlamaShape) else []
        command += ["--max-memory", options.max_memory] if options.max_memory else []
        done = measure.run([sys.executable, *command], threads=1)
    ranks = done.document.get("ranks", [])
    found = {
        "processes": processes,
        "canary": "canary" in done.document,
        "seconds": done.seconds,
        "core_seconds": _core_seconds() - before,
        "calibration_seconds": max(own["seconds"]["calibration"] for own in ranks or [done.document]),
        "peak_rss_bytes": [own["peak_rss_bytes"] for own in ranks or [done.document]],
        "read_bytes": [own["read_bytes"] for own in ranks],
        "sent_bytes": [own["sent_bytes"] for own in ranks],
        "received_bytes": [own["received_bytes"] for own in ranks],
    }
    measure.say(f"{processes} processes: {done.seconds:.1f} s, {found['core_seconds']:.1f} s of all cores")
    return found


def _core_seconds() -> float:
    """Of all processes that have ended below this one."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()

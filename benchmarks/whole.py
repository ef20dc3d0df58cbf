"""Measure whole commands at the paper's size, on models and pictures in files as the Hub has them.

`python benchmarks/whole.py --data FOLDER` writes a CLIP ViT-B/32 with text tower, eight vision-only experts and eight
sets of pictures (`hub_files.py`), and runs `suite init`, `check`, `drift`, `calibrate`, `evaluate`, `diagnose` and
`compare` on them, each in a process of its own, with the files out of the page cache (cold) and in it (warm). It prints
JSON, and the table as Markdown on stderr. `--against CHECKOUT` takes turns with another checkout, `--small` tries the
script itself.

Ideal seconds are bytes at the speed of the disk, where the cache is cold, and operations at the peak of matrix products
measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import commands
import families
import hub_files
import measure
import roofline

from featcal.suite.calibration_options import PAPER, recipe_numbers

COMMANDS = ("init", "check", "drift", "calibrate", "evaluate", "diagnose", "compare")
WORKER = """
import atexit, json, os, sys

@atexit.register
def write_costs(file=sys.argv[1] + ".io"):
    lines = open("/proc/self/io").read().splitlines() if os.path.exists("/proc/self/io") else []
    json.dump(dict(line.split(": ") for line in lines), open(file, "w"))
"""
"""Runs before the worker of `commands.py`, whose functions at the end come first."""
TABLE = ("wall", "user", "system", "read_bytes", "rchar", "rss", "ideal", "fraction")
GIB = ("read_bytes", "rchar", "rss")


@dataclass(frozen=True)
class Setting:
    """Files, sizes and speeds of one run."""

    files: hub_files.Files
    root: Path
    """Folder of all files that commands read."""
    shape: families.ClipShape | None
    """None for models of text, whose operations are not counted."""
    samples: int
    device: str
    peaks: Mapping[str, float]
    disk: float
    """Bytes in a second."""

    def words(self, command: str, suite: Path, made: Path) -> list[str]:
        """Return the command line of a command on a suite file; `made` is the folder of the calibrated model."""
        count, device = str(self.samples), ["--device", self.device]
        if command == "init":
            words = ["suite", "init", "--base", str(self.files.base), "--out", str(suite)]
            for task, folder in self.files.experts.items():
                words += ["--expert", f"{task}={folder}", "--data", f"{task}={self.files.data[task]}"]
            return words
        return {
            "check": ["check", str(suite)],
            "drift": ["drift", str(suite), "--eval-samples", count, *device],
            "calibrate": ["calibrate", str(suite), "--samples", count, "--out", str(made), *device],
            "evaluate": ["evaluate", str(suite), "--eval-samples", count, *device],
            "diagnose": ["diagnose", str(suite), "--eval-samples", count, *device],
            "compare": [
                "compare",
                str(suite),
                "--model",
                "merged",
                "--model",
                str(made),
                "--eval-samples",
                count,
                *device,
            ],
        }[command]

    def ideal(self, command: str, is_cold: bool) -> float | None:
        """Return the seconds that a command needs at least; None where its operations are not counted."""
        if self.shape is None or command == "diagnose":
            return None
        tasks = len(self.files.experts)
        read = sum(map(families.weight_bytes, [self.files.base, *self.files.experts.values()]))
        reading = read / self.disk if is_cold and command not in ("init", "check") else 0.0
        flops = roofline.clip_flops(self.shape, tasks, self.samples)
        if command == "calibrate":
            lam = recipe_numbers(PAPER, self.samples)["lam"]
            return reading + roofline.ideal_seconds(flops, self.peaks, "exact", lam)
        # The expert on its features, the model on its own and on the expert's; one model; two of them.
        forwards = {"drift": 3, "evaluate": 1, "compare": 2}.get(command, 0)
        return reading + forwards * flops.expert_forward / self.peaks["float32"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--family", choices=["clip", "t5", "decoder"], default="clip")
    parser.add_argument("--data", type=Path, help="folder of .npz files with pictures; left out, pictures are made")
    parser.add_argument("--samples", type=int, default=64, help="per task")
    parser.add_argument("--commands", nargs="+", choices=COMMANDS, default=COMMANDS)
    parser.add_argument("--states", nargs="+", choices=["cold", "warm"], default=["cold", "warm"])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--against", type=Path, help="another checkout, in turn with this one")
    parser.add_argument("--small", action="store_true", help="small models and few pictures, to try the script itself")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "featcal-benchmarks")
    parser.add_argument("--table", type=Path, help="write the table of medians to this file after every round")
    options = parser.parse_args()
    setting = prepare(options)
    sides = {"this": measure.BENCHMARKS.parent}
    sides |= {"before": options.against.resolve()} if options.against else {}
    runs: list[dict[str, Any]] = []
    for _ in range(options.rounds):
        for run in measure_round(setting, options.commands, options.states, sides):
            runs.append(run)
            spent = f"{run['wall']:.1f} s, of the processor {run['user']:.1f} + {run['system']:.1f} s"
            measure.say(f"{run['side']} {run['command']} {run['state']}: {spent}")
            if options.table:
                options.table.write_text(table(runs), encoding="utf-8")
    measure.say(table(runs))
    speeds = {"peaks": setting.peaks, "disk_bytes_per_second": setting.disk}
    measure.show({"runs": runs, **speeds, "machine": measure.machine(options.device)})


def prepare(options: argparse.Namespace) -> Setting:
    """Write the files where they are not there yet, and measure disk and products."""
    samples, shape = (8, families.SMALL) if options.small else (options.samples, families.B32)
    tasks = 2 if options.small else 4 if options.family == "decoder" else 8
    if options.family == "clip":
        files = hub_files.write_clip(options.work, shape, 4 if options.small else tasks, max(samples, 16), options.data)
    else:
        files = hub_files.write_text(options.work, options.family, tasks, options.small)
    root = files.base.parent
    largest = max(root.rglob("*.safetensors"), key=lambda file: file.stat().st_size)
    empty_cache([largest])
    started = time.perf_counter()
    size = len(largest.read_bytes())
    disk, peaks = size / (time.perf_counter() - started), roofline.gemm_peaks(options.device)
    counted = shape if options.family == "clip" else None
    return Setting(files, root, counted, samples, options.device, peaks, disk)


def measure_round(
    setting: Setting, names: Sequence[str], states: Sequence[str], sides: Mapping[str, Path]
) -> Iterator[dict[str, Any]]:
    """Run every command once by side and state of the page cache, the sides in turn; yield what each took."""
    with tempfile.TemporaryDirectory(dir=setting.root.parent) as place:
        suite, made = Path(place) / "suite.yaml", Path(place) / "calibrated"
        here = measure.BENCHMARKS.parent
        for needed, file in (("init", suite), ("calibrate", made)):
            if needed == "init" or {"compare"} & {*names}:
                run(here, setting.words(needed, suite, made), Path(place))
            assert file.exists() or needed == "calibrate", f"featcal {needed} wrote nothing"
        for name, state, (side, checkout) in product(names, states, sides.items()):
            number = len(list(Path(place).iterdir()))
            own, new = (suite, Path(place) / f"{number}") if name != "init" else (Path(place) / f"{number}.yaml", made)
            words = setting.words(name, own, new if name == "calibrate" else made)
            if state == "cold":
                empty_cache(file for file in (*setting.root.rglob("*"), *made.rglob("*")) if file.is_file())
            found = run(checkout, words, Path(place))
            ideal = setting.ideal(name, state == "cold")
            fraction = ideal / found["wall"] if ideal else None
            yield {"side": side, "command": name, "state": state, **found, "ideal": ideal, "fraction": fraction}


def run(checkout: Path, words: Sequence[str], place: Path) -> dict[str, Any]:
    """Run a command in a process of its own; return its seconds (processor seconds by stage too), bytes and memory."""
    with tempfile.TemporaryDirectory(dir=place) as folder:
        stages, caches = Path(folder) / "stages.json", Path(folder) / "caches"
        program = [sys.executable, "-c", WORKER + commands.WORKER, str(stages), *words]
        environment = {**os.environ, "PYTHONPATH": str(checkout), "FEATCAL_CACHE": str(caches), "HF_HUB_OFFLINE": "1"}
        before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        process = subprocess.Popen(program, cwd=folder, env=environment, stdout=subprocess.DEVNULL)
        looks = measure.watch(process)
        wall, after = time.monotonic() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
        if not stages.is_file() or process.returncode not in (0, 1):  # 1: something of the suite is to be mended
            raise SystemExit(f"failed with status {process.returncode}: featcal {' '.join(words)}")
        io = {name: int(value) for name, value in json.loads(Path(f"{stages}.io").read_text(encoding="utf-8")).items()}
        return {
            "wall": wall,
            "user": after.ru_utime - before.ru_utime,
            "system": after.ru_stime - before.ru_stime,
            **{name: io.get(name) for name in ("read_bytes", "rchar")},
            **measure.Run({}, wall, looks).peak(),
            "by_stage": json.loads(stages.read_text(encoding="utf-8")),
        }


def empty_cache(files: Iterator[Path] | Sequence[Path]) -> None:
    """Ask the system to forget what it holds of files, where it can be asked."""
    for file in files if hasattr(os, "posix_fadvise") else ():
        with file.open("rb") as handle:
            os.fsync(handle.fileno())
            os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def table(runs: Sequence[Mapping[str, Any]]) -> str:
    """Return medians as a table of Markdown, the other checkout first; bytes in GiB."""
    lines = [f"| command | cache | {' | '.join(TABLE)} |", "|---" * (len(TABLE) + 2) + "|"]
    for command, state in dict.fromkeys((one["command"], one["state"]) for one in runs):
        own = [one for one in runs if (one["command"], one["state"]) == (command, state)]
        sides = [side for side in ("before", "this") if any(one["side"] == side for one in own)]
        cells = []
        for column in TABLE:
            seen = [[one[column] for one in own if one["side"] == side] for side in sides]
            scale = 2**30 if column in GIB else 1
            cells.append(" → ".join("–" if None in one else f"{statistics.median(one) / scale:.2f}" for one in seen))
        lines.append(f"| {' | '.join((command, state, *cells))} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()

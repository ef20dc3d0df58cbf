"""Seconds of whole commands by stage, from the start of the process to its end.

`python benchmarks/commands.py --against CHECKOUT` runs check, drift, calibrate and evaluate on the embedded suites, in
turn with another checkout, with fresh caches (cold) and once more (warm). It prints JSON, and writes the table of
medians to `--table` after every round; "same" says whether both checkouts printed and wrote the same.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

import measure

SUITES = ("clip-mini", "t5-mini", "lm-mini")
COMMANDS = ("check", "drift", "calibrate", "evaluate")
STAGES = ("imports", "opening", "arithmetic", "writing")
"""Imports wherever they happen; what reads suites, models and samples; what writes models and prints; all the rest."""
VARYING = ("time on this processor", "written to disk", "written to ", "looks at this suite")
"""What lines hold that say how long something took, or how often."""
WORKER = """
import atexit, builtins, importlib, importlib._bootstrap as bootstrap, json, sys, threading, time

FUNCTIONS = {
    "featcal.suite.schema": {"load_suite": "opening"},
    "featcal.family.opening": {"open_family": "opening", "draw": "opening"},
    "featcal.preflight.check": {"open_models": "opening", "usable_family": "opening", "check_samples": "opening"},
    "featcal.calibration.calibrate": {"_origin": "opening", "own_passes": "opening", "_write": "writing"},
    "featcal.cli.terminal": {"show": "writing", "print_json": "writing", "print_table": "writing"},
    "featcal.cli.suite": {"show_check": "writing"},
}
spent, stack, main = {}, ["arithmetic"], threading.current_thread()
last = time.process_time()

def switch(change):
    global last
    now = time.process_time()
    spent[stack[-1]] = spent.get(stack[-1], 0.0) + now - last
    last = now
    change()

def staged(stage, function):
    def run(*args, **keywords):
        if threading.current_thread() is not main:
            return function(*args, **keywords)
        switch(lambda: stack.append(stage))
        try:
            return function(*args, **keywords)
        finally:
            switch(stack.pop)
    return run

def load(name, importing, find=bootstrap._find_and_load):
    module = staged("imports", find)(name, importing)
    for function, stage in FUNCTIONS.pop(name, {}).items() if name in sys.modules else ():
        if hasattr(sys.modules[name], function):  # the other checkout may be older
            setattr(sys.modules[name], function, staged(stage, getattr(sys.modules[name], function)))
    return module

bootstrap._find_and_load = load
file, *words = sys.argv[1:]
sys.argv = ["featcal", *words]

@atexit.register
def end():
    switch(lambda: None)
    json.dump(spent, open(file, "w"))

importlib.import_module("featcal.cli").main()
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--against", type=Path, help="another checkout, run in turn with this one")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--suites", nargs="+", choices=SUITES, default=SUITES)
    parser.add_argument("--commands", nargs="+", choices=COMMANDS, default=COMMANDS)
    parser.add_argument("--table", type=Path, help="write the table of medians to this file after every round")
    options = parser.parse_args()
    here = measure.BENCHMARKS.parent
    sides = {"this": here, **({"against": options.against.resolve()} if options.against else {})}
    runs: list[dict[str, Any]] = []
    for _, command, suite in product(range(options.rounds), options.commands, options.suites):
        for side, checkout in sides.items():
            with tempfile.TemporaryDirectory() as caches:
                for state in ("cold", "warm"):
                    found = run(checkout, command, suite, Path(caches))
                    runs.append({"side": side, "command": command, "suite": suite, "state": state, **found})
                    measure.say(f"{side} {command} {suite} {state}: {found['cpu']:.1f} s of the processor")
        if options.table:
            options.table.write_text(table(runs), encoding="utf-8")
    measure.show({"runs": runs, "machine": measure.machine()})


def run(checkout: Path, command: str, suite: str, caches: Path) -> dict[str, Any]:
    """Run one command in a process of its own; return its seconds and a fingerprint of what it printed and wrote."""
    with tempfile.TemporaryDirectory() as place:
        out, stages = Path(place) / "out", Path(place) / "stages.json"
        words = [command, suite, *(("--out", str(out)) if command == "calibrate" else ())]
        environment = {**os.environ, "PYTHONPATH": str(checkout), "FEATCAL_CACHE": str(caches), "HF_HUB_OFFLINE": "1"}
        before, started = os.times(), time.monotonic()
        program = [sys.executable, "-c", WORKER, str(stages), *words]
        with subprocess.Popen(program, cwd=place, env=environment, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            lines = [process.stdout.readline()]
            first = time.monotonic() - started
            lines += process.stdout.readlines()
        if process.returncode != 0:
            raise SystemExit(f"failed with status {process.returncode}: featcal {' '.join(words)}")
        after = os.times()
        cpu = after.children_user + after.children_system - before.children_user - before.children_system
        seen = hashlib.sha256(
            "".join(one for one in lines if not any(word in one for word in VARYING)).replace(place, "").encode()
        )
        for file in sorted(out.glob("*.safetensors")):
            seen.update(file.read_bytes())
        spent = json.loads(stages.read_text(encoding="utf-8"))
    stated = {stage: spent.get(stage, 0.0) for stage in STAGES}
    return {"first_line": first, "cpu": cpu, **stated, "ends": cpu - sum(stated.values()), "seen": seen.hexdigest()}


def table(runs: list[dict[str, Any]]) -> str:
    """Return medians as a table of Markdown: a row for every command, suite and state, the other checkout first."""
    columns = (*STAGES, "ends", "cpu", "first_line")
    lines = [f"| command | suite | caches | rounds | {' | '.join(columns)} | same |", "|---" * (len(columns) + 5) + "|"]
    keys = dict.fromkeys((one["command"], one["suite"], one["state"]) for one in runs)
    for key in keys:
        own = [one for one in runs if (one["command"], one["suite"], one["state"]) == key]
        sides = [side for side in ("against", "this") if any(one["side"] == side for one in own)]
        cells = [
            " → ".join(f"{statistics.median(one[column] for one in own if one['side'] == side):.1f}" for side in sides)
            for column in columns
        ]
        same = "yes" if len({one["seen"] for one in own}) == 1 else "no"
        rounds = sum(one["side"] == "this" for one in own)
        lines.append(f"| {' | '.join((*key, str(rounds), *cells, same))} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()

"""What a calibration takes, predicted: `python benchmarks/scale.py` writes the tables of docs/scale.md anew.

The model of core-seconds has four constants, fitted by least squares of relative errors on some runs of scale.json and
held against those that it was not fitted on; `--measure` runs all of `PLAN` anew before. The figures for GPUs use
the same counts with rates that are assumed (`GPU`), since none was measured.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import families
import numpy as np
import ranks
import roofline
from scipy.optimize import nnls

from featcal.evaluation import generation_check
from featcal.system.distributed import owners_of, teams_of

RUNS = Path(__file__).resolve().parents[1] / "docs" / "scale.json"
PAGE = RUNS.with_suffix(".md")
TOKENS = 256 * 512
"""Of a task in the tables: samples times tokens of each."""


@dataclass(frozen=True)
class Rates:
    """What one GPU does in a second, as assumed."""

    forward: float = 45e12
    """float32 operations, two thirds of an H100's peak."""
    solve: float = 30e12
    """float64 operations, half of its peak."""
    disk: float = 5e9
    """Bytes from the disk, of every node of eight."""
    network: float = 25e9
    """Bytes into a rank."""


@dataclass(frozen=True)
class Planned:
    """A run of `benchmarks/ranks.py`."""

    shape: str
    tasks: int
    samples: int
    processes: int
    fitted: bool = False
    max_memory: str | None = None


PLAN = [
    Planned("small", 4, 64, 1, fitted=True),
    Planned("small", 4, 64, 2, fitted=True),
    Planned("middle", 4, 16, 1, fitted=True),
    Planned("middle", 4, 16, 2, fitted=True),
    Planned("fine", 4, 32, 1, fitted=True),
    Planned("decoder", 2, 16, 1, fitted=True),
    Planned("b32", 8, 8, 1, fitted=True),
    Planned("b32", 8, 8, 2),
    Planned("b32", 8, 32, 1),
    Planned("b32", 8, 32, 2),
    Planned("b32", 20, 16, 2),
    Planned("small", 8, 64, 4),
    Planned("middle", 8, 32, 2),
    Planned("s16", 4, 16, 1),
    Planned("s16", 4, 16, 2),
    Planned("l14", 4, 4, 2),
    Planned("1b", 2, 8, 2, fitted=True, max_memory="5GB"),
    Planned("8b-block", 2, 16, 1, max_memory="21GB"),
]
"""No constant is fitted on `s16`, `l14` and `8b-block`."""
AHEAD = [("b32", 20, 256), ("l14", 20, 256), ("1b", 5, 256), ("8b", 5, 256)]
"""Shapes, tasks and samples of what takes longer than anybody measured here."""
GPU = Rates()
MODELS = {"8B": families.LLAMA_8B, "70B": families.LLAMA_70B}


@dataclass(frozen=True)
class Need:
    """Of the rank that needs most: seconds by what takes them, bytes of memory and of files that it reads."""

    counting: float
    solving: float
    exchange: float
    reading: float
    working_bytes: float
    state_bytes: float
    read_bytes: float

    @property
    def seconds(self) -> float:
        """One after the other; where memory is not limited the next expert is read meanwhile."""
        return self.counting + self.solving + self.exchange + self.reading


def need(model: families.LlamaShape, tasks: int, size: int) -> Need:
    """On `GPU`s: `exact` with lam >= 1e-3, models in bfloat16 in folders."""
    groups, teams = model.groups(False), teams_of(map(str, range(tasks)), size)
    share = max(sum(1 / len(team) for team in teams.values() if rank in team) for rank in range(size))
    held = max(sum(rank in team for team in teams.values()) for rank in range(size))
    rows = TOKENS * share
    forward = 2 * rows * model.block * 3  # the expert once, the student twice
    of_task = int(TOKENS * min(1.0, share))
    moments = rows / of_task * sum(roofline.moments(of_task, d, m) for d, m in groups)
    costs = [roofline.solve(d, m) for d, m in groups]
    owners = owners_of(costs, size)
    own = max(sum(c for c, owner in zip(costs, owners, strict=True) if owner == rank) for rank in set(owners))
    sums = [8 * (d * d / 2 + d * m) for d, m in groups]
    others = len(set(teams.values())) - 1
    into = max(sum(s for s, owner in zip(sums, owners, strict=True) if owner == rank) for rank in set(owners)) * others
    sent = into + (2 * model.block if size > 1 else 0)
    read = 2 * model.parameters * (2 * held + 2)  # every expert twice, once for its hash; base and merged
    solving = 8 * max(3 * d * d + 5 * d * m for d, m in groups)
    return Need(
        counting=model.blocks * (forward + moments) / GPU.forward,
        solving=model.blocks * own / GPU.solve,
        exchange=model.blocks * sent / GPU.network,
        reading=read * min(size, 8) / GPU.disk,
        working_bytes=sum(sums) + max(sum(sums) / 2, solving) + 18 * model.block,
        state_bytes=2 * 4 * rows * model.width,
        read_bytes=read,
    )


def read_runs() -> list[dict[str, Any]]:
    """Read the runs of docs/scale.json; each says whether constants are fitted on it."""
    found: list[dict[str, Any]] = json.loads(RUNS.read_text(encoding="utf-8"))["runs"]
    return found


def count_work(run: Mapping[str, Any]) -> list[float]:
    """Count what core-seconds are made of: processes, float32 operations, float64 operations, and bytes that are moved
    by what is no large product."""
    shape, tasks, samples, size = ranks.SHAPES[run["shape"]], run["tasks"], run["samples"], run["processes"]
    if isinstance(shape, families.ClipShape):
        length, flops = shape.tokens, roofline.clip_flops(shape, tasks, samples)
    else:
        length, flops = ranks.LENGTH, roofline.llama_flops(shape, tasks, samples, ranks.LENGTH)
    expert, student, moments, solve, _ = astuple(flops)
    groups = roofline.every_group(shape)
    # Norms, residuals and activations read and write what they have once or twice. Products of attention are narrow,
    # and its softmax takes exponentials.
    features = 3 * shape.blocks * (10 * shape.width + 4 * shape.hidden + 12 * shape.heads * length)
    # A float32 product is read, and added to a float64 sum, which is read and written.
    sums = 24 * tasks * sum(d * d + d * m for d, m in groups)
    weights = 4 * sum(d * m for d, m in groups) * (2 * tasks + 2 * size + 2)
    asked, generated = count_canary(shape, tasks, samples) if run["canary"] else (0, 0)
    moved = 4 * tasks * samples * length * features + sums + weights + generated
    return [size, expert + student + moments + asked, solve, moved]


def count_canary(shape: families.LlamaShape, tasks: int, samples: int) -> tuple[float, float]:
    """Count operations of the canary where many tokens are read at once, and bytes of weights where each is of a few.

    Three models answer the prompts of every task, which are halves of its rows, and read the expert's answers.
    """
    prompts = min(samples, generation_check.PROMPTS)
    read = prompts * (ranks.LENGTH + generation_check.TOKENS)  # a half in each of two passes, and the answer
    steps = math.ceil(prompts / generation_check.TOGETHER) * generation_check.TOKENS
    maps = shape.blocks * shape.block + shape.vocabulary * shape.width
    return 3 * tasks * 2 * maps * read, 3 * tasks * 4 * maps * steps


def fit_constants(runs: Sequence[Mapping[str, Any]]) -> list[float]:
    """Find the four constants, none below 0, by which relative errors are least."""
    rows = np.array([count_work(run) for run in runs])
    seconds = np.array([run["core_seconds"] for run in runs])
    scale = rows.max(0)
    found, _ = nnls(rows / scale / seconds[:, None], np.ones(len(runs)))
    return [float(one) for one in found / scale]


def predict(constants: Sequence[float], run: Mapping[str, Any]) -> float:
    """Predict the core-seconds of a run."""
    return float(np.dot(constants, count_work(run)))


def compare_runs(runs: Sequence[Mapping[str, Any]]) -> str:
    """Set every run beside its prediction."""
    constants = fit_constants([run for run in runs if run["fitted"]])
    lines = ["| run | processes | core-seconds | predicted | error | |", "|---|---|---|---|---|---|"]
    for run in runs:
        guess = predict(constants, run)
        error = guess / run["core_seconds"] - 1
        name = f"{run['shape']}, {run['tasks']} tasks x {run['samples']}"
        kind = "fitted" if run["fitted"] else "held out"
        lines.append(
            f"| {name} | {run['processes']} | {run['core_seconds']:.1f} | {guess:.1f} | {error:+.0%} | {kind} |"
        )
    said = "process {:.1f} s, {:.3g} s per 1e12 float32 operations, {:.3g} s per 1e12 float64 ones, {:.2g} s per GB"
    scaled = [constants[0], constants[1] * 1e12, constants[2] * 1e12, constants[3] * 1e9]
    return "\n".join(["Constants: " + said.format(*scaled) + ".", "", *lines])


def predict_ahead(runs: Sequence[Mapping[str, Any]]) -> str:
    """Predict what one process would take for `AHEAD`, which was not run."""
    constants = fit_constants([run for run in runs if run["fitted"]])
    lines = ["| shape | tasks x samples | core-hours | counting | solving | moving |", "|---|---|---|---|---|---|"]
    for shape, tasks, samples in AHEAD:
        run = {"shape": shape, "tasks": tasks, "samples": samples, "processes": 1, "canary": False}
        _, *parts = (one * count for one, count in zip(constants, count_work(run), strict=True))
        total = predict(constants, run)
        shares = " | ".join(f"{part / total:.0%}" for part in parts)
        lines.append(f"| {shape} | {tasks} x {samples} | {total / 3600:.1f} | {shares} |")
    return "\n".join(lines)


def predict_models() -> str:
    """Predict what 8B and 70B take."""
    lines = [
        "| model | experts | GPUs | minutes | counting | solving | exchange | reading | working GiB | states GiB "
        "| read GB |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, model in MODELS.items():
        for tasks in (5, 20):
            for size in (1, 8, 64):
                one = need(model, tasks, size)
                parts = (one.counting, one.solving, one.exchange, one.reading)
                shares = " | ".join(f"{part / one.seconds:.0%}" for part in parts)
                memory = f"{one.working_bytes / 2**30:.0f} | {one.state_bytes / 2**30:.1f} | {one.read_bytes / 1e9:.0f}"
                lines.append(f"| {name} | {tasks} | {size} | {one.seconds / 60:.1f} | {shares} | {memory} |")
    return "\n".join(lines)


def fill_page(text: str, runs: Sequence[Mapping[str, Any]]) -> str:
    """Return the page with its tables as they are now."""
    tables = {"runs": compare_runs(runs), "larger runs": predict_ahead(runs), "models": predict_models()}
    for name, content in tables.items():
        start, end = f"<!-- table of {name} -->\n", f"<!-- end of {name} -->"
        before, rest = text.split(start)
        text = f"{before}{start}{content}\n{end}{rest.split(end)[1]}"
    return text


def measure_all() -> None:
    """Run what is planned, one after the other; a killed measurement goes on where it was."""
    file = RUNS.with_suffix(".unfinished.json")
    found = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {"runs": []}
    for one in PLAN[len(found["runs"]) :]:
        command = ["--shape", one.shape, "--tasks", one.tasks, "--samples", one.samples, "--processes", one.processes]
        command += ["--max-memory", one.max_memory] if one.max_memory else []
        words = [sys.executable, str(Path(ranks.__file__)), *map(str, command)]
        told = json.loads(subprocess.run(words, stdout=subprocess.PIPE, check=True, text=True).stdout)
        found["runs"].append({"fitted": one.fitted, "max_memory": one.max_memory, **told["runs"][0]})
        found["machine"] = told["machine"]
        file.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    file.rename(RUNS)


def main() -> None:
    """Write the tables of the page anew, after measurements where they are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--measure", action="store_true", help="run all of PLAN anew before")
    if parser.parse_args().measure:
        measure_all()
    PAGE.write_text(fill_page(PAGE.read_text(encoding="utf-8"), read_runs()), encoding="utf-8")


if __name__ == "__main__":
    main()

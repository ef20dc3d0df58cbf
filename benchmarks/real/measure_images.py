"""Methods on the real image suite: `python benchmarks/real/measure_images.py SUITE_FOLDER --part grid|sweep|budget`.

Grid: mergers x what can be done to a merged model, with calibration seeds 42, 43 and 44, on test pictures. Sweep: λ, ρ
and α of the paper's recipe, on validation pictures of the tuned sets. Budget: paper and refined against the number of
samples. One JSON line per model in `--rows`; what has its line is not done again, so a killed run goes on.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
import measure  # noqa: E402
from pictures import TUNED  # noqa: E402

from featcal.errors import FeatcalError  # noqa: E402
from featcal.session import open_session  # noqa: E402
from featcal.views import View  # noqa: E402

MERGERS = (
    "task-arithmetic", "simple-averaging", "ties", "breadcrumbs", "tsv-m", "iso-c", "iso-cts",
    "wudi-optimum",
)  # fmt: skip
TREATMENTS = {
    "paper": "calibrated:{own}",
    "refined": "calibrated:recipe=refined,{own}",
    "polish": "polished:steps=30,{own}@merged",
    "surgery": "surgery:{own}@merged",
    "probsurgery": "probsurgery:{own}@merged",
}
SEEDS = (42, 43, 44)
SAMPLES = 64
LAMS, ALPHAS, RHOS = (0.0001, 0.001, 0.01, 0.05, 0.2), (0.0, 0.3, 0.6), (0.5, 8.0)
DEFAULT_RHO = 2.0
BUDGETS = (8, 16, 32, 64, 128, 256)
FIRST = MERGERS[0]
Row = dict[str, Any]


def grid() -> Iterator[Row]:
    """Every model with its merger: one seed of everything, then the other seeds, closed forms first."""
    yield from ({"merger": FIRST, "treatment": one, "model": one, "seed": None} for one in ("base", "expert"))
    for merger in MERGERS:
        for treatment, model in (("nothing", "merged"), ("svc", "svc@merged")):
            yield {"merger": merger, "treatment": treatment, "model": model, "seed": None}
        yield from (treated(merger, one, SEEDS[0]) for one in TREATMENTS)
    for names in (tuple(TREATMENTS)[:2], tuple(TREATMENTS)[2:]):
        yield from (treated(merger, one, seed) for seed in SEEDS[1:] for merger in MERGERS for one in names)
    for kind in ("regmean", "regmean++"):
        for seed in SEEDS:
            model = f"{kind}:samples={SAMPLES},seed={seed}"
            yield {"merger": kind, "treatment": "nothing", "model": model, "seed": seed}


def treated(merger: str, treatment: str, seed: int) -> Row:
    model = TREATMENTS[treatment].format(own=f"samples={SAMPLES},seed={seed}")
    return {"merger": merger, "treatment": treatment, "model": model, "seed": seed}


def sweep() -> Iterator[Row]:
    """The paper's recipe around its defaults: λ with α at the default ρ, and λ with the other ρ."""
    settings = [(lam, DEFAULT_RHO, alpha) for lam in LAMS for alpha in ALPHAS]
    settings += [(lam, rho, 0.3) for lam in LAMS for rho in RHOS]
    for lam, rho, alpha in settings:
        model = f"calibrated:lam={lam:g},rho={rho:g},alpha={alpha:g},samples={SAMPLES},seed=42"
        yield {"merger": FIRST, "treatment": "sweep", "model": model, "seed": 42}
    yield treated(FIRST, "refined", 42)


def budget() -> Iterator[Row]:
    for seed in SEEDS:
        for samples in BUDGETS:
            for treatment in ("paper", "refined"):
                model = TREATMENTS[treatment].format(own=f"samples={samples},seed={seed}")
                yield {"merger": FIRST, "treatment": treatment, "model": model, "seed": seed, "samples": samples}


PARTS = {"grid": grid, "sweep": sweep, "budget": budget}


def suite_of(folder: Path, merger: str) -> Path:
    """The suite with another merged model, in a file of its own beside it."""
    if merger not in MERGERS:
        return folder / "suite.yaml"
    content = yaml.safe_load((folder / "suite.yaml").read_text())
    content["merged"] = {"method": merger}
    file = folder / f"suite-{merger}.yaml"
    file.write_text(yaml.safe_dump(content, sort_keys=False))
    return file


def measured(folder: Path, row: Row, split: str) -> Row:
    """The row with scores in %, and the seconds of making the model."""
    session = open_session(suite_of(folder, row["merger"]), resident=True)
    busy = time.process_time()
    try:
        if row["model"] != "expert":
            session.weights(session.named(row["model"])).read(session.family.adapter.tower)
        seconds = time.process_time() - busy
        scores = session.scores(session.named(row["model"]), View(None, split))
    except FeatcalError as error:
        return {**row, "split": split, "refused": str(error)}
    shown = TUNED if split == "validation" else tuple(scores.tasks)
    tasks = {task: round(100 * scores.tasks[task].value, 2) for task in shown}
    average = round(sum(tasks.values()) / len(tasks), 3)
    return {**row, "split": split, "average": average, "tasks": tasks, "cpu_seconds": round(seconds, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--part", choices=PARTS, default="grid")
    parser.add_argument("--split", choices=("validation", "test"), help="test, but for a sweep")
    parser.add_argument("--rows", type=Path, required=True, help="file of JSON lines; gone on from")
    parser.add_argument("--merger", action="append", help="these alone")
    parser.add_argument("--model", action="append", help="these alone, of the first merger, instead of a part")
    options = parser.parse_args()
    split = options.split or ("validation" if options.part == "sweep" else "test")
    wanted = PARTS[options.part]()
    if options.model:
        wanted = iter([{"merger": FIRST, "treatment": "named", "model": one, "seed": None} for one in options.model])
    lines = options.rows.read_text().splitlines() if options.rows.exists() else []
    known = {(row["merger"], row["model"], row["split"]) for row in map(json.loads, lines)}
    for row in wanted:
        if (row["merger"], row["model"], split) in known or (options.merger and row["merger"] not in options.merger):
            continue
        done = measured(options.folder, row, split)
        with options.rows.open("a") as file:
            file.write(json.dumps(done) + "\n")
        measure.say(f"{row['merger']} {row['model']}: {done.get('average', done.get('refused'))}")
        gc.collect()


if __name__ == "__main__":
    main()

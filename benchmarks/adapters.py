"""Measure what adapters of a low rank keep of a calibration: `python benchmarks/adapters.py [SUITE ...]`.

Of every embedded suite, or of those that are named: the repair by the recipe "refined" as an adapter over the merge;
the same rank cut by the plain singular values of the weights' change; the whole merge as an adapter over the base; and
an adapter per task over the calibrated model. Rows of the record are measured anew; where a run over the same suites
was stopped, those that are left. Scores are of the whole test split, relative drift of the final features of 200 of its
samples.
`python docs/results.py` puts the tables into docs/results/adapters.md.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from featcal import load_suite, open_session
from featcal.calibration.low_rank import Limits
from featcal.calibration.repair import RepairAdapter
from featcal.formats.low_rank import Adapted
from featcal.formats.weights import Weights
from featcal.session.model_ref import ModelId
from featcal.session.session import Session
from featcal.suite.views import EvaluationSamples
from featcal.system.atomic_files import put
from featcal.system.formatting import percent

RECORD = Path(__file__).parents[1] / "docs" / "adapters.json"
SUITES = ("clip-mini", "t5-mini", "lm-mini")
RANKS = (1, 2, 4, 8, 16, "full")
CALIBRATED = "calibrated:recipe=refined,samples=64,seed=42"
WHOLE = 10**6
ENDS: Mapping[str | int, str] = {"merged": "merged", "calibrated": CALIBRATED}


def measure(session: Session, rank: str | int) -> dict[str, Any]:
    """Return the row of a rank, of "full", or of a model of `ENDS`."""
    row: dict[str, Any] = {"suite": session.family.suite.name, "rank": rank}
    if rank in ENDS:
        return row | _values(session, ENDS[str(rank)])
    directions = WHOLE if rank == "full" else int(rank)
    repair, whole = (session.fit.repair(CALIBRATED, over, Limits(directions)) for over in ("merged", "base"))
    models: Mapping[str, ModelId] = {
        "repair": repair.weights,
        "plain": cut_plainly(repair, directions),
        "base": whole.weights,
        "adapters": f"adapters:rank={directions},samples=64,seed=42@{CALIBRATED}",
    }
    row["left_out"] = repair.lost_share
    row["bytes"] = sum(one.numel() * one.element_size() for pair in repair.products.values() for one in pair)
    return row | {name: _values(session, model) for name, model in models.items()}


def cut_plainly(repair: RepairAdapter, rank: int) -> Weights:
    """Return the model of a repair whose maps are cut by the singular values of their change alone."""
    start, adapter = repair.start.read(repair.products), repair.family.adapter
    assert isinstance(repair.weights, Adapted)
    end = repair.end.read(repair.products)
    products = {}
    for name in repair.products:
        left, values, right = torch.linalg.svd((end[name] - start[name]).double(), full_matrices=False)
        up, down = left[:, :rank] * values[:rank], right[:rank]
        products[name] = (down.mT, up.mT) if name in adapter.transposed_weights else (up, down)
    return Adapted("plain", repair.weights.under, products, adapter.transposed_weights)


def _values(session: Session, model: ModelId) -> dict[str, float]:
    """Return the average score and the mean relative drift of the final features."""
    scores = session.measure.scores(model, EvaluationSamples(None, "test"))
    tasks = session.measure.features(model, EvaluationSamples(200, "test")).tasks.values()
    return {"score": scores.average, "drift": sum(one.layers[-1].relative_drift for one in tasks) / len(tasks)}


def table(rows: Sequence[Mapping[str, Any]], suite: str) -> str:
    """Return the table of one suite in Markdown; scores in %, drift after them."""
    own = [row for row in rows if row["suite"] == suite]
    head = ["rank", "kB", "left out, %", "repair over the merge", "the same rank by plain SVD"]
    head += ["whole merge over the base", "adapter per task over the calibrated"]
    lines = [f"| {' | '.join(head)} |", f"|{'---:|' * len(head)}"]

    def pair(one: Mapping[str, float]) -> str:
        return f"{percent(one['score'])} ({one['drift']:.2f})"

    for row in own:
        if "left_out" in row:
            sizes = [str(row["rank"]), f"{row['bytes'] / 1000:.0f}", f"{100 * row['left_out']:.1f}"]
            lines.append(
                f"| {' | '.join([*sizes, *(pair(row[one]) for one in ('repair', 'plain', 'base', 'adapters'))])} |"
            )
    ends = ", ".join(f"{row['rank']} {pair(row)}" for row in own if "left_out" not in row)
    return "\n".join([f"{suite}: {ends}.", "", *lines])


def rows_to_keep(rows: Sequence[Mapping[str, Any]], names: Sequence[str], count: int) -> list[Mapping[str, Any]]:
    """Return the rows that stay: all, where a run over these suites was stopped before each had `count`; else those of
    other suites."""
    stopped = any(sum(row["suite"] == name for row in rows) < count for name in names)
    return [row for row in rows if stopped or row["suite"] not in names]


def main() -> None:
    """Measure the suites and write the record, row by row."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("suites", nargs="*", metavar="SUITE", help="left out: every embedded suite")
    suites, ranks = [load_suite(one) for one in parser.parse_args().suites or SUITES], [*ENDS, *RANKS]
    names = [suite.name for suite in suites]
    record = rows_to_keep(json.loads(RECORD.read_text(encoding="utf-8")), names, len(ranks))
    for suite in suites:
        session = open_session(suite)
        for rank in ranks[sum(row["suite"] == suite.name for row in record) :]:
            record.append(measure(session, rank))
            put(RECORD, json.dumps(record, indent=1) + "\n")
        print(table(record, suite.name), end="\n\n", flush=True)


if __name__ == "__main__":
    main()

"""What `featcal select` found, as a table and as sentences."""

from __future__ import annotations

from typing import Any

from featcal.selection.choose import Selection
from featcal.words import duration, exactly

_SCORES = {"drift": "final relative drift", "kl": "divergence from the experts, nats"}


def candidates(found: Selection) -> tuple[list[list[Any]], list[str]]:
    """Rows, the best candidate first, and what their columns are called."""
    columns = ["score", "recipe", "lam", "rho", "alpha", "beta", "mu", ""]
    asked = {name: getattr(found.asked, name) for name in columns[1:-1]}
    rows = []
    for number, one in enumerate(found.candidates):
        marks = ["chosen"] if number == 0 else []
        marks += ["defaults"] if one.options == asked else []
        marks += [f"failed: {one.failure}"] if one.failure else []
        shown = [exactly(value) if isinstance(value, float) else value for value in one.options.values()]
        rows.append(["-" if one.score is None else one.score.value, *shown, ", ".join(marks)])
    return rows, columns


def said(found: Selection, suite: str) -> list[str]:
    """What was chosen, by what margin, at what cost and from what."""
    read = sum(found.samples.values())
    kept_out = sum(map(len, found.held_out.values()))
    lines = [f"read: {read} calibration samples of {len(found.samples)} tasks, {kept_out} of them held out; no label"]
    if found.criterion is not None:
        lines += [
            f"score: {_SCORES[found.criterion]} on held-out samples, mean over tasks",
            f"cost: {found.calibrations} calibrations, {duration(found.seconds)}",
        ]
    if found.margin is not None:
        one = found.margin
        noise = ", within noise" if one.within_noise else ""
        lines.append(
            f"against the defaults: {one.a:.4f} -> {one.b:.4f}, {one.difference:+.4f} "
            f"[{one.low:+.4f}, {one.high:+.4f}] (95 %, {one.n} samples it was chosen on{noise})"
        )
    document = found.to_json(suite)
    return [*lines, f"model: {document['model']}", document["command"]]

"""Write what `featcal select` found, as a table and as sentences."""

from __future__ import annotations

from typing import Any

from featcal.studies.selection.candidates import CHOSEN
from featcal.studies.selection.judge import DECISION, DRIFT, Margin
from featcal.studies.selection.outcome import Selection
from featcal.system.formatting import duration, exactly

_SCORES = {
    DECISION: "probability of the experts' decisions",
    DRIFT: "1 - relative drift of the final features",
}


def candidates(found: Selection) -> tuple[list[list[Any]], list[str]]:
    """Return rows, the best candidate first, and the names of their columns."""
    columns = ["score", "against the default", "start", *CHOSEN, ""]
    rows = []
    for one in found.candidates:
        marks = ["chosen"] if (one.start, one.config) == (found.start, found.config) else []
        marks += ["default"] if (one.start, one.config) == ("merged", found.default) else []
        marks += ["as it is"] if one.config is None else []
        marks += [f"failed: {one.failure}"] if one.failure else []
        options = ["" if one.config is None else getattr(one.config, name) for name in CHOSEN]
        shown = [exactly(value) if isinstance(value, float) else value for value in options]
        score = "-" if one.score is None else one.score.value
        rows.append([score, _format_margin(one.margin), one.start, *shown, ", ".join(marks)])
    return rows, columns


def describe_selection(found: Selection, suite: str) -> list[str]:
    """Say what was chosen, by what margin, at what cost and from what."""
    read = sum(found.samples.values())
    lines = [f"read: {read} calibration samples of {len(found.samples)} tasks, in 4 folds; no label"]
    if found.criterion is not None:
        lines += [
            f"score: {_SCORES[found.criterion]} on held-out samples, mean over tasks",
            f"cost: {found.calibrations} calibrations, {duration(found.seconds)}",
        ]
    if found.margin is not None:
        one = found.margin
        stays = found.start == "merged" and found.config == found.default
        kept = f"the default stays: {one.a:.4f}, and none is better by more than its interval"
        won = f"better than the default: {one.a:.4f} -> {one.b:.4f}, {_format_margin(one)} (95 %, {one.n} samples)"
        lines.append(kept if stays else won)
    if found.verdict is not None:
        lines.append(found.verdict.sentence)
    return [*lines, f"model: {found.model}", found.command(suite)]


def _format_margin(margin: Margin | None) -> str:
    return "-" if margin is None else f"{margin.difference:+.4f} [{margin.low:+.4f}, {margin.high:+.4f}]"

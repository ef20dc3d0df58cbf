"""Write the result of `featcal select` as a table and as sentences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from featcal.studies.selection.judge import DECISION, DRIFT
from featcal.suite.calibration_options import CHOSEN, OPTIONS
from featcal.system.formatting import duration, exactly

_SCORES = {
    DECISION: "probability of the experts' decisions",
    DRIFT: "1 - relative drift of the final features",
}


def candidate_table(document: Mapping[str, Any]) -> tuple[list[list[Any]], list[str]]:
    """Return rows, the best candidate first, and the names of their columns.

    Args:
        document: of `featcal select --json`.
    """
    columns = ["score", "against the default", "start", *CHOSEN, ""]
    rows = []
    for one in document["candidates"]:
        options = {name: one[name] for name in CHOSEN}
        marks = ["chosen"] if one["model"] == document["model"] else []
        marks += ["default"] if (one["start"], options) == (document["of"], document["defaults"]) else []
        marks += ["as it is"] if one["recipe"] is None else []
        marks += [f"failed: {one['failure']}"] if one["failure"] else []
        shown = ["" if value is None else exactly(value) if isinstance(value, float) else value
                 for value in options.values()]  # fmt: skip
        score = "-" if one["score"] is None else one["score"]
        rows.append([score, _format_margin(one["margin"]), one["start"], *shown, ", ".join(marks)])
    return rows, columns


def name_candidates(document: Mapping[str, Any]) -> list[str]:
    """Return a short name for every candidate, in their order: its start or its recipe, with the numbers that differ
    from the default or, for another recipe that was tried several times, from each other."""
    found, default = document["candidates"], document["defaults"]
    names = []
    for one in found:
        alike = [other for other in found if other["recipe"] == one["recipe"]]
        beside = [default] if one["recipe"] == default["recipe"] else alike
        values = [
            f"{OPTIONS[name].symbol} {exactly(one[name])}"
            for name in CHOSEN[1:]
            if one["recipe"] and any(other[name] != one[name] for other in beside)
        ]
        start = [] if one["start"] == document["of"] and one["recipe"] else [one["start"]]
        names.append(", ".join([*start, *filter(None, [one["recipe"]]), *values]))
    return names


def describe_selection(document: Mapping[str, Any]) -> list[str]:
    """Describe the choice, its margin, its cost and its samples."""
    samples, criterion = document["read"]["samples"], document["criterion"]
    dealt = f", in {max(map(len, document['folds'].values()))} folds" if document["folds"] else ""
    lines = [f"read: {sum(samples.values())} calibration samples of {len(samples)} tasks{dealt}; no label"]
    if criterion is not None:
        lines += [
            f"score: {_SCORES[criterion]} on held-out samples, mean over tasks",
            f"cost: {document['calibrations']} calibrations, {duration(document['seconds'])}",
        ]
    one = document["margin"]
    if one is not None:
        stays = (document["start"], document["chosen"]) == (document["of"], document["defaults"])
        kept = f"the default stays: {one['a']:.4f}, and none is better by more than its interval"
        gain = f"{one['a']:.4f} -> {one['b']:.4f}, {_format_margin(one)} (95 %, {one['n']} samples)"
        lines.append(kept if stays else f"better than the default: {gain}")
    return [*lines, *filter(None, [document["verdict"]])]


def _format_margin(margin: Mapping[str, float] | None) -> str:
    return "-" if margin is None else f"{margin['difference']:+.4f} [{margin['low']:+.4f}, {margin['high']:+.4f}]"

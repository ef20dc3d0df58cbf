"""Draw the headline of a page: four cards with the gain of a repair. It must not import torch, because the first page
uses it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import streamlit as st

from featcal.figures.names import plain
from featcal.system.formatting import percent, points

if TYPE_CHECKING:  # the first page is drawn before torch is there
    from featcal.evaluation.comparison import Comparison, Difference
    from featcal.evaluation.evaluate import Scores

NOISE = (
    "Difference with its 95\u00a0% interval (bootstrap over the same samples of both models, within tasks). Grey, "
    "within noise: the interval holds 0, or McNemar's exact test has p above 0.05. Other calibration seeds are not "
    "in it."
)
"""Help text for the difference of two models' scores."""
UNKNOWN = "not measured"
Colour = Literal["normal", "inverse", "off"]


@dataclass(frozen=True)
class Card:
    """A number with its label and change; `about` is shown in grey after the change."""

    label: str
    value: str = "–"
    change: str = UNKNOWN
    about: str = ""
    colour: Colour = "off"
    help: str | None = None


@dataclass(frozen=True)
class HeadlineNumbers:
    """The measurements of a merge and of the model compared with it; None if not measured.

    Args:
        metric, split: in words.
        drift: relative final drift of both, the merge first.
        missing: why there are no scores.
    """

    metric: str
    split: str
    scores: Sequence[Scores]
    expert: Scores | None
    compared: Comparison | None
    drift: Sequence[float]
    missing: str = ""


def draw_cards(cards: Sequence[Card]) -> None:
    """Draw cards side by side, as many as fit."""
    for column, card in zip(st.columns(len(cards)), cards, strict=True):
        column.metric(
            card.label,
            card.value,
            card.change,
            card.colour,
            help=card.help,
            border=True,
            height="stretch",
            delta_arrow="off" if card.colour == "off" else "auto",
            delta_description=card.about or None,
        )


def make_cards(found: HeadlineNumbers) -> list[Card]:
    """Return the four cards: score, share of the gap, final drift, worst task."""
    return [_score_card(found), _gap_card(found), _drift_card(found), _worst_card(found)]


def score_change(one: Difference) -> Mapping[str, str]:
    """Return the fields of a card for a difference with its interval, grey if that is within noise."""
    noise = ", within noise" if one.is_within_noise else ""
    about = f"({points(one.low)} to {points(one.high)}{noise})"
    return {"change": f"{points(one.difference)} points", "about": about, "help": NOISE}


def _arrow(values: Sequence[float]) -> str:
    """Format scores in per cent, the later ones after an arrow, with no-break spaces before the signs."""
    return f"{' → '.join(map(percent, values))}\u00a0%"


def _score_card(found: HeadlineNumbers) -> Card:
    label = f"{found.metric.capitalize()}, {found.split}"
    if not found.scores:
        return Card(label, change=found.missing or UNKNOWN)
    value = _arrow([one.average for one in found.scores])
    if found.compared is None:
        return Card(label, value, "" if found.expert is None else f"experts {percent(found.expert.average)}\u00a0%")
    one = found.compared.average
    return Card(label, value, colour="off" if one.is_within_noise else "normal", **score_change(one))


def _gap_card(found: HeadlineNumbers) -> Card:
    alone = len(found.scores) < 2
    label = "Kept of the experts" if alone and found.scores else "Gap closed"
    if not found.scores or found.expert is None:
        return Card(label, change=found.missing or UNKNOWN)
    top, first = found.expert.average, found.scores[0].average
    if alone:
        return Card(label, f"{100 * first / top:.0f}\u00a0%" if top > 0 else "–", f"of {percent(top)}\u00a0%")
    gap = top - first
    if gap < 0.0005:  # none that a percentage shows
        return Card(label, "–", "no gap to the experts")
    share = 100 * (found.scores[1].average - first) / gap
    return Card(label, f"{share:.0f}\u00a0%", f"of {percent(gap)} points", f"to the experts' {percent(top)}\u00a0%")


def _drift_card(found: HeadlineNumbers) -> Card:
    if not found.drift:
        return Card("Final drift")
    value, first = " → ".join(f"{one:.2f}" for one in found.drift), found.drift[0]
    if len(found.drift) < 2 or first == 0:
        return Card("Final drift", value, "of the expert feature's norm")
    change = 100 * (found.drift[1] / first - 1)
    return Card("Final drift", value, f"{change:+.0f}\u00a0%", "of the expert feature's norm", "inverse")


def _worst_card(found: HeadlineNumbers) -> Card:
    if not found.scores or found.expert is None:
        return Card("Worst task", change=found.missing or UNKNOWN)
    first, experts = found.scores[0].tasks, found.expert.tasks
    task = min(experts, key=lambda name: first[name].value - experts[name].value)
    value = _arrow([one.tasks[task].value for one in found.scores])
    return Card(f"Worst task: {plain(task)}", value, f"its expert {percent(experts[task].value)}\u00a0%")

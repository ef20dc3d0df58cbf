"""Draw single samples as points, with picked ones highlighted, and differences of scores with their intervals."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from textwrap import shorten, wrap
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from numpy.typing import NDArray

from featcal.figures.names import label
from featcal.figures.sample_tables import PerSample, answer_column
from featcal.figures.theme import COLOUR, apply_theme, colour, label_task_rows, rows_apart, symbol
from featcal.system.formatting import p_value, points

if TYPE_CHECKING:  # charts are there before torch is
    from featcal.evaluation.comparison import Comparison, Difference
    from featcal.samples.sources import Samples

Array = NDArray[np.floating]

DIFFERENCES = r"""
**What this shows.** How much better the second model scores than the first, per task and on average over tasks, with
the interval in which the difference lies for 95 of 100 draws of such samples. Grey and open: within noise.

**Formula.** The samples are drawn again with replacement, within each task, both models on the same draw; the interval
runs from the 2.5th to the 97.5th percentile of the differences. McNemar: of $k$ samples whose answer changed, $f$ were
fixed; $p$ is the chance that $k$ throws of a fair coin are as uneven (for the average: over all tasks together).
*Within noise*: the interval holds 0, or $p > 0.05$, since few changed answers make the interval alone too sure.

**When it misleads.** The interval is about other samples, not about other calibration samples: another seed gives
another model. Of twenty tasks without any difference one looks like one. Models that were chosen on these very samples
look better than they are. A rank correlation has only the interval: its answers are not right or wrong one by one.
"""


@dataclass(frozen=True)
class Dots:
    """The samples of a chart: point i of every model is sample `ids[i]`."""

    ids: Sequence[int]
    labels: Sequence[str]
    """The text of every sample, escaped for plotly."""
    answers: Sequence[str] | None = None
    """The right answer, or another word, of every sample, if it decides the colour."""
    numbers: Sequence[float] | None = None
    """The number of every sample that decides the colour."""
    coloured_by: str = ""
    """The name of the property that the colour shows; "" if colours mark models."""
    picked: Collection[int] = ()
    """Ids of the highlighted samples; with none all are highlighted."""

    @property
    def lit_positions(self) -> list[int] | None:
        """Return positions of the picked samples: None if none was picked, empty if none of them is in this chart."""
        return [i for i, one in enumerate(self.ids) if one in self.picked] if self.picked else None

    @property
    def look(self) -> dict[str, Any]:
        """Return the style of a trace of these samples: ids and texts, with picked samples larger and the others
        faint."""
        return {
            "customdata": list(self.ids),
            "text": list(self.labels),
            "selectedpoints": self.lit_positions,
            "selected": {"marker": {"opacity": 1.0, "size": 13}},
            "unselected": {"marker": {"opacity": 0.25}},
        }


def pick_by_drawing(figure: go.Figure) -> go.Figure:
    """Set the mouse to draw a lasso, and a click to pick one point; reserve space for the tools above the legend."""
    return figure.update_layout(dragmode="lasso", clickmode="event+select", margin={"t": 84})


def ring_picked(figure: go.Figure, points: Sequence[tuple[Array, Array]], dots: Dots) -> None:
    """Draw a ring around every picked sample, with a line in the legend; nothing if none of them is in this chart.

    Args:
        points: across and up, `[n]` each, for every model.
    """
    if lit := dots.lit_positions:
        figure.add_scatter(
            x=np.concatenate([across[lit] for across, _ in points]),
            y=np.concatenate([up[lit] for _, up in points]),
            name="selected",
            mode="markers",
            marker={"symbol": "circle-open", "size": 19, "color": COLOUR["base"], "line": {"width": 2}},
            hoverinfo="skip",
        )


def hover_texts(data: Samples, ids: Sequence[int], models: Mapping[str, PerSample]) -> list[str]:
    """Write the hover texts of samples: a class or a text in lines with its answer, and every model's answer, as far as
    it is measured."""
    answers = answer_column(data) or ["no label"] * len(data)
    if data.texts is None:
        what = [f"<b>{label(answers[i])}</b>" for i in ids]
    else:
        short = (shorten(data.texts[i], 160, placeholder=" …") for i in ids)
        lines = ("<br>".join(label(line) for line in wrap(one, 60)) for one in short)
        what = [f"{text}<br>answer: <b>{label(answers[i])}</b>" for i, text in zip(ids, lines, strict=True)]
    sayings = ([_saying(name, one, i) for name, one in models.items()] for i in ids)
    return ["<br>".join(filter(None, [first, *lines])) for first, lines in zip(what, sayings, strict=True)]


def _saying(name: str, model: PerSample, i: int) -> str:
    """Return a model's answer to sample `i` as one line; "" if it was not scored."""
    right = "" if model.right is None else " ✓" if model.right[i] else " ✗"
    if model.answers is None:
        return f"{label(name)}: first token{right}" if right else ""
    return f"{label(name)}: {label(model.answers[i])}{right}"


def cosine_pairs(pair: Mapping[str, Array], dots: Dots) -> go.Figure:
    """Draw every sample's cosine to the expert, the first model's across and the second one's up; points on the
    diagonal are unchanged. A click, a box or a lasso gives the samples' ids as `customdata`."""
    (a, across), (b, up) = pair.items()
    low = float(min(across.min(), up.min()))
    low -= 0.05 * (1 - low)
    figure = go.Figure()
    figure.add_scatter(
        x=[low, 1],
        y=[low, 1],
        name="no change",
        mode="lines",
        line={"dash": "dot", "color": COLOUR["base"]},
        hoverinfo="skip",
    )
    hover = f"sample %{{customdata}}, {label(a)} %{{x:.3f}} → {label(b)} %{{y:.3f}}"
    figure.add_scatter(
        x=across,
        y=up,
        name="a sample",
        mode="markers",
        marker={"color": colour(b), "size": 8, "opacity": 0.7},
        hovertemplate=f"{hover}<br>%{{text}}<extra></extra>",
        **dots.look,
    )
    ring_picked(figure, [(across, up)], dots)
    figure.update_xaxes(title=f"cosine to the expert, {label(a)}", range=[low, 1.01])
    figure.update_yaxes(title=f"cosine to the expert, {label(b)}", range=[low, 1.01])
    return pick_by_drawing(apply_theme(figure, 400))


def margins(table: pd.DataFrame, models: Sequence[str], dots: Dots) -> go.Figure:
    """Draw every sample's drift against the expert's margin: a sample with a large margin and little drift keeps its
    answer. A click, a box or a lasso gives the samples' ids as `customdata`.

    Args:
        table: of `sample_tables.sample_table`, with the expert's margins and the drift of the models.
    """
    figure = go.Figure()
    across = table["expert margin"].to_numpy()
    points = {model: (across, table[f"{model} drift"].to_numpy()) for model in models}
    for model, (x, y) in points.items():
        figure.add_scatter(
            x=x,
            y=y,
            name=model,
            mode="markers",
            marker={"color": colour(model), "symbol": symbol(model), "size": 8, "opacity": 0.7},
            hovertemplate=f"{label(model)}, sample %{{customdata}}: margin %{{x:.3f}}, drift %{{y:.3f}}<br>%{{text}}"
            "<extra></extra>",
            **dots.look,
        )
    ring_picked(figure, list(points.values()), dots)
    figure.update_xaxes(title="expert confidence: margin of its first answer", rangemode="tozero")
    figure.update_yaxes(title="drift: norm of the change of the final feature", rangemode="tozero")
    return pick_by_drawing(apply_theme(figure, 400))


def differences_chart(found: Comparison, pair: tuple[str, str], metric: str) -> go.Figure:
    """Draw the second minus the first score in points with its 95 % interval, the largest gain on top and the average
    separate below; grey and open if it is within noise."""
    rows = {**dict(sorted(found.tasks.items(), key=lambda one: -one[1].difference)), "average": found.average}
    places = dict(zip(rows, rows_apart([task == "average" for task in rows]), strict=True))
    figure = go.Figure()
    for noise in (False, True):
        shown = {task: one for task, one in rows.items() if one.is_within_noise == noise}
        if shown:
            drawn = _points(shown, COLOUR["base"] if noise else colour(pair[1]), noise, symbol(pair[1]))
            figure.add_scatter(y=[places[task] for task in shown], **drawn)
    figure.add_vline(x=0, line={"color": COLOUR["base"], "dash": "dot"})
    right = max(100 * one.high for one in rows.values())
    figure.add_scatter(
        x=[max(right, 0.0)] * len(rows),
        y=[*places.values()],
        mode="text",
        text=[f"  {points(one.difference)}" for one in rows.values()],
        textposition="middle right",
        showlegend=False,
        hoverinfo="skip",
        cliponaxis=False,
    )
    figure.update_xaxes(title=f"{label(pair[1])} − {label(pair[0])}, points of {metric}")
    label_task_rows(figure, rows, places.values())
    return apply_theme(figure, 110 + 28 * len(rows)).update_layout(margin={"r": 56})


def _points(rows: Mapping[str, Difference], ink: str, noise: bool, mark: str) -> dict[str, object]:
    """Return one trace without heights: points with their intervals."""
    up = [100 * (one.high - one.difference) for one in rows.values()]
    down = [100 * (one.difference - one.low) for one in rows.values()]
    written = [
        [label(task), *map(points, (one.difference, one.low, one.high)), "–" if one.p is None else p_value(one.p)]
        for task, one in rows.items()
    ]
    shape = mark.removesuffix("-open")
    return {
        "x": [100 * one.difference for one in rows.values()],
        "name": "within noise" if noise else "beyond noise",
        "mode": "markers",
        "marker": {"color": ink, "symbol": f"{shape}-open" if noise else shape, "size": 11, "line": {"width": 2}},
        "error_x": {"type": "data", "array": up, "arrayminus": down, "color": ink, "thickness": 2, "width": 6},
        "customdata": written,
        "hovertemplate": "%{customdata[0]}: %{customdata[1]} points, %{customdata[2]} to %{customdata[3]}, "
        "McNemar p %{customdata[4]}<extra></extra>",
        "cliponaxis": False,
    }

"""Draw points of a sweep: mean over tasks against the worst task."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd
import plotly.graph_objects as go

from featcal.figures.names import label, shorten
from featcal.figures.theme import COLOUR, SYMBOL, colour, finish

_LOOK = {
    "base": ("base", COLOUR["base"], SYMBOL["base"]),
    "merged": ("merged", COLOUR["merged"], SYMBOL["merged"]),
    "merger": ("merged otherwise", COLOUR["merged"], "diamond-open"),
    "anchor": ("anchor only", COLOUR["merged"], "x-thin-open"),
    "calibrated": ("calibrated", COLOUR["calibrated"], SYMBOL["calibrated"]),
    "expert": ("experts, one per task", COLOUR["expert"], SYMBOL["expert"]),
}
"""Kind of a point → its name in the legend, colour, symbol; in the order in which they are drawn."""
FRONT = "no run beats these (Pareto)"


def mean_against_worst(frame: pd.DataFrame, metric: str, shown: Mapping[str, str]) -> go.Figure:
    """Draw one point per row of `run_tables.sweep_table`, which carries its run's id as customdata; to the upper right
    is better. The Pareto front has thin rings and a dotted line.

    Args:
        metric: what the scores are, such as "accuracy".
        shown: id → what charts call it, of the models that other pages look at; they get a thick ring.
    """
    figure = go.Figure()
    front = frame[frame["front"]].sort_values(["mean", "worst"], ascending=[True, False])
    figure.add_scatter(
        x=front["mean"],
        y=front["worst"],
        name=FRONT,
        mode="lines+markers",
        line={"color": COLOUR["calibrated"], "dash": "dot", "width": 2},
        marker={"symbol": "circle-open", "size": 17, "color": COLOUR["calibrated"], "line": {"width": 1}},
        hoverinfo="skip",
    )
    for run, name in shown.items():
        rows = frame[frame["run"] == run]
        if len(rows):
            figure.add_scatter(
                x=rows["mean"],
                y=rows["worst"],
                name=f"here: {label(str(name))}",
                mode="markers",
                marker={"symbol": "circle-open", "size": 24, "color": colour(name), "line": {"width": 3}},
                hoverinfo="skip",
            )
    for kind, (name, shade, symbol) in _LOOK.items():
        rows = frame[frame["kind"] == kind]
        if not len(rows):
            continue
        figure.add_scatter(
            x=rows["mean"],
            y=rows["worst"],
            name=name,
            mode="markers",
            marker={"color": shade, "symbol": symbol, "size": 11, "line": {"width": 1.5, "color": shade}},
            customdata=rows["run"].tolist(),
            text=[_hover_text(row) for _, row in rows.iterrows()],
            hovertemplate="%{text}<br>mean %{x:.1f} %, worst task %{y:.1f} %<extra></extra>",
        )
    figure.update_xaxes(title=f"mean {metric} over tasks, %")
    figure.update_yaxes(title=f"{metric} on the worst task, %")
    return finish(figure, 350)


def _hover_text(row: pd.Series) -> str:
    """Write what hovering says of a point before its numbers."""
    called = row["name"] or row["model"]
    drift = "" if pd.isna(row["drift"]) else f"<br>drift {row['drift']:.3f}"
    return f"{label(shorten(called, 80))}<br>worst task: {label(shorten(row['worst task'], 40))}{drift}"

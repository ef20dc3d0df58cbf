"""One look for every chart: colours that stay apart for colour-blind readers, on light and on dark ground."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

ROLES = ("base", "merged", "calibrated", "expert")

# Okabe-Ito hues, lightened or darkened until they read on white and on near-black.
COLOUR = {
    "base": "#8A8F98",
    "merged": "#D55E00",
    "calibrated": "#2F8FD3",
    "expert": "#009E73",
    "mismatch": "#CC79A7",
    "propagation": "#E3B23C",
}
OTHERS = ("#E3B23C", "#8C6BB1", "#17BECF", "#CC79A7", "#A65628", "#9ACD32", "#F28E8E", "#5C7CFA", "#B8A99A", "#6B8E6B")
"""Colours of answers and classes, none of them a model's; they come round again after the last."""
SYMBOL = {"base": "square", "merged": "diamond", "calibrated": "circle", "expert": "star"}
"""Shapes say the same as the colours, for readers who cannot use those."""

_GRID = "rgba(128, 134, 145, 0.25)"


def finish(figure: go.Figure, height: int, title: str = "") -> go.Figure:
    """Transparent ground, legend in a row above the panels, grid and margins as everywhere."""
    figure.update_layout(
        height=height,
        title={"text": title, "x": 0, "xanchor": "left", "font": {"size": 15}} if title else None,
        margin={"l": 64, "r": 16, "t": 78 if title else 52, "b": 56},
        legend={"orientation": "h", "yanchor": "bottom", "y": 1.04, "x": 0, "xanchor": "left", "title": None},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        bargap=0.25,
        hoverlabel={"namelength": -1},
        modebar={"bgcolor": "rgba(0,0,0,0)", "color": COLOUR["base"], "activecolor": COLOUR["calibrated"]},
    )
    figure.update_xaxes(gridcolor=_GRID, zerolinecolor=_GRID, automargin=True)
    figure.update_yaxes(gridcolor=_GRID, zerolinecolor=_GRID, automargin=True)
    return figure


def layer_axis(figure: go.Figure, layers: Sequence[str]) -> None:
    """Horizontal axes over layers in forward order, with names short enough to stand side by side."""
    names = [
        layer.replace("encoder block ", "enc ").replace("decoder block ", "dec ").replace("coder embeddings", "c emb")
        for layer in layers
    ]
    figure.update_xaxes(title="layer, in forward order", tickvals=list(layers), ticktext=names)

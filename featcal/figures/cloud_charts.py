"""Draw maps of features and their accompanying charts; the maps themselves are computed elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from featcal.figures.names import cut_text, label
from featcal.figures.sample_charts import Array, Dots, pick_by_drawing, ring_picked
from featcal.figures.theme import COLOUR, NUMBERS, apply_theme, colour, colours, symbol

MANY = 3000
"""Number of points above which a map is drawn by WebGL, and without arrows."""
COLUMNS = 4
"""Number of small maps side by side."""

FEATURES = r"""
**What this shows.** Features of the expert and of the models shown, on the same samples of one task, all divided by
their norm, in **one** map that is fitted on all their clouds together, so their places can be compared. Arrows lead
from the first model to the second. Click a point, or draw around some, to see their samples.

**Layers.** After a block a feature is CLIP's state of the class token, or a language model's mean over the stage's
own tokens without padding. One map holds **all** of these layers: a cloud moves on it as it goes through depth,
and dotted lines lead along its mean. The head's features have a space, and so a map, of their own.

**Formula.** UMAP, 15 neighbours, cosine distance, seed 42; PCA until UMAP has run. *Trustworthiness* (0-1) is
the share of map neighbours, 10 per point, that are neighbours in the full space too, with a penalty by rank; for a
map of all layers it is that of the layer shown. A map holds at most 20,000 points; of more samples it shows a part.

**When it misleads.** Distances between clusters, cluster sizes and axis directions of a UMAP mean nothing. The
histograms beside it are the truth: cosine and distance to the expert in the full feature space. The small maps are
one each: places on two of them cannot be compared.
"""

FEATURES_OF_TEXT = (
    FEATURES
    + r"""
**Texts.** The head's feature is the state that decides the first token of the answer, after the final norm. The mean
over a decoder's tokens includes tokens of the right answer, which it is given.
"""
)


@dataclass(frozen=True)
class MapPosition:
    """The place of one layer's map in the map of all layers."""

    layers: Sequence[str]
    chosen: str
    trails: Mapping[str, Array]
    """Mean position of every model after every layer, `[layers, 2]`; drawn in the frame of all layers."""
    frame: tuple[tuple[float, float], tuple[float, float]] | None
    """Ranges of both axes, the same for all layers, so that positions are comparable; None means those of the
    points."""


def feature_map(
    points: Mapping[str, Array],
    dots: Dots,
    axes: str,
    moved: tuple[str, str] | None = None,
    depth: MapPosition | None = None,
) -> go.Figure:
    """Draw one map of several models' features.

    Shapes mark models. Colours mark models too, or a word or number of every sample if `dots` has one. Picked samples
    stay highlighted in every model. A click, a box or a lasso gives the samples' ids as `customdata`.

    Args:
        points: `[n, 2]` by model.
        axes: the method of the map, such as "UMAP".
        moved: two of the models, whose samples are joined by arrows from the one to the other.
    """
    figure = go.Figure()
    coloured = _colour_answers(dots)
    many = sum(map(len, points.values())) > MANY
    if depth is not None and depth.frame is not None:
        _trails(figure, depth)
    if moved is not None and not many:
        _moves(figure, *moved, points)
    for model, flat in points.items():
        figure.add_trace(_cloud(model, flat, dots, coloured, many))
        if coloured or dots.numbers:
            # Points carry the samples' colours here, so shapes and colours get lines of the legend of their own.
            _legend_entry(figure, model, COLOUR["base"], symbol(model), model)
    ring_picked(figure, [(flat[:, 0], flat[:, 1]) for flat in points.values()], dots)
    # Group None: a click on a colour would hide whole models, whose points have all colours.
    for answer, shade in coloured.items():
        _legend_entry(figure, label(answer), shade, "square", None)
    _bare(figure)
    figure.update_xaxes(title=f"{axes} 1")
    figure.update_yaxes(title=f"{axes} 2", scaleanchor="x")
    if depth is not None and depth.frame is not None:
        figure.update_xaxes(range=depth.frame[0])
        figure.update_yaxes(range=depth.frame[1])
    figure.update_layout(uirevision=_zoom(axes, depth))
    pick_by_drawing(apply_theme(figure, 560))
    if coloured:  # a legend of several rows
        figure.update_layout(margin={"t": 108})
    if dots.numbers:
        bar = {"title": {"text": label(dots.coloured_by), "side": "right"}, "thickness": 12, "outlinewidth": 0}
        figure.update_layout(coloraxis={"colorscale": NUMBERS, "colorbar": bar})
    return figure


def small_maps(maps: Mapping[str, Mapping[str, Array]], dots: Mapping[str, Dots], chosen: str) -> go.Figure:
    """Draw one small map per task, each fitted separately, as in the paper's Fig. 6; the chosen task's title is bold.

    A click gives the task's position and the sample's id as `customdata`.

    Args:
        maps: `[n, 2]` by task and model.
        dots: the samples, by task.
    """
    rows = -(-len(maps) // COLUMNS)
    titles = [f"<b>{_title(task)}</b>" if task == chosen else _title(task) for task in maps]
    figure = make_subplots(
        rows, min(COLUMNS, len(maps)), subplot_titles=titles, horizontal_spacing=0.025, vertical_spacing=0.2 / rows
    )
    many = sum(len(flat) for models in maps.values() for flat in models.values()) > MANY
    for place, (task, models) in enumerate(maps.items()):
        for model, flat in models.items():
            trace = _cloud(model, flat, dots[task], {}, many)
            trace.update(
                showlegend=place == 0,
                marker_size=4,
                selected_marker_size=8,
                customdata=[[place, one] for one in dots[task].ids],
                hovertemplate=f"{label(task)}, {model}, sample %{{customdata[1]}}<br>%{{text}}<extra></extra>",
            )
            figure.add_trace(trace, row=place // COLUMNS + 1, col=place % COLUMNS + 1)
    _bare(figure)
    for axis in figure.select_yaxes():  # a unit is as long across as up, in every map of its own
        axis.scaleanchor = axis.anchor
    figure.update_layout(dragmode="pan")
    apply_theme(figure, 100 + 220 * rows)
    legend = {"y": 1 + 40 / (220 * rows), "itemsizing": "constant"}
    figure.update_layout(margin={"t": 84, "l": 16, "b": 16}, legend=legend)
    figure.update_annotations(font={"size": 13}, yshift=6)
    return figure


def histograms(values: Mapping[str, Array], axis: str) -> go.Figure:
    """Draw overlaid histograms with common bins, one per model."""
    figure = go.Figure()
    together = np.concatenate([np.asarray(v) for v in values.values()])
    low, high = float(together.min()), float(together.max())
    # All values may be equal: bins need a width.
    width = (high - low) / 24 or 0.01
    for model, one in values.items():
        figure.add_histogram(
            x=one,
            name=model,
            xbins={"start": low, "end": high + width, "size": width},
            marker={"color": colour(model), "line": {"width": 0}},
            opacity=0.65,
            hovertemplate=f"{model}, %{{x:.3f}}: %{{y}} samples<extra></extra>",
        )
    figure.update_layout(barmode="overlay")
    figure.update_xaxes(title=axis)
    figure.update_yaxes(title="samples")
    return apply_theme(figure, 260)


def _zoom(axes: str, depth: MapPosition | None) -> str:
    """Return plotly's `uirevision`, which keeps a visitor's zoom: one for the common frame, else one per layer."""
    if depth is None:
        return axes
    return f"{axes} all layers" if depth.frame is not None else f"{axes} {depth.chosen}"


def _title(task: str) -> str:
    return label(cut_text(task, 24))


def _colour_answers(dots: Dots) -> dict[str, str]:
    """Return answer → colour; empty if colours mark models."""
    different = sorted(set(dots.answers or ()))
    return dict(zip(different, colours(len(different)), strict=True))


def _cloud(model: str, flat: Array, dots: Dots, coloured: Mapping[str, str], many: bool) -> go.Scatter | go.Scattergl:
    """Return the points of one model as a trace."""
    kind = go.Scattergl if many else go.Scatter
    shade: dict[str, Any] = {"color": colour(model)}
    if dots.numbers:
        shade = {"color": list(dots.numbers), "coloraxis": "coloraxis"}
    elif dots.answers:
        shade = {"color": [coloured[answer] for answer in dots.answers]}
    return kind(
        x=flat[:, 0],
        y=flat[:, 1],
        name=model,
        mode="markers",
        marker={
            **shade,
            "symbol": symbol(model),
            "size": 8,
            "opacity": 0.85,
        },
        legendgroup=model,
        showlegend=not (coloured or dots.numbers),
        hovertemplate=f"{model}, sample %{{customdata}}<br>%{{text}}<extra></extra>",
        **dots.look,
    )


def _trails(figure: go.Figure, depth: MapPosition) -> None:
    """Draw the way of every model's mean through the layers, with the chosen layer ringed."""
    at = list(depth.layers).index(depth.chosen)
    for model, means in depth.trails.items():
        figure.add_scatter(
            x=means[:, 0],
            y=means[:, 1],
            name=f"{model}, mean by layer",
            mode="lines+markers",
            line={"color": colour(model), "width": 1.5, "dash": "dot"},
            marker={
                "symbol": symbol(model),
                "color": colour(model),
                "size": [14 if i == at else 6 for i in range(len(means))],
                "line": {"color": COLOUR["base"], "width": [2 if i == at else 0 for i in range(len(means))]},
            },
            opacity=0.5,
            text=list(depth.layers),
            hovertemplate=f"mean of {model}, %{{text}}<extra></extra>",
            legendgroup=model,
            showlegend=False,
        )


def _moves(figure: go.Figure, a: str, b: str, points: Mapping[str, Array]) -> None:
    """Draw an arrow from every sample's place in model `a` to its place in model `b`."""
    figure.add_scatter(
        x=_segments(points[a][:, 0], points[b][:, 0]),
        y=_segments(points[a][:, 1], points[b][:, 1]),
        name=f"{label(a)} → {label(b)}",
        mode="lines+markers",
        line={"color": COLOUR["base"], "width": 1},
        marker={"symbol": "arrow", "angleref": "previous", "size": 7, "color": COLOUR["base"]},
        opacity=0.55,
        hoverinfo="skip",
    )


def _bare(figure: go.Figure) -> None:
    """Draw a frame without numbers: positions on a map have no units."""
    bare = {"showticklabels": False, "showgrid": False, "zeroline": False, "showline": True, "mirror": True}
    figure.update_xaxes(linecolor=COLOUR["base"], **bare)
    figure.update_yaxes(linecolor=COLOUR["base"], **bare)


def _legend_entry(figure: go.Figure, name: str, shade: str, shape: str, group: str | None) -> None:
    """Add a line to the legend, without points of its own."""
    marker = {"color": shade, "symbol": shape, "size": 9}
    # A trace without any point has no line in the legend; one of None has.
    figure.add_scatter(x=[None], y=[None], name=name, mode="markers", marker=marker, legendgroup=group)


def _segments(start: Array, end: Array) -> list[float | None]:
    """Join many separate line segments into one trace: start, end, gap, start, end, gap, …"""
    return [value for pair in zip(start.tolist(), end.tolist(), strict=True) for value in (*pair, None)]

"""Draw numbers as plotly figures. No streamlit in here, and nothing is computed beyond means and differences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from numpy.typing import NDArray
from plotly.subplots import make_subplots

from featcal.figures.names import label
from featcal.figures.theme import COLOUR, colour, dash, finish, layer_axis, symbol, task_axis

Array = NDArray[np.floating]
_UNIT = {
    False: ("norm over the whole token state", ".2f"),
    True: ("norm / norm of the expert's feature", ".3f"),
}


def drift_layers(frames: Mapping[str, pd.DataFrame], relative: bool, chosen: str | None = None) -> go.Figure:
    """Draw ||m|| and ||p|| per layer side by side, which do not add up, and ||e|| as a line; one panel per model, one
    common scale."""
    return _ribbon(frames, "layer", relative, chosen)


def drift_tasks(frames: Mapping[str, pd.DataFrame], relative: bool) -> go.Figure:
    """Draw ||m||, ||p|| and ||e|| at one layer, task by task; one panel per model, one common scale."""
    return _ribbon(frames, "task", relative, None)


def compare_drift(
    drifts: Mapping[str, pd.Series], ghost: pd.Series | None = None, preview: tuple[str, float] | None = None
) -> go.Figure:
    """Draw ||e|| / ||h_expert|| by layer, one line per model.

    Args:
        ghost: of the last model before it had the options that it has now; drawn faintly.
        preview: a layer, and where the last model's drift would be behind it; a point on a thin line from the layer
            before, where nothing changes.
    """
    figure = go.Figure()
    axis, form = _UNIT[True]
    for model, drift in drifts.items():
        figure.add_scatter(
            x=drift.index,
            y=drift,
            name=model,
            cliponaxis=False,
            mode="lines+markers",
            line={"color": colour(model), "width": 3, "dash": dash(model)},
            marker={"symbol": symbol(model), "size": 10},
            hovertemplate=f"%{{x}}: %{{y:{form}}}",
        )
    if ghost is not None:
        line = {"color": colour(model), "width": 1.5, "dash": "dot"}
        figure.add_scatter(x=ghost.index, y=ghost, name="before", mode="lines", line=line, opacity=0.6)
    if preview is not None:
        place = drift.index.get_loc(preview[0])
        figure.add_scatter(
            x=drift.index[place - 1 : place + 1],
            y=[drift.iloc[place - 1], preview[1]],
            name="preview",
            mode="lines+markers",
            line={"color": colour(model), "width": 1.5},
            marker={"symbol": "star-diamond", "size": [0, 16], "opacity": 1, "color": colour(model)},
            hovertemplate=f"%{{x}}: %{{y:{form}}}",
        )
    figure.update_yaxes(title=f"drift, {axis}", rangemode="tozero")
    layer_axis(figure, list(next(iter(drifts.values())).index))
    return finish(figure, 380)


def score_bars(frame: pd.DataFrame, models: Sequence[str], unit: str = "accuracy, %") -> go.Figure:
    """Draw grouped bars: one group per row of `frame` (column "task"), one bar per model."""
    figure = go.Figure()
    for model in models:
        figure.add_bar(
            x=frame["task"].map(label),
            y=frame[model],
            name=model,
            marker={"color": colour(model)},
            hovertemplate=f"%{{x}}, {model}: %{{y:.3~f}}",
        )
    figure.update_layout(barmode="group", bargroupgap=0.08)
    figure.update_yaxes(title=unit)
    task_axis(figure, frame["task"])
    return finish(figure, 400)


_SIZE = 300.0, 260.0
"""Pixels between the first and the last point of the chart of gains, where it is at its narrowest."""
_SIDES = (("top", "center", 0, 1), ("bottom", "center", 0, -1), ("middle", "right", 1, 0), ("middle", "left", -1, 0))


def gains(frame: pd.DataFrame, metric: str, model: str) -> go.Figure:
    """Draw a model's gain in cosine against its gain in a score, one labelled point per task."""
    figure = go.Figure()
    figure.add_scatter(
        x=frame["cosine gain"],
        y=frame["score gain"],
        text=frame["task"].map(label),
        mode="markers+text",
        textposition=_text_sides(frame),
        cliponaxis=False,
        marker={"color": colour(model), "size": 11},
        hovertemplate=f"%{{text}}: cosine %{{x:+.3f}}, {metric} %{{y:+.1f}} points<extra></extra>",
        showlegend=False,
    )
    figure.add_hline(y=0, line={"color": COLOUR["base"], "dash": "dot"})
    figure.add_vline(x=0, line={"color": COLOUR["base"], "dash": "dot"})
    x = frame["cosine gain"]
    reach = max(float(x.max()), 0.0) - min(float(x.min()), 0.0) or 1.0
    figure.update_xaxes(
        title="gain in mean cosine to the expert",
        range=[min(float(x.min()), 0) - 0.12 * reach, max(float(x.max()), 0) + 0.12 * reach],
    )
    figure.update_yaxes(title=f"gain in {metric}, points")
    return finish(figure, 400)


def _ribbon(frames: Mapping[str, pd.DataFrame], key: str, relative: bool, chosen: str | None) -> go.Figure:
    axis, form = _UNIT[relative]
    given, frames = frames, {model: frame.assign(**{key: frame[key].map(label)}) for model, frame in frames.items()}
    figure = make_subplots(1, len(frames), shared_yaxes=True, horizontal_spacing=0.03, column_titles=list(frames))
    for column, (model, frame) in enumerate(frames.items(), 1):
        for part, pattern in (("mismatch", ""), ("propagation", "/")):
            figure.add_bar(
                x=frame[key],
                y=frame[part],
                name=f"{'local ' if part == 'mismatch' else ''}{part}",
                legendgroup=part,
                showlegend=column == 1,
                marker={
                    "color": COLOUR[part],
                    "pattern": {
                        "shape": pattern,
                        "fillmode": "overlay",
                        "fgcolor": "rgba(0,0,0,0.4)",
                        "size": 8,
                        "solidity": 0.15,
                    },
                },
                customdata=frame[key],
                hovertemplate=f"%{{x}}<br>{part} %{{y:{form}}}<extra>{model}</extra>",
                row=1,
                col=column,
            )
        figure.add_scatter(
            x=frame[key],
            y=frame["drift"],
            name=f"drift, {model}",
            cliponaxis=False,
            mode="lines+markers" if key == "layer" else "markers",
            line={"color": colour(model), "width": 3, "dash": dash(model)},
            marker={
                "symbol": symbol(model),
                "color": colour(model),
                "size": 11,
                "line": {"width": 1.5, "color": "white"},
            },
            customdata=np.stack([frame[key], frame["alignment"]], axis=1),
            hovertemplate=f"%{{x}}<br>drift %{{y:{form}}}<br>cosine of m and p %{{customdata[1]:.2f}}"
            f"<extra>{model}</extra>",
            row=1,
            col=column,
        )
    if chosen is not None:
        place = list(next(iter(frames.values()))[key]).index(chosen)
        figure.add_vrect(place - 0.5, place + 0.5, fillcolor=COLOUR["base"], opacity=0.2, line_width=0, layer="below")
    figure.update_layout(barmode="group")
    if key == "layer":
        layer_axis(figure, list(next(iter(frames.values()))["layer"]))
    else:
        task_axis(figure, next(iter(given.values()))["task"])
    figure.update_yaxes(rangemode="tozero")
    # Panels share one scale, so the first alone says what it is.
    figure.update_yaxes(title=axis, col=1)
    finish(figure, 420)
    figure.update_layout(legend={"y": 1.1}, margin={"t": 76})
    return figure


def _text_sides(frame: pd.DataFrame) -> list[str]:
    """Place labels beside their points where they lie on no other point or label, if there is such a place; else above
    and below by turns."""
    wide, high = _SIZE
    x = [wide * one for one in _share(frame["cosine gain"])]
    y = [high * one for one in _share(frame["score gain"])]
    taken = [_box(one, other, 10, 10) for one, other in zip(x, y, strict=True)]
    sides = []
    for i, (one, other, text) in enumerate(zip(x, y, frame["task"].map(str), strict=True)):
        boxes = {
            f"{row} {column}": _box(one + across * (10 + 3.5 * len(text)), other + up * 15, 7 * len(text), 15)
            for row, column, across, up in _SIDES
        }
        others = taken[:i] + taken[i + 1 :]
        free = (name for name, box in boxes.items() if not any(_overlap(box, two) for two in others))
        side = next(free, ["top center", "bottom center"][i % 2])
        taken.append(boxes[side])
        sides.append(side)
    return sides


def _share(values: pd.Series[float]) -> list[float]:
    """Return how far along an axis from 0 (or the least) to the largest the values are."""
    least, most = min(values.min(), 0.0), max(values.max(), 0.0)
    return [(one - least) / (most - least or 1.0) for one in values]


def _box(x: float, y: float, width: float, height: float) -> tuple[float, float, float, float]:
    return x - width / 2, y - height / 2, x + width / 2, y + height / 2


def _overlap(one: tuple[float, ...], two: tuple[float, ...]) -> bool:
    return one[0] < two[2] and two[0] < one[2] and one[1] < two[3] and two[1] < one[3]

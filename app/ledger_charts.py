"""Figures of the drift ledger: who caused the final drift, where it grows, what it does to scores."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from app.theme import COLOUR, SYMBOL, finish, layer_axis

MANY = 11
"""So many layers that their bars are too narrow for numbers."""
SOURCE_COLOUR = {
    "stale": COLOUR["propagation"],
    "merged": COLOUR["merged"],
    "expert": COLOUR["expert"],
    "snapshot": COLOUR["base"],
}


def waterfall(frames: Mapping[str, pd.DataFrame], chosen: str | None) -> go.Figure:
    """Contributions of all layers that add up to the final relative drift; one panel per model, one scale."""
    figure = make_subplots(1, len(frames), shared_yaxes=True, horizontal_spacing=0.03, column_titles=list(frames))
    lowest = 0.05 * max(float(frame["contribution"].cumsum().max()) for frame in frames.values())
    for column, (model, frame) in enumerate(frames.items(), 1):
        layers = [*frame["layer"], "final drift"]
        figure.add_waterfall(
            x=layers,
            y=[*frame["contribution"], None],
            measure=[*["relative"] * len(frame), "total"],
            name="contribution (Prop. 2)",
            showlegend=False,
            text=[
                *(
                    f"{share:+.0%}" if abs(high) > lowest and len(frame) < MANY else ""  # a small bar has no room
                    for share, high in zip(frame["share"], frame["contribution"], strict=True)
                ),
                f"{frame['final'][0]:.2f}",
            ],
            textposition="inside",
            insidetextanchor="middle",
            textangle=0,
            insidetextfont={"color": "black", "size": 13},
            increasing={"marker": {"color": COLOUR["mismatch"]}},
            decreasing={"marker": {"color": COLOUR["expert"]}},
            totals={"marker": {"color": COLOUR[model]}},
            connector={"line": {"color": COLOUR["base"], "width": 1, "dash": "dot"}},
            customdata=frame["share"],
            hovertemplate="%{x}: %{delta:+.3f}<extra>" + model + "</extra>",
            row=1,
            col=column,
        )
        figure.add_scatter(
            x=frame["layer"],
            y=frame["telescoped"].cumsum(),
            name="telescoped (another allocation), running sum",
            legendgroup="telescoped",
            showlegend=column == 1,
            mode="markers",
            marker={"symbol": "line-ew-open", "size": 22, "color": COLOUR["base"], "line": {"width": 2}},
            customdata=frame["telescoped share"],
            hovertemplate="%{x}: telescoped share %{customdata:+.1%}<extra>" + model + "</extra>",
            row=1,
            col=column,
        )
    _mark(figure, list(next(iter(frames.values()))["layer"]), chosen)
    figure.update_yaxes(title="final drift / norm of the expert's feature", col=1)
    layer_axis(figure, [*next(iter(frames.values()))["layer"], "final drift"])
    finish(figure, 420)
    figure.update_layout(legend={"y": 1.1}, margin={"t": 76})
    return figure


def growth(frames: Mapping[str, pd.DataFrame], chosen: str | None) -> go.Figure:
    """Left: gamma and eta per block (filled where a model's own line is). Right: response of the residual branch."""
    figure = make_subplots(
        1,
        2,
        horizontal_spacing=0.1,
        column_titles=["stretching γ and new mismatch η", "response of the residual branch"],
    )
    for model, frame in frames.items():
        style = {"symbol": SYMBOL[model], "size": 10}
        for name, dash in (("gamma", "solid"), ("eta", "dot")):
            figure.add_scatter(
                x=frame["layer"],
                y=frame[name],
                name=f"{'γ' if name == 'gamma' else 'η'}, {model}",
                mode="lines+markers",
                line={"color": COLOUR[model], "dash": dash, "width": 3},
                marker=style,
                customdata=frame["certified_growth"],
                hovertemplate=f"%{{x}}: {name} %{{y:.3f}}<br>growth certified for %{{customdata:.0%}} of samples"
                f"<extra>{model}</extra>",
                row=1,
                col=1,
            )
        figure.add_bar(
            x=frame["layer"],
            y=frame["response"],
            name=f"cos(r, e), {model}",
            marker={"color": COLOUR[model]},
            hovertemplate=f"%{{x}}: %{{y:+.3f}}<extra>{model}</extra>",
            row=1,
            col=2,
        )
    _mark(figure, list(next(iter(frames.values()))["layer"]), chosen)
    figure.update_layout(barmode="group")
    figure.update_yaxes(title="relative to the incoming drift", col=1)
    figure.update_yaxes(title="cosine of r and incoming e", col=2)
    layer_axis(figure, list(next(iter(frames.values()))["layer"]))
    finish(figure, 380)
    figure.update_layout(legend={"y": 1.12}, margin={"t": 80})
    return figure


def outputs(frames: Mapping[str, pd.DataFrame]) -> go.Figure:
    """Left: score drift and its bound per task, log scale. Right: certified, agreeing and correct decisions."""
    figure = make_subplots(
        1, 2, horizontal_spacing=0.1, column_titles=["score drift and its bound", "decisions, % of samples"]
    )
    for model, frame in frames.items():
        for name, symbol in (("score_drift", SYMBOL[model]), ("bound", "line-ew-open")):
            figure.add_scatter(
                x=frame["task"],
                y=frame[name],
                name=f"{'bound' if name == 'bound' else 'score drift'}, {model}",
                mode="markers",
                marker={"symbol": symbol, "size": 12, "color": COLOUR[model], "line": {"width": 2}},
                customdata=frame["tightness"],
                hovertemplate="%{x}: %{y:.2f}, tightness %{customdata:.2f}<extra>" + model + "</extra>",
                row=1,
                col=1,
            )
        for name, symbol in (("agreement", SYMBOL[model]), ("certified", f"{SYMBOL[model]}-open")):
            figure.add_scatter(
                x=frame["task"],
                y=100 * frame[name],
                name=f"{'certified' if name == 'certified' else 'agrees with the expert'}, {model}",
                mode="markers",
                marker={"symbol": symbol, "size": 11, "color": COLOUR[model], "line": {"width": 2}},
                customdata=100 * frame["accuracy"],
                hovertemplate=f"%{{x}}: {name} %{{y:.0f}} %, accuracy %{{customdata:.0f}} %<extra>{model}</extra>",
                row=1,
                col=2,
            )
    figure.update_yaxes(title="‖Δz‖", type="log", col=1)
    figure.update_yaxes(title="% of samples", range=[-3, 103], col=2)
    figure.update_xaxes(title="task")
    finish(figure, 400)
    figure.update_layout(legend={"y": 1.12}, margin={"t": 96})
    return figure


def sources(frame: pd.DataFrame) -> go.Figure:
    """Excess objective of fitting on another feature source, per block, relative to the deployed minimum."""
    figure = go.Figure()
    for source, colour in SOURCE_COLOUR.items():
        part = frame[frame["source"] == source]
        figure.add_bar(
            x=part["layer"],
            y=100 * part["relative"],
            name=source,
            marker={"color": colour},
            hovertemplate=f"%{{x}}: %{{y:.3~f}} %<extra>{source}</extra>",
        )
    figure.update_layout(barmode="group")
    figure.update_yaxes(title="excess, % of the deployed minimum")
    layer_axis(figure, list(dict.fromkeys(frame["layer"])))
    return finish(figure, 360)


def _mark(figure: go.Figure, layers: list[str], chosen: str | None) -> None:
    """Shade the chosen layer in every panel that has it."""
    if chosen in layers:
        place = layers.index(chosen)
        figure.add_vrect(place - 0.5, place + 0.5, fillcolor=COLOUR["base"], opacity=0.2, line_width=0, layer="below")

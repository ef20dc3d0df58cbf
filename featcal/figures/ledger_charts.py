"""Draw the drift ledger: the causes of the final drift, its growth, and its effect on scores."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from featcal.figures.names import label
from featcal.figures.theme import COLOUR, apply_theme, colour, layer_axis, open_symbol, symbol, task_axis

TOTAL = "final drift"
"""Name of the last bar of a waterfall."""
MANY = 11
"""Number of layers above which bars are too narrow for numbers."""
SOURCE_COLOUR = {
    "stale": COLOUR["propagation"],
    "merged": COLOUR["merged"],
    "expert": COLOUR["expert"],
    "snapshot": COLOUR["base"],
}


def waterfall(frames: Mapping[str, pd.DataFrame], chosen: str | None) -> go.Figure:
    """Draw contributions of all layers that add up to the final relative drift; one panel per model, one scale."""
    titles = list(frames) if len(frames) > 1 else None
    figure = make_subplots(1, len(frames), shared_yaxes=True, horizontal_spacing=0.03, column_titles=titles)
    lowest = 0.05 * max(float(frame["contribution"].cumsum().max()) for frame in frames.values())
    for column, (model, frame) in enumerate(frames.items(), 1):
        layers = [*frame["layer"], TOTAL]
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
            textposition=[*["inside"] * len(frame), "outside"],
            insidetextanchor="middle",
            textangle=0,
            insidetextfont={"color": "black", "size": 13},
            constraintext="inside",
            cliponaxis=False,
            increasing={"marker": {"color": COLOUR["mismatch"]}},
            decreasing={"marker": {"color": COLOUR["expert"]}},
            totals={"marker": {"color": colour(model)}},
            connector={"line": {"color": COLOUR["base"], "width": 1, "dash": "dot"}},
            customdata=frame["share"],
            # "delta" is the bar's own height; "y" would be the running sum.
            hovertemplate="%{x}: %{delta:+.3f}<extra>" + model + "</extra>",
            row=1,
            col=column,
        )
    _mark(figure, list(next(iter(frames.values()))["layer"]), chosen)
    figure.update_yaxes(title="final drift / norm of the expert's feature", col=1)
    layer_axis(figure, [*next(iter(frames.values()))["layer"], TOTAL])
    apply_theme(figure, 420)
    figure.update_layout(legend={"y": 1.1}, margin={"t": 76}, uniformtext={"minsize": 10, "mode": "hide"})
    return figure


def growth_chart(frames: Mapping[str, pd.DataFrame], chosen: str | None) -> go.Figure:
    """Draw gamma and eta per block, relative to the incoming drift."""
    figure = go.Figure()
    for model, frame in frames.items():
        for name, letter, line in (("gamma", "γ", "solid"), ("eta", "η", "dot")):
            figure.add_scatter(
                x=frame["layer"],
                y=frame[name],
                name=f"{letter}, {model}",
                mode="lines+markers",
                line={"color": colour(model), "dash": line, "width": 3},
                marker={"symbol": symbol(model), "size": 10},
                customdata=frame["certified_growth"],
                hovertemplate=f"%{{x}}: {name} %{{y:.3f}}<br>growth certified for %{{customdata:.0%}} of samples"
                f"<extra>{model}</extra>",
            )
    return _finish_blocks(figure, frames, chosen, "relative to the incoming drift")


def response(frames: Mapping[str, pd.DataFrame], chosen: str | None) -> go.Figure:
    """Draw the cosine of the residual branch's response and the incoming drift, per block."""
    figure = go.Figure()
    for model, frame in frames.items():
        figure.add_bar(
            x=frame["layer"],
            y=frame["response"],
            name=f"cos(r, e), {model}",
            marker={"color": colour(model)},
            hovertemplate=f"%{{x}}: %{{y:+.3f}}<extra>{model}</extra>",
        )
    figure.update_layout(barmode="group")
    return _finish_blocks(figure, frames, chosen, "cosine of r and incoming e")


def score_drift(frames: Mapping[str, pd.DataFrame]) -> go.Figure:
    """Draw score drift and its bound per task, log scale."""
    figure = go.Figure()
    for model, frame in frames.items():
        for name, sign in (("score_drift", symbol(model)), ("bound", "line-ew-open")):
            figure.add_scatter(
                x=frame["task"].map(label),
                y=frame[name],
                name=f"{'bound' if name == 'bound' else 'score drift'}, {model}",
                mode="markers",
                marker={"symbol": sign, "size": 12, "color": colour(model), "line": {"width": 2}},
                customdata=frame["tightness"],
                hovertemplate="%{x}: %{y:.2f}, tightness %{customdata:.2f}<extra>" + model + "</extra>",
            )
    figure.update_yaxes(title="‖Δz‖", type="log")
    task_axis(figure, next(iter(frames.values()))["task"])
    return _make_legend_room(apply_theme(figure, 400))


def decisions_chart(frames: Mapping[str, pd.DataFrame]) -> go.Figure:
    """Draw the shares of decisions that agree with the expert's and of certified ones; hover for the accuracy."""
    figure = go.Figure()
    for model, frame in frames.items():
        for name, sign in (("agreement", symbol(model)), ("certified", open_symbol(model))):
            figure.add_scatter(
                x=frame["task"].map(label),
                y=100 * frame[name],
                name=f"{'certified' if name == 'certified' else 'agrees'}, {model}",
                mode="markers",
                marker={"symbol": sign, "size": 11, "color": colour(model), "line": {"width": 2}},
                customdata=100 * frame["accuracy"],
                hovertemplate=f"%{{x}}: {name} %{{y:.0f}} %, accuracy %{{customdata:.0f}} %<extra>{model}</extra>",
            )
    figure.update_yaxes(title="% of samples", range=[-3, 103])
    task_axis(figure, next(iter(frames.values()))["task"])
    return _make_legend_room(apply_theme(figure, 400))


def sources_chart(frame: pd.DataFrame) -> go.Figure:
    """Draw the excess objective of fitting on another feature source, per block, relative to the deployed minimum."""
    figure = go.Figure()
    for source, shade in SOURCE_COLOUR.items():
        part = frame[frame["source"] == source]
        figure.add_bar(
            x=part["layer"],
            y=100 * part["relative"],
            name=source,
            marker={"color": shade},
            hovertemplate=f"%{{x}}: %{{y:.3~f}} %<extra>{source}</extra>",
        )
    figure.update_layout(barmode="group")
    figure.update_yaxes(title="excess, % of the deployed minimum")
    layer_axis(figure, list(dict.fromkeys(frame["layer"])))
    return apply_theme(figure, 360)


def _finish_blocks(figure: go.Figure, frames: Mapping[str, pd.DataFrame], chosen: str | None, axis: str) -> go.Figure:
    layers = list(next(iter(frames.values()))["layer"])
    _mark(figure, layers, chosen)
    figure.update_yaxes(title=axis)
    layer_axis(figure, layers)
    return _make_legend_room(apply_theme(figure, 360))


def _make_legend_room(figure: go.Figure) -> go.Figure:
    """Reserve space for a legend of two rows above the panel."""
    return figure.update_layout(margin={"t": 92})


def _mark(figure: go.Figure, layers: list[str], chosen: str | None) -> None:
    """Shade the chosen layer, or its attention and MLP, in every panel that has it."""
    # Blanks end both names, so "block 1" does not shade "block 10".
    places = [i for i, one in enumerate(layers) if chosen is not None and f"{one} ".startswith(f"{chosen} ")]
    if places:
        grey = {"fillcolor": COLOUR["base"], "opacity": 0.2, "line_width": 0, "layer": "below"}
        figure.add_vrect(places[0] - 0.5, places[-1] + 0.5, **grey)

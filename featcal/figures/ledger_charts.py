"""Draw the drift ledger: the causes of the final drift, its growth, and its effect on scores."""

from __future__ import annotations

from collections.abc import Mapping
from textwrap import wrap

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

ATTRIBUTION = r"""
**What this shows.** The final drift, attributed to the layers whose local mismatch caused it: each bar starts where
the last one ended, and all add up to the final drift, relative to the norm of the expert's final feature. Percentages
are shares; a negative one (green) compensates for the others.

**Formula.** $e^L = \sum_\ell c_\ell$ with $c_\ell = A_L \cdots A_{\ell+1}\, m^\ell$ and $A_k$ the Jacobian of layer
$k$ averaged between the expert's and the model's input (Prop. 2); share $= \langle c_\ell, e^L\rangle / \|e^L\|^2$.

**When it misleads.** Other ways to divide the same total between layers give other shares.
Large contributions can cancel: a small share is not a small error. Repairing a layer changes what later layers
receive, so shares are not the gain of repairing it.
"""

GROWTH = r"""
**What this shows.** Left: $\gamma$, how much a block stretches the drift that comes in, and $\eta$, how much new
mismatch it adds, both relative to the incoming drift. Right: whether the block's residual branch answers incoming
drift by amplifying it (above 0) or compensating for it (below 0).

**Formula.** $\gamma = \|p\|/\|e_\text{before}\| - 1$, $\eta = \|m\|/\|e_\text{before}\|$, $\|e\| \ge
(1+\gamma-\eta)\|e_\text{before}\|$ (Prop. 5); $r = p - e_\text{before}$ (Prop. 4). Hover for the share of samples
for which growth is *certified*: $\gamma > 0$ and $\eta < \gamma$.

**When it misleads.** No certificate does not mean no growth: drift mostly grows by new mismatch, which is not
certified.
"""

OUTPUTS = r"""
**What this shows.** Left: the distance between the scores of expert and model, and its bound from the final drift.
Right: for how many samples the model decides as the expert (full symbols), and for how many the margin *proves* it
(open symbols); hover for the accuracy.

**Formula.** $\|\Delta z\| \le B\,\|e^L\|$, $B = s\,\sigma_\text{max}(T)/d_\text{min}$ with $d_\text{min}$ the
distance of the segment between both features from the origin (Prop. 3). Certified: $\|\Delta z\|_\infty < \mu/2$,
$\mu$ the expert's margin (Eq. 44).

**When it misleads.** The certificate is sufficient, not necessary: most decisions that agree are not certified. The
expert is not always right.
"""

OUTPUTS_OF_TEXT = r"""
**What this shows.** Scores of the first token of the answer, over the whole vocabulary. Left: the distance between
those of expert and model, and its bound from the final drift. Right: for how many samples the model chooses the
expert's token (full symbols), and for how many the margin *proves* it (open symbols); hover for the share of right
tokens.

**Formula.** $\|\Delta z\| \le B\,\|e^L\| + \delta$, $B = \sigma_\text{max}$ of the model's own head and $\delta$ the
difference of the two heads on the expert's feature (Prop. 3). Certified: $\|\Delta z\|_\infty < \mu/2$, $\mu$ the
expert's margin (Eq. 44).

**When it misleads.** The certificate is sufficient, not necessary: most decisions that agree are not certified. Later
tokens of the answer do not count. The expert is not always right.
"""

OUTPUTS_OF_HEADS = r"""
**What this shows.** Scores of the classes after the expert's own head. Left: the distance between those of expert and
model, and its bound from the final drift. Right: for how many samples the model decides as the expert
(full symbols), and for how many the margin *proves* it (open symbols); hover for the accuracy.

**Formula.** $\|\Delta z\| \le B\,\|e^L\|$, $B = \sigma_\text{max}$ of the head, of both maps if there are two
(Prop. 3). Certified: $\|\Delta z\|_\infty < \mu/2$, $\mu$ the expert's margin (Eq. 44).

**When it misleads.** The certificate is sufficient, not necessary: most decisions that agree are not certified. The
expert is not always right.
"""

SOURCES = r"""
**What this shows.** How much worse the calibration objective of each block is if its linear maps are fitted on other
features than the finished model exposes: one block *stale*, the uncalibrated *merged* model's, the *expert*'s.
*snapshot*: all modules of a block are fitted on one snapshot, while the finished block exposes the outputs of its own
new modules.

**Formula.** $J_\text{dep}(W_\text{src}) - J_\text{dep}(W_\text{dep}) \ge 0$ (Prop. 8), over
$J_\text{dep}(W_\text{dep})$, summed over the block's linear maps. The prefix-calibrated source of Algorithm 1 has
none.

**When it misleads.** It is the local objective on the calibration samples, not accuracy.
"""

OUTPUTS_BY_SCORES = {"prompts": OUTPUTS, "vocabulary": OUTPUTS_OF_TEXT, "own": OUTPUTS_OF_HEADS}
"""Sentences on scores by the kind of a model's scores (`Adapter.scores_with`)."""


def waterfall(frames: Mapping[str, pd.DataFrame], chosen: str | None) -> go.Figure:
    """Draw contributions of all layers that add up to the final relative drift; one panel per model, one scale."""
    # A calibration's name has its options: in lines, or it runs into the next panel's.
    titles = ["<br>".join(wrap(model, 90 // len(frames))) for model in frames] if len(frames) > 1 else None
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

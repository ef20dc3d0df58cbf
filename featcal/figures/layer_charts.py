"""Draw the inside of one layer, and the decisions after every layer."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd
import plotly.graph_objects as go

from featcal.figures.names import cut_text, label
from featcal.figures.theme import COLOUR, apply_theme, colour, dash, layer_axis, symbol

MAPS = r"""
**What this shows.** Left: for every linear map inside the chosen block the distance of the model's map from the
expert's on the inputs of the **expert's** map,
$\|(W_\text{model} - W_\text{expert})\,x + b_\text{model} - b_\text{expert}\|$, mean over samples. Right: for a
calibrated model the share of each map in the change by calibration,
$\|\Delta W\|^2 + \|\Delta b\|^2$ over their sum; the shares of a block sum to 1.

**When it misleads.** These mismatches are no parts of the block's: they are before its nonlinearities and do
not add up to it. A map whose output is small in the residual stream may differ a lot without harm. A large change of
weights may change little on real inputs. Norms, and the maps of a mixture's experts, are left out.
"""

WEIGHTS = r"""
**What this shows.** How far the weights of every layer are from the base's: those of the model, and those of the
experts, relative to the norm of the base's weights. Point at a layer for the cosine of both task vectors. It needs no
samples.

**Formula.** $\|\tau\|/\|\theta_0\|$ with the task vector $\tau = \theta - \theta_0$; the cosine is that of the
paper's Fig. 2d, of one layer.

**When it misleads.** Weights are not features: a small change can move features far, and a large one may act on
directions that no input has. A calibrated model's weights often align less with the experts' than the merge's, although
its features are closer.
"""

DEPTH = r"""
**What this shows.** After every block the decision that the model would make if it ended there: the block's state
through the model's own last norm, projection and head (CLIP: scores of the classes; language models: the first token of
the answer). The chart above: the share of samples whose decision is already the **expert's final one**; at the last
block it is the agreement of the tab *Decisions*. Below, one sample: the first answer after every block, darker the
more probable; a line above a block marks where the decision becomes final. Point at a cell for its next answers.

**When it misleads.** A head is made for the last layer and never learned to read another. Its answers after early
blocks show where a decision turns, not what a block "thinks": the right answer may be there in a form that the head
does not see, and probabilities in between mean little. An encoder-decoder is read in its decoder alone.
"""


def maps_chart(frames: Mapping[str, pd.DataFrame], column: str, axis: str, form: str) -> go.Figure:
    """Draw one bar per linear map of a block and model.

    Args:
        column: of the frames of `layer_tables.maps_table`.
        form: format of a number under the pointer.
    """
    figure = go.Figure()
    for model, frame in frames.items():
        figure.add_bar(
            x=frame["map"].map(label),
            y=frame[column],
            name=model,
            marker={"color": colour(model)},
            hovertemplate=f"%{{x}}: %{{y:{form}}}<extra>{model}</extra>",
        )
    figure.update_layout(barmode="group")
    figure.update_xaxes(title="linear map, in the order of the block")
    figure.update_yaxes(title=axis, rangemode="tozero")
    return apply_theme(figure, 360)


def weights_chart(frames: Mapping[str, pd.DataFrame], chosen: str | None) -> go.Figure:
    """Draw how far the weights of every layer are from the base's, of models and of the experts.

    Args:
        frames: of `layer_tables.weights_table`.
    """
    first = next(iter(frames.values()))
    figure = go.Figure()
    for model, frame in {"expert": first.assign(changed=first["expert"], cosine=1.0), **frames}.items():
        figure.add_scatter(
            x=frame["layer"],
            y=100 * frame["changed"],
            name=model,
            mode="lines+markers",
            line={"color": colour(model), "width": 3, "dash": dash(model)},
            marker={"symbol": symbol(model), "size": 10},
            customdata=frame["cosine"],
            hovertemplate="%{x}: %{y:.3~g} %, cosine to the expert's %{customdata:.2f}<extra>" + model + "</extra>",
        )
    figure.update_yaxes(title="change, % of the base's norm", rangemode="tozero")
    return _finish_layers(figure, list(first["layer"]), chosen)


def _finish_layers(figure: go.Figure, layers: list[str], chosen: str | None) -> go.Figure:
    """Shade the chosen layer, and name all of them below."""
    if chosen in layers:
        place = layers.index(chosen)
        figure.add_vrect(place - 0.5, place + 0.5, fillcolor=COLOUR["base"], opacity=0.2, line_width=0, layer="below")
    layer_axis(figure, layers)
    return apply_theme(figure, 360)


def agreement_chart(frames: Mapping[str, pd.DataFrame], chosen: str | None) -> go.Figure:
    """Draw the share of decisions that equal the expert's final one after every block, next to the expert's own."""
    first = next(iter(frames.values()))
    figure = go.Figure()
    for model, column in {"expert": "expert_agreement", **dict.fromkeys(frames, "agreement")}.items():
        figure.add_scatter(
            x=first["layer"],
            y=100 * frames.get(model, first)[column],
            name=model,
            mode="lines+markers",
            line={"color": colour(model), "width": 3, "dash": dash(model)},
            marker={"symbol": symbol(model), "size": 10},
            hovertemplate=f"%{{x}}: %{{y:.0f}} %<extra>{model}</extra>",
        )
    figure.update_yaxes(title="% with the expert's final decision", range=[-3, 103])
    return _finish_layers(figure, list(first["layer"]), chosen)


def course_chart(frame: pd.DataFrame) -> go.Figure:
    """Draw the first answer after every block for one sample, a column per model; a line above a block marks where the
    decision becomes final.

    Args:
        frame: of `layer_tables.course_table`.
    """
    models, layers = list(dict.fromkeys(frame["model"])), list(dict.fromkeys(frame["layer"]))
    ranked = frame.assign(
        line=[f"{label(a)} {p:.0%}" for a, p in zip(frame["answer"], frame["probability"], strict=True)]
    )
    cells = ranked.groupby(["layer", "model"], sort=False)
    tops = cells.first().assign(listed=cells["line"].agg("<br>".join))

    def grid(column: str) -> list[list[object]]:
        return [[tops.loc[(layer, model), column] for model in models] for layer in layers]

    figure = go.Figure(
        go.Heatmap(
            x=models,
            y=layers,
            z=grid("probability"),
            text=[[label(cut_text(str(one), 16)) for one in row] for row in grid("answer")],
            customdata=grid("listed"),
            texttemplate="%{text}",
            hovertemplate="%{x}, %{y}<br>%{customdata}<extra></extra>",
            zmin=0,
            zmax=1,
            # Light throughout, so that black words are read on every cell and in both themes.
            colorscale=[[0, "#F4F6F8"], [1, "#7DB8E8"]],
            textfont={"color": "black"},
            colorbar={"title": {"text": "probability", "side": "right"}, "tickformat": ".0%"},
            xgap=3,
            ygap=2,
        )
    )
    for column, model in enumerate(models):
        own = frame[(frame["model"] == model) & frame["stays"]]
        turned = layers.index(own["layer"].iloc[0]) - 0.5
        line = {"color": COLOUR["mismatch"], "width": 4}
        figure.add_shape(type="line", x0=column - 0.48, x1=column + 0.48, y0=turned, y1=turned, line=line)
    figure.update_yaxes(autorange="reversed")
    return apply_theme(figure, 130 + 30 * max(len(layers), 4))

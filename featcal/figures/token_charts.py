"""Draw the drift of single tokens: patches over their picture, and the tokens of texts in place."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from math import sqrt

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from featcal.figures.names import label
from featcal.figures.theme import COLOUR, apply_theme, colour, dash

_HEAT = tuple(int(COLOUR["merged"][place : place + 2], 16) for place in (1, 3, 5))
"""The colour of much drift, red, green and blue; with little drift the picture below shows through."""
_MOST = {"picture": 0.8, "text": 0.6}
"""Opacity of the largest drift; lower on text, so that words are legible in both themes."""
_PICTURE = 225
"""Grey level, of 255, for patches without a picture."""
_NUMBERED = 8
"""Largest number of columns of patches with numbers written on them."""

TOKENS = r"""
**What this shows.** One sample after the chosen layer, token by token: how far the state of each is from the
expert's, $\|e_t\|$. Relative units divide by the norm of the expert's state of the **same** token, so that a token with
a large state does not outshine the rest. All models have one scale of colours. Point at a token for its share of
the layer's squared drift.

**Formula.** $\|e\|^2 = \sum_t \|e_t\|^2$: the root of the sum of squares of absolute drifts is exactly the drift that
the chart above takes the mean of, with padding left out. A decoder of an encoder-decoder sees its own tokens (the
start token, then the answer) and the encoder's output, so both are shown.

**When it misleads.** Position is not content: attention mixes tokens in every block, so drift at a patch may have come
from elsewhere. After the last block the head reads a single token (CLIP: the class token; an answer's first token is
decided at the last token of the prompt, or at the decoder's start token), and the states of other tokens no longer have
an effect. A few tokens, such as a text's first, have states of huge norm in many language models, and dominate absolute
drift. After the head there are no tokens.
"""


def patch_grid(count: int, height: int, width: int) -> tuple[int, int] | None:
    """Return rows and columns of square patches that fill a picture; None if no such patches are this many.

    >>> patch_grid(16, 32, 32), patch_grid(8, 32, 64), patch_grid(7, 32, 32)
    ((4, 4), (2, 4), None)
    """
    rows = round(sqrt(count * height / width))
    columns = count // rows if rows else 0
    return (rows, columns) if columns and rows * columns == count and rows * width == columns * height else None


def patches(frame: pd.DataFrame, column: str, top: float, grid: tuple[int, int], picture: str, form: str) -> go.Figure:
    """Draw every patch's drift over the picture.

    Args:
        frame: patches of one model in their order, rows of `layer_tables.token_table`.
        column: name of the drawn column in `frame`.
        top: the drift that has the full colour.
        grid: rows and columns of patches.
        picture: `data:` address of the picture under the patches.
        form: format of a number under the pointer.
    """
    rows, columns = grid
    shares = np.array([_describe_share(one) for one in frame["share"]]).reshape(grid).tolist()
    figure = go.Figure(
        go.Heatmap(
            z=frame[column].to_numpy().reshape(grid).tolist(),
            customdata=shares,
            zmin=0,
            zmax=top,
            colorscale=[[0, _shade(0)], [1, _shade(_MOST["picture"])]],
            showscale=False,
            xgap=1,
            ygap=1,
            # Black is read on the light picture and on every shade over it; more columns leave no room for numbers.
            texttemplate="%{z:" + form + "}" if columns <= _NUMBERED else None,
            textfont={"color": "black", "size": 11},
            hovertemplate="row %{y}, column %{x}: %{z:" + form + "}%{customdata}<extra></extra>",
        )
    )
    # The bar of the heat map itself would show the theme's ground through little drift, not the picture's.
    bar = {"title": {"text": column, "side": "right"}, "thickness": 14}
    scale = [[0, _mix_with_picture(0)], [1, _mix_with_picture(_MOST["picture"])]]
    shown = {"colorscale": scale, "cmin": 0, "cmax": top, "color": [0], "showscale": True, "colorbar": bar}
    figure.add_scatter(x=[None], y=[None], mode="markers", marker=shown, hoverinfo="skip", showlegend=False)
    at = {"xref": "x", "yref": "y", "x": -0.5, "y": -0.5, "sizex": columns, "sizey": rows}
    figure.add_layout_image(source=picture, sizing="stretch", layer="below", **at)
    apply_theme(figure, 280)
    figure.update_layout(margin={"l": 8, "r": 8, "t": 8, "b": 8})
    shared = {"constrain": "domain", "visible": False}
    figure.update_xaxes(range=[-0.5, columns - 0.5], constraintoward="left", **shared)
    # One patch is as wide as high; rows are counted from above.
    figure.update_yaxes(range=[rows - 0.5, -0.5], constraintoward="top", scaleanchor="x", **shared)
    return figure


def places(frames: Mapping[str, pd.DataFrame], column: str, form: str) -> go.Figure:
    """Draw drift by position, one line per model, for tokens that are neither text nor a grid over a picture."""
    figure = go.Figure()
    for model, frame in frames.items():
        figure.add_scatter(
            x=frame["position"],
            y=frame[column],
            name=model,
            mode="lines",
            line={"color": colour(model), "dash": dash(model)},
            hovertemplate=f"patch %{{x}}: %{{y:{form}}}<extra>{label(model)}</extra>",
        )
    figure.update_xaxes(title="patch, in the order of the model")
    figure.update_yaxes(title=column, rangemode="tozero")
    return apply_theme(figure, 380)


def mark_words(frame: pd.DataFrame, column: str, top: float, digits: int) -> str:
    """Return HTML of a text's tokens in order, each on the colour of its drift, with its value as hover text.

    Words are escaped: they are data.

    Args:
        frame: rows of `layer_tables.token_table` of one model and one part.
        column: the column to draw.
        top: the drift with the full colour.
        digits: of the number under the pointer.
    """
    spans = []
    for word, number, share in frame[["token", column, "share"]].itertuples(index=False, name=None):
        depth = 0.0 if not top or number != number else _MOST["text"] * min(1.0, number / top)
        sentence = f"{column} {number:.{digits}f}{_describe_share(share)}"
        spans.append(
            f'<span style="background-color: {_shade(depth)}" title="{escape(sentence)}">{escape(str(word))}</span>'
        )
    return f'<div class="marked-tokens">{" ".join(spans)}</div>'


def _describe_share(share: float) -> str:
    """Describe the token's share of the layer's squared drift; "" if there is no drift to share."""
    return "" if share != share else f", {share:.1%} of the layer's squared drift"


def _shade(opacity: float) -> str:
    return f"rgba({', '.join(map(str, _HEAT))}, {opacity:.3f})"


def _mix_with_picture(opacity: float) -> str:
    """Return the colour of much drift over a picture."""
    mixed = (round(opacity * one + (1 - opacity) * _PICTURE) for one in _HEAT)
    return f"rgb({', '.join(map(str, mixed))})"

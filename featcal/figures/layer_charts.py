"""Draw what happens inside one layer, and what would be decided behind every one."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd
import plotly.graph_objects as go

from featcal.figures.names import label
from featcal.figures.theme import colour, finish


def maps(frames: Mapping[str, pd.DataFrame], column: str, axis: str, form: str) -> go.Figure:
    """Draw one bar per linear map of a block and model.

    Args:
        column: of the frames of `layer_tables.maps`.
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
    return finish(figure, 360)

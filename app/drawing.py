"""Draw figures on pages, in one look for both themes, and only once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
import plotly.graph_objects as go
import streamlit as st
from streamlit.delta_generator import DeltaGenerator

LOOK: dict[str, Any] = {
    # Streamlit hands plotly every figure twice, as two objects of the same content. With a revision that stays, no
    # template and lists in place of packed arrays, plotly finds nothing to draw the second time. Another content is
    # another element, which is drawn anew.
    "datarevision": 1,
    "font": {"family": "Source Sans, sans-serif", "size": 12},
    # Legible on either ground; texts beside the points get the page's colour from style.css.
    "hoverlabel": {"namelength": -1, "bgcolor": "#1F242C", "bordercolor": "#3A404B", "font": {"color": "#E8EAED"}},
}
"""Layout of every chart on a page."""


def draw_figure(
    figure: go.Figure,
    key: str,
    alt: str,
    config: Mapping[str, Any],
    place: DeltaGenerator | None = None,
    on_select: Callable[[str], None] | None = None,
    selection: Sequence[Literal["points", "box", "lasso"]] = ("points",),
) -> DeltaGenerator:
    """Draw a figure and return its place.

    Args:
        on_select: called with the key when something of the `selection` was clicked or drawn around.
    """
    for trace in figure.data:
        for name, values in _find_arrays(trace.to_plotly_json()):
            trace[name] = None  # plotly keeps an array in place of a list that equals it
            trace[name] = values.tolist()
    layout = figure.update_layout(LOOK, overwrite=True).layout
    layout.pop("template", None)
    layout.margin.pad = 4
    clicked: Any = "ignore"
    if on_select is not None:
        # Streamlit would set these itself, once the chart is drawn without them.
        drag = layout.dragmode or "pan"
        click = "event+select" if drag == "pan" else "event"
        figure.update_layout(dragmode=drag, hovermode="closest", clickmode=click)
        # A callback runs before the page is drawn again, so every panel has the new choice at once.
        clicked = partial(on_select, key)
    drawn: Any = (place or st).plotly_chart(
        figure, key=key, alt=alt, config={**config}, theme=None, on_select=clicked, selection_mode=selection
    )
    return drawn  # type: ignore[no-any-return]


def _find_arrays(part: Mapping[str, Any], inside: str = "") -> Iterator[tuple[str, np.ndarray]]:
    """Yield the arrays of a trace by their names, as "x" and "marker.color"."""
    for name, one in part.items():
        if isinstance(one, dict):
            yield from _find_arrays(one, f"{inside}{name}.")
        elif isinstance(one, np.ndarray):
            yield inside + name, one

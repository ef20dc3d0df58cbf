"""Draw scatter plots of samples on any page: picked ones are highlighted, and a click, a box or a lasso picks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd
import plotly.graph_objects as go
import streamlit as st

from app import drawing, samples, view
from app.selection import MOST_PICKED
from featcal.figures.sample_charts import Dots, hover_texts
from featcal.session.model_ref import ModelRef
from featcal.session.session import Session
from featcal.suite.views import EvaluationSamples

TOOLS = [["toImage", "resetScale2d"], ["lasso2d", "select2d", "pan2d"]]


def make_dots(
    session: Session,
    models: Mapping[str, ModelRef],
    task: str,
    on: EvaluationSamples,
    ids: Sequence[int] | None = None,
    *,
    column: pd.Series | None = None,
    picked: Sequence[int] | None = None,
) -> Dots:
    """Return the data of a task's samples for a plot: the samples and the models' answers, as far as they are measured.

    Args:
        models: those of the page, A first.
        ids: the samples that are drawn, all by default.
        column: words or numbers of all samples that decide the colour; by default the models do.
        picked: highlighted samples; by default the picked ones.
    """
    data = session.viewable_samples(task, on)
    ids = range(len(data)) if ids is None else ids
    hover = hover_texts(data, ids, samples.measured_samples(session, models, task, on))
    lit = samples.picked_samples(session, on) if picked is None else picked
    if column is None:
        return Dots(ids, hover, picked=lit)
    values = column.iloc[list(ids)]
    if pd.api.types.is_float_dtype(values):
        return Dots(ids, hover, None, values.tolist(), str(column.name), lit)
    return Dots(ids, hover, [str(one) for one in values], None, str(column.name), lit)


def scatter(figure: go.Figure, key: str, alt: str, name: str, *, zoom: bool = False) -> None:
    """Draw a chart whose points are the samples of the measurements; the lasso picks samples.

    Args:
        name: of the picture that its camera writes.
        zoom: the wheel zooms.
    """
    config = {**view.plotly(name), "scrollZoom": zoom, "modeBarButtons": TOOLS}
    drawing.draw_figure(figure, key, alt, config, on_select=_pick, selection=("points", "box", "lasso"))


def ids_of(points: Sequence[Mapping[str, object]]) -> tuple[int, ...]:
    """Return ids of the samples among the points of a click or a lasso, in order, at most `MOST_PICKED`.

    >>> ids_of([{"customdata": 7}, {"customdata": [3]}, {"customdata": [1, 7]}, {"x": 0.5}])
    (3, 7)
    """
    found = (point.get("customdata") for point in points)
    last = (one[-1] if isinstance(one, list | tuple) else one for one in found if one not in (None, []))
    return tuple(sorted({int(str(one)) for one in last}))[:MOST_PICKED]


def _pick(key: str) -> None:
    """Store the picked samples."""
    # A chart that is drawn anew has forgotten its own selection, and would clear the picked samples.
    if ids := ids_of(st.session_state[key].selection.points):
        samples.pick_samples(ids)

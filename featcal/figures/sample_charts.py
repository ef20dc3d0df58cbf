"""Draw differences of scores with their intervals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import plotly.graph_objects as go

from featcal.figures.names import label
from featcal.figures.theme import COLOUR, colour, finish, symbol, task_axis

if TYPE_CHECKING:  # charts are there before torch is
    from featcal.evaluation.comparison import Comparison, Difference


def differences(found: Comparison, pair: tuple[str, str], metric: str) -> go.Figure:
    """Draw the second minus the first score in points with its 95 % interval, per task and on average; grey and open
    where that is within noise."""
    rows = {**found.tasks, "average": found.average}
    figure = go.Figure()
    for noise in (False, True):
        shown = {task: one for task, one in rows.items() if one.is_within_noise == noise}
        if shown:
            figure.add_scatter(**_points(shown, COLOUR["base"] if noise else colour(pair[1]), noise, symbol(pair[1])))
    figure.add_hline(y=0, line={"color": COLOUR["base"], "dash": "dot"})
    # Each of the two traces holds some of the tasks; left alone, plotly would put one's behind the other's.
    figure.update_xaxes(categoryorder="array", categoryarray=[label(task) for task in rows])
    figure.update_yaxes(title=f"{label(pair[1])} − {label(pair[0])}, points of {metric}")
    task_axis(figure, rows)
    return finish(figure, 340)


def _points(rows: Mapping[str, Difference], ink: str, noise: bool, mark: str) -> dict[str, object]:
    """Return one trace: points with their intervals."""
    up = [100 * (one.high - one.difference) for one in rows.values()]
    down = [100 * (one.difference - one.low) for one in rows.values()]
    said = [[100 * one.low, 100 * one.high, "–" if one.p is None else f"{one.p:.2g}"] for one in rows.values()]
    shape = mark.removesuffix("-open")
    return {
        "x": [label(task) for task in rows],
        "y": [100 * one.difference for one in rows.values()],
        "name": "within noise" if noise else "beyond noise",
        "mode": "markers",
        "marker": {"color": ink, "symbol": f"{shape}-open" if noise else shape, "size": 11, "line": {"width": 2}},
        "error_y": {"type": "data", "array": up, "arrayminus": down, "color": ink, "thickness": 2, "width": 6},
        "customdata": said,
        "hovertemplate": "%{x}: %{y:+.1f} points, %{customdata[0]:+.1f} to %{customdata[1]:+.1f}, "
        "McNemar p %{customdata[2]}<extra></extra>",
        "cliponaxis": False,
    }

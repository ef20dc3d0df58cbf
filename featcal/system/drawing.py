"""Let results draw themselves: in a notebook and in a console by themselves, elsewhere by `plot()`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # plotly is an extra
    import plotly.graph_objects as go

VIEWS = "featcal.figures.notebook"
"""The module that knows how to draw results. It is found by its name, as methods are by theirs, since it lies above
this room: measuring imports no chart code until a result is drawn."""


class Drawable:
    """A result that is printed as a small table; a notebook shows its picture above, if plotly is installed."""

    def __repr__(self) -> str:
        return str(_views().to_text(self))

    def _ipython_display_(self) -> None:
        _views().show_in_notebook(self)

    def _repr_html_(self) -> str:
        return str(_views().to_html(self))

    def plot(self) -> go.Figure:
        """Return the picture that a notebook shows of it, one of the app's charts.

        Raises:
            MissingPackage: plotly is not installed; the message has the command that installs it.
        """
        figure: go.Figure = _views().draw_result(self)
        return figure


def _views() -> Any:
    return import_module(VIEWS)

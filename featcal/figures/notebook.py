"""Show results: a small table in consoles, and in notebooks with one of the app's charts if plotly is installed."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from featcal.figures.result_tables import describe_result, tabulate
from featcal.system.drawing import Drawable
from featcal.system.extras import is_installed, require_packages

if TYPE_CHECKING:  # plotly is an extra
    import plotly.graph_objects as go


def to_text(result: Drawable) -> str:
    """Return a heading and the table as lines for a console."""
    return f"{describe_result(result)}\n{tabulate(result).to_string(index=False)}"


def to_html(result: Drawable) -> str:
    """Return a heading, the picture and the table as HTML that loads nothing from elsewhere; without plotly no picture.

    The picture is plotly's own rendering if that is HTML; else it includes plotly's script.
    """
    picture = ""
    if is_installed("plotly"):
        figure = draw_result(result)
        bundle = figure._repr_mimebundle_()
        picture = bundle.get("text/html") or figure.to_html(full_html=False, include_plotlyjs=True)
    return f"{_write_heading(result)}{picture}{_write_table(result)}"


def show_in_notebook(result: Drawable) -> None:
    """Display `to_html` in an IPython notebook, with plotly's own display of figures, so that a notebook has the script
    of 5 MB at most once.

    Raises:
        NotImplementedError: it runs in a terminal, where a picture would open a browser; IPython then prints the text.
    """
    from IPython import get_ipython
    from IPython.display import HTML, display

    if not hasattr(get_ipython(), "kernel"):
        raise NotImplementedError
    display(HTML(_write_heading(result)))
    if is_installed("plotly"):
        display(draw_result(result))
    display(HTML(_write_table(result)))


def draw_result(result: Drawable) -> go.Figure:
    """Return the picture of a result.

    Raises:
        MissingPackage: plotly is not installed.
    """
    require_packages("plotly", label="pictures of results")
    from featcal.figures import result_charts

    return result_charts.result_chart(result)


def _write_heading(result: Drawable) -> str:
    return f"<p>{escape(describe_result(result))}</p>"


def _write_table(result: Drawable) -> str:
    return str(tabulate(result).to_html(index=False, border=0, justify="left"))

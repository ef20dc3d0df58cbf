"""Give every chart one look: colours that colour-blind readers can distinguish, on light and on dark backgrounds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import cos, radians, sin

import plotly.graph_objects as go

from featcal.figures.names import cut_text, label

PAPER = "https://arxiv.org/abs/2605.13030"
SOURCE = (
    f"*Prop.*, *Eq.* and *Algorithm* are those of the [paper]({PAPER}); `docs/theory.md` says how each is measured."
)
"""End of every explanation that cites propositions or equations."""

ROLES = ("base", "merged", "calibrated", "expert")

# Okabe-Ito hues, lightened or darkened until they read on white and on near-black.
COLOUR = {
    "base": "#8A8F98",
    "merged": "#D55E00",
    "calibrated": "#2F8FD3",
    "expert": "#009E73",
    "mismatch": "#CC79A7",
    "propagation": "#E3B23C",
}
OTHERS = ("#E3B23C", "#8C6BB1", "#17BECF", "#CC79A7", "#A65628", "#9ACD32", "#F28E8E", "#5C7CFA", "#B8A99A", "#6B8E6B")
"""Colours of up to ten answers or classes, different from the models'."""
SYMBOL = {"base": "square", "merged": "diamond", "calibrated": "circle", "expert": "star"}
"""Shapes repeat the meaning of the colours, for readers who cannot use those."""
SECOND = {"base": "#5F646D", "merged": "#8C6BB1", "calibrated": "#1C639B", "expert": "#006B4E"}
"""Colour of the second model of a role: the same hue, darker, with open symbols and dashed lines. Two merges are
compared most often, and dark orange next to orange is brown, so theirs is another hue."""

NUMBERS = [[0.0, COLOUR["calibrated"]], [0.5, OTHERS[1]], [1.0, COLOUR["merged"]]]
"""Colours of numbers from low to high, which are legible on light and on dark backgrounds."""
_GRID = "rgba(128, 134, 145, 0.25)"


class Shown(str):
    """Name of a model in charts, which also determines how it is drawn.

    A plain text that names a role is drawn as that role, so a chart takes either.
    """

    role: str
    """One of `ROLES`: decides the colour and the symbol."""
    second: bool
    """True if another model of the same role is shown before it."""

    def __new__(cls, label: str, role: str, second: bool = False) -> Shown:
        shown = super().__new__(cls, label)
        shown.role, shown.second = role, second
        return shown

    def __reduce__(self) -> tuple[type[Shown], tuple[str, str, bool]]:
        """Rebuild with role and second: plotly copies every text, and a plain copy would lose them."""
        return Shown, (str(self), self.role, self.second)


def colour(model: str) -> str:
    """Return the colour of a model as "#rrggbb".

    >>> colour(Shown("merged, scale 0.6", "merged")) == colour("merged")
    True
    """
    return (SECOND if _second(model) else COLOUR)[_role(model)]


def symbol(model: str) -> str:
    """Return the marker of a model, open where the model is the second of its role."""
    return SYMBOL[_role(model)] + ("-open" if _second(model) else "")


def open_symbol(model: str) -> str:
    """Return the marker of proven, unobserved values: open, or with a dot if the model's own is open."""
    return symbol(model) + ("-dot" if _second(model) else "-open")


def dash(model: str) -> str:
    """Return the dash of a model's line."""
    return "dash" if _second(model) else "solid"


def _role(model: str) -> str:
    return model.role if isinstance(model, Shown) else model


def _second(model: str) -> bool:
    return isinstance(model, Shown) and model.second


def colours(count: int) -> list[str]:
    """Return `count` different colours of answers or classes; beyond ten, neighbours are hard to distinguish.

    >>> len(set(colours(100)))
    100
    """
    if count <= len(OTHERS):
        return list(OTHERS[:count])
    # Lightness turns in threes and chroma in twos, so neighbours in hue differ in more than hue.
    return [_oklch((0.58, 0.72, 0.46)[i % 3], 0.11 if i % 2 else 0.15, 360 * i / count) for i in range(count)]


def _oklch(lightness: float, chroma: float, hue: float) -> str:
    """Convert a colour of Ottosson's OKLCH (hue in degrees) to "#rrggbb", clipped to the displayable range."""
    a, b = chroma * cos(radians(hue)), chroma * sin(radians(hue))
    long = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3
    medium = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3
    short = (lightness - 0.0894841775 * a - 1.2914855480 * b) ** 3
    # The two matrices and the cubes are those of Ottosson's definition (OKLCH to linear sRGB).
    linear = (
        4.0767416621 * long - 3.3077115913 * medium + 0.2309699292 * short,
        -1.2684380046 * long + 2.6097574011 * medium - 0.3413193965 * short,
        -0.0041960863 * long - 0.7034186147 * medium + 1.7076147010 * short,
    )
    shown = (12.92 * c if c <= 0.0031308 else 1.055 * c ** (1 / 2.4) - 0.055 for c in linear)
    return "#" + "".join(f"{round(255 * min(1.0, max(0.0, c))):02X}" for c in shown)


def apply_theme(figure: go.Figure, height: int) -> go.Figure:
    """Set background, legend, grid and margins as in all charts, replacing earlier settings."""
    figure.update_layout(
        overwrite=True,  # plotly takes three times as long to merge
        height=height,
        margin={"l": 64, "r": 16, "t": 52, "b": 56},
        legend={"orientation": "h", "yanchor": "bottom", "y": 1.04, "x": 0, "xanchor": "left"},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        bargap=0.25,
        hoverlabel={"namelength": -1},
        modebar={"bgcolor": "rgba(0,0,0,0)", "color": COLOUR["base"], "activecolor": COLOUR["calibrated"]},
    )
    axis = {"gridcolor": _GRID, "zerolinecolor": _GRID, "automargin": True, "exponentformat": "power"}
    figure.update_xaxes(axis)
    figure.update_yaxes(axis)
    return figure


def task_axis(figure: go.Figure, tasks: Iterable[str]) -> None:
    """Label a horizontal axis of tasks with the beginnings of their names, which may be long; hovering shows the
    whole."""
    names = {label(task): label(cut_text(task, 24)) for task in tasks}
    figure.update_xaxes(title="task", tickvals=list(names), ticktext=list(names.values()))


def rows_apart(last: Iterable[bool]) -> list[float]:
    """Return heights of rows from top to bottom, 1 apart; those marked `last` half a row further down.

    >>> rows_apart([False, False, True])
    [2.5, 1.5, 0.0]
    """
    apart = [*last]
    top = len(apart) - 1 + 0.5 * any(apart)
    return [top - number - 0.5 * one for number, one in enumerate(apart)]


def label_task_rows(figure: go.Figure, tasks: Iterable[str], places: Iterable[float] | None = None) -> None:
    """Label a vertical axis of tasks with their beginnings; hovering shows the whole.

    Args:
        places: heights of the rows; None if the rows are the tasks' labels.
    """
    names = {label(task): label(cut_text(task, 24)) for task in tasks}
    values = [*names] if places is None else [*places]
    figure.update_yaxes(tickvals=values, ticktext=[*names.values()], zeroline=False, showgrid=False)


_FEW_LAYERS = 8
"""Number of layers up to which names in two lines fit side by side on a phone; longer ones are turned."""


def layer_axis(figure: go.Figure, layers: Sequence[str]) -> None:
    """Label a horizontal axis of layers, in forward order, with names short enough to fit side by side: few of them
    with their numbers in a second line."""
    names = [
        layer.replace("encoder block ", "enc ")
        .replace("decoder block ", "dec ")
        .replace("coder embeddings", "c emb")
        .replace("embeddings", "emb")
        for layer in layers
    ]
    if len(names) <= _FEW_LAYERS:
        names = [name.replace(" ", "<br>") for name in names]
    figure.update_xaxes(title="layer, in forward order", tickvals=list(layers), ticktext=names, showgrid=False)

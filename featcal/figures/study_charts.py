"""Draw the charts of studies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pandas as pd
import plotly.graph_objects as go

from featcal.figures.names import cut_text, label, shorten_models
from featcal.figures.selection_table import name_candidates
from featcal.figures.theme import COLOUR, SYMBOL, apply_theme, colours
from featcal.system.formatting import decimals

if TYPE_CHECKING:  # charts are there before torch is
    from featcal.studies.selection.judge import Margin
    from featcal.studies.selection.outcome import Candidate, Selection

_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "star")

LEADERBOARD = r"""
**What this shows.** Every method at its defaults (AdaMerging with 200 steps), on the same samples. *average* is the
unweighted mean over tasks on the test split, *interval* half the width of its 95 % interval by Student's t over
calibration seeds (wide for three seeds), *normalised* the mean over tasks of the score as a share of the expert's.
*drift* is the relative drift of the final features, *cosine* theirs to the expert's. *CPU s* and *MB* are the
processor time to make the model and the growth of the process meanwhile; the experts' own passes count if a method
needs them.

**What a method needs.** *samples*: unlabelled calibration samples. *labels*: the answers of language models' samples,
read as tokens and compared with nothing. *test data*: samples of the split that is scored. *training*: steps of
gradient descent. *modules*: modules or whole models per task. *task*: the task of every sample, when the model is used.

**When it misleads.** The authors of the methods tuned their defaults on other models, and the refined recipe was tuned
on the validation split of clip-mini. A method that needs the task of every sample answers an easier question than one
model for all. Seconds of small models are mostly overhead. The interval covers other calibration samples, not other
models or tasks.
"""


def _name_lines(figure: go.Figure, models: Sequence[str]) -> None:
    """Label a vertical axis of models with the beginnings of their names, which may be long; hovering shows the
    whole."""
    # By their whole names: shortened, two that differ in their last options would stand on one line.
    whole, shown = [label(one) for one in models], [label(cut_text(one, 48)) for one in shorten_models(models)]
    figure.update_yaxes(categoryorder="array", categoryarray=whole, tickvals=whole, ticktext=shown)


def place_lines(frame: pd.DataFrame, places: Sequence[str]) -> go.Figure:
    """Draw one line per method of `study_tables.method_table` over the places of a study, such as numbers of samples:
    average with its 95 % interval over seeds. Methods with a single place are left out.

    Args:
        places: the columns with the place of a row; several form one name, in the order of the rows.
    """
    scored = frame[frame["average"].notna()]
    named = [", ".join(_format_place(row[name]) for name in places) for row in scored[list(places)].to_dict("records")]
    figure, methods = go.Figure(), list(dict.fromkeys(scored["method"]))
    shades = dict(zip(methods, colours(len(methods)), strict=True))
    for number, (method, shown) in enumerate(zip(methods, shorten_models(methods), strict=True)):
        rows = scored[scored["method"] == method]
        if len(rows) < 2:
            continue
        figure.add_scatter(
            x=[label(one) for one, same in zip(named, scored["method"] == method, strict=True) if same],
            y=rows["average"],
            error_y={"array": rows["interval"].fillna(0.0).tolist(), "thickness": 1.5, "color": shades[method]},
            name=label(cut_text(shown, 48)),
            mode="lines+markers",
            marker={"color": shades[method], "symbol": _SYMBOLS[number % len(_SYMBOLS)], "size": 9},
            line={"color": shades[method]},
            hovertext=[decimals(value, 1) for value in rows["average"]],
            hovertemplate="%{x}<br>%{hovertext} %<extra>%{fullData.name}</extra>",
        )
    figure.update_xaxes(title=label(", ".join(places)), type="category")
    figure.update_yaxes(title="average over tasks, %")
    return apply_theme(figure, 460)


def candidate_chart(chosen: Selection) -> go.Figure:
    """Draw one line per scored candidate of a selection, the best on top: its score minus the default's with the 95 %
    interval; starts as they are in orange, calibrations in blue, grey if the default is as good."""
    named = zip(name_candidates(chosen.to_json()), chosen.candidates, strict=True)
    scored = [(name, one, one.margin) for name, one in named if one.margin is not None][::-1]
    figure = go.Figure()
    for group, shade in (("the merge as it is", "merged"), ("calibrated", "calibrated"), ("within noise", "base")):
        rows = {name: margin for name, one, margin in scored if _side(one, margin) == group}
        if rows:
            figure.add_scatter(
                x=[100 * one.difference for one in rows.values()],
                y=[label(name) for name in rows],
                error_x={
                    "type": "data",
                    "array": [100 * (one.high - one.difference) for one in rows.values()],
                    "arrayminus": [100 * (one.difference - one.low) for one in rows.values()],
                    "color": COLOUR[shade],
                    "thickness": 2,
                },
                name=group,
                mode="markers",
                marker={"color": COLOUR[shade], "symbol": SYMBOL[shade], "size": 10},
                hovertemplate="%{y}: %{x:+.2f} points<extra></extra>",
            )
    figure.add_vline(x=0, line={"color": COLOUR["base"], "dash": "dot"})
    figure.update_xaxes(title="score less the default's, points")
    _name_lines(figure, [name for name, *_ in scored])
    return apply_theme(figure, 160 + 24 * len(scored))


def _format_place(value: object) -> str:
    """Format a place of a study; whole numbers lose the ".0" from a column with gaps."""
    if isinstance(value, float):
        return "" if value != value else f"{value:g}"
    return str(value)


def _side(one: Candidate, margin: Margin) -> str:
    if margin.is_within_noise:
        return "within noise"
    return "calibrated" if one.config is not None else "the merge as it is"

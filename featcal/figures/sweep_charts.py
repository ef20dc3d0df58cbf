"""Draw runs and methods as points of one plot, mean score over any number or option; or all options as parallel
axes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.colors import sample_colorscale

from featcal.figures.names import cut_text, label
from featcal.figures.run_tables import OPTION_COLUMNS, value_words
from featcal.figures.theme import COLOUR, NUMBERS, SYMBOL, apply_theme, colour, colours
from featcal.system.formatting import decimals

_LOOK = {
    "base": ("base", COLOUR["base"], SYMBOL["base"]),
    "merged": ("merged", COLOUR["merged"], SYMBOL["merged"]),
    "merger": ("merged otherwise", COLOUR["merged"], "diamond-open"),
    "anchor": ("anchor only", COLOUR["merged"], "x-thin-open"),
    "calibrated": ("calibrated", COLOUR["calibrated"], SYMBOL["calibrated"]),
    "expert": ("experts, one per task", COLOUR["expert"], SYMBOL["expert"]),
}
"""Kind of a point → its name in the legend, colour, symbol; in the order in which they are drawn."""
FRONT = "no run beats these (Pareto)"
SCORES = {"mean": "mean {} over tasks, %", "worst": "{} on the worst task, %", "drift": "relative final drift"}
"""Columns of scores, and their names on an axis."""
NUMBERS_ACROSS = {
    "worst": SCORES["worst"],
    "cost": "cost of making the model, seconds of the processor",
    "drift": "relative final drift",
}
"""Columns of numbers for the horizontal axis, and their names there."""
METHODS = "table of methods, test split"
_MOST_COLOURS = 10
"""Most values that each get a colour and an entry in the legend; more form a colour scale."""
_LOG = 20.0
"""Ratio of an option's largest to its smallest value above which its axis is logarithmic."""
_NO_VALUE = "none"

SWEEP = r"""
**What this shows.** Every run of the suite that was measured on these samples, and hollow every method of the table
below: the mean score over tasks upwards, over the score of the worst task, the cost, the final drift or an option. Up
is better, and over the worst task to the right too. Thin rings mark the Pareto front of mean and worst task: no run is
at least as good in both and better in one (experts, one model per task, take no part). Beside the calibrated runs are
models that need no data: Task Arithmetic at other scales, the mean of the experts, and *anchor only*, the model that
calibration is pulled to, $\rho\,\theta_\text{merged} + (1-\rho)\,\theta_\text{base}$ (Eq. 11).

**Formula.** Mean and minimum over tasks of the score on the same samples; the point of a run is the exact result of a
single calibration with its options. Cost is the processor seconds to make the model, if they are known.

**When it misleads.** With 64 samples a task's score moves by 1.6 points with every sample, and the best of many runs
looks better than it is: choose here, and look at the test split once. The methods of the table are scored on that test
split, so do not choose options by them. A later run reuses the experts' passes and costs less than the first one. The
worst task may be the one that is hardest for its own expert too.
"""


def runs_as_points(
    frame: pd.DataFrame,
    across: str,
    metric: str,
    shown: Mapping[str, str],
    by: str = "",
    methods: pd.DataFrame | None = None,
) -> go.Figure:
    """Draw the mean score over a number or an option: one point per row of `run_tables.sweep_table` that has it, with
    its run's id as customdata. Merged model and experts are dashed lines if they do not have it.

    Over the worst task the Pareto front has thin rings and a dotted line; over an option a thin line goes through runs
    that are alike in all others.

    Args:
        across: one of `NUMBERS_ACROSS`, or of `run_tables.OPTION_COLUMNS`.
        metric: what the scores are, such as "accuracy".
        shown: id → what charts call it, of the models that other pages look at; they get a thick ring.
        by: column that decides the colour; "" is the kind of model.
        methods: rows of `study_tables.method_points`, drawn hollow with their intervals: other samples.
    """
    having, figure = frame[frame[across].notna()].sort_values(across), go.Figure()
    for kind in ("merged", "expert"):
        for value in frame[(frame["kind"] == kind) & frame[across].isna()]["mean"]:
            name, shade, _ = _LOOK[kind]
            figure.add_hline(value, line={"color": shade, "dash": "dash", "width": 1.5}, annotation_text=name)
    if across == "worst":
        _front(figure, frame)
    elif across in OPTION_COLUMNS and having[across].nunique() > 1:
        _join_alike(figure, having, across)
    _rings(figure, having, shown, across)
    for name, rows, marker in _groups(having, by):
        figure.add_scatter(mode="markers", name=name, marker=marker, **_points(rows, across))
    drawn = having[across]
    if methods is not None and across in methods:
        _draw_methods(figure, methods[methods[across].notna()], across)
        drawn = pd.concat([drawn, methods[across].dropna()])
    numeric = pd.api.types.is_numeric_dtype(having[across])
    log = numeric and len(drawn) and drawn.min() > 0 and drawn.max() / drawn.min() >= _LOG
    values = having[across].drop_duplicates() if numeric and across in OPTION_COLUMNS else []
    # Of an option its values; else of a logarithm the powers of ten, without the digits between them.
    ticks: dict[str, Any] = {"dtick": 1} if log else {}
    if 0 < len(values) <= 12:
        ticks = {"tickvals": [*values], "ticktext": [value_words(one) for one in values]}
    title = NUMBERS_ACROSS.get(across, across).format(metric)
    figure.update_xaxes(title=label(title), type="log" if log else None if numeric else "category", **ticks)
    figure.update_yaxes(title=SCORES["mean"].format(metric))
    return apply_theme(figure, 400)


def _front(figure: go.Figure, frame: pd.DataFrame) -> None:
    """Draw thin rings and a dotted line around the runs on the Pareto front."""
    front = frame[frame["front"]].sort_values(["mean", "worst"], ascending=[True, False])
    figure.add_scatter(
        x=front["worst"],
        y=front["mean"],
        name=FRONT,
        mode="lines+markers",
        line={"color": COLOUR["calibrated"], "dash": "dot", "width": 2},
        marker={"symbol": "circle-open", "size": 17, "color": COLOUR["calibrated"], "line": {"width": 1}},
        hoverinfo="skip",
    )


def _join_alike(figure: go.Figure, having: pd.DataFrame, option: str) -> None:
    """Draw a thin line through the calibrated runs that differ only in one option."""
    others = [name for name in (*OPTION_COLUMNS, "more") if name != option]
    for _, alike in having[having["kind"] == "calibrated"].groupby(others, dropna=False, sort=False):
        if alike[option].nunique() > 1:
            line = {"color": COLOUR["base"], "width": 1}
            figure.add_scatter(
                x=alike[option], y=alike["mean"], mode="lines", line=line, hoverinfo="skip", showlegend=False
            )


def _draw_methods(figure: go.Figure, rows: pd.DataFrame, across: str) -> None:
    """Draw methods of a table as hollow points, in the colours of their kinds, with the interval over seeds."""
    looks = [_LOOK[kind][1:] for kind in rows["kind"]]
    figure.add_scatter(
        error_y={"array": rows["interval"].fillna(0.0).tolist(), "color": COLOUR["base"], "thickness": 1},
        mode="markers",
        name=METHODS,
        marker={
            "symbol": [symbol if symbol.endswith("-open") else f"{symbol}-open" for _, symbol in looks],
            "color": [shade for shade, _ in looks],
            "size": 8,
        },
        **_points(rows, across),
    )


def all_options(frame: pd.DataFrame, score: str, metric: str) -> go.Figure:
    """Draw calibrated runs as lines across axes, one for every option in which they differ and one for every score;
    the colour is the score. A range drawn on an axis keeps the lines that pass it.

    Args:
        frame: as in `runs_as_points`; rows of other kinds are left out.
        score: one of `SCORES`.
    """
    runs = frame[frame["kind"] == "calibrated"]
    varying = [name for name in OPTION_COLUMNS if runs[name].nunique(dropna=False) > 1]
    dimensions = [_option_axis(name, runs[name]) for name in varying]
    for name, form in (("drift", ".3f"), ("worst", ".1f"), ("mean", ".1f")):
        if runs[name].notna().all():
            dimensions.append({"label": name, "values": runs[name], "tickformat": form})
    figure = go.Figure(
        go.Parcoords(
            dimensions=dimensions,
            line={"color": runs[score], "colorscale": NUMBERS, "colorbar": _colour_bar(SCORES[score].format(metric))},
            unselected={"line": {"opacity": 0.08}},
            labelfont={"size": 14},
            tickfont={"size": 12},
            rangefont={"size": 12},
        )
    )
    return apply_theme(figure, 380).update_layout(margin={"l": 64, "r": 24, "t": 64, "b": 32})


def _option_axis(name: str, values: pd.Series) -> dict[str, Any]:
    """Return an axis of parallel coordinates: numbers over several decades by their logarithm, words by their order,
    and missing values at the bottom."""
    known = values.dropna().drop_duplicates().sort_values().tolist()
    numeric = pd.api.types.is_numeric_dtype(values)
    places: dict[Any, float] = {one: float(place) for place, one in enumerate(known)}
    if numeric and len(known) > _MOST_COLOURS:
        places = {one: float(np.log10(one) if known[0] > 0 and known[-1] / known[0] >= _LOG else one) for one in known}
    least = min(places.values(), default=0.0)
    words = [label(cut_text(value_words(one), 24)) for one in places]
    axis = {"label": name, "values": [places.get(one, least - 1.0) for one in values]}
    if len(places) <= _MOST_COLOURS or not numeric:
        missing = [] if len(values.dropna()) == len(values) else [(least - 1.0, _NO_VALUE)]
        ticks = [*missing, *zip(places.values(), words, strict=True)]
        axis |= {"tickvals": [place for place, _ in ticks], "ticktext": [word for _, word in ticks]}
    return axis


def _rings(figure: go.Figure, frame: pd.DataFrame, shown: Mapping[str, str], across: str) -> None:
    """Draw a thick ring around the models shown on other pages."""
    for run, name in shown.items():
        rows = frame[frame["run"] == run]
        if len(rows):
            figure.add_scatter(
                x=rows[across],
                y=rows["mean"],
                name=f"here: {label(str(name))}",
                mode="markers",
                marker={"symbol": "circle-open", "size": 24, "color": colour(name), "line": {"width": 3}},
                hoverinfo="skip",
            )


def _groups(frame: pd.DataFrame, by: str) -> Iterator[tuple[str, pd.DataFrame, dict[str, Any]]]:
    """Yield the rows that share a colour, with their name in the legend and their marker."""
    if not by:
        for kind, (name, shade, symbol) in _LOOK.items():
            rows = frame[frame["kind"] == kind]
            if len(rows):
                yield name, rows, {"color": shade, "symbol": symbol, "size": 11, "line": {"width": 1.5, "color": shade}}
        return
    symbols = [_LOOK[kind][2] for kind in frame["kind"]]
    values, numeric = frame[by].dropna().drop_duplicates().sort_values().tolist(), _is_number(frame[by])
    if numeric and len(values) > _MOST_COLOURS:
        scale = {"color": frame[by], "colorscale": NUMBERS, "colorbar": _colour_bar(by)}
        yield by, frame, {**scale, "symbol": symbols, "size": 11}
        return
    shades = sample_colorscale(NUMBERS, np.linspace(0, 1, max(2, len(values)))) if numeric else colours(len(values))
    looks = [(value_words(value), frame[by] == value, shade) for value, shade in zip(values, shades, strict=False)]
    for words, having, shade in [*looks, (_NO_VALUE, frame[by].isna(), COLOUR["base"])]:
        rows = frame[having]
        if len(rows):
            marks = [symbol for symbol, one in zip(symbols, having, strict=True) if one]
            name = label(f"{by} {cut_text(words, 30)}")
            yield name, rows, {"color": shade, "symbol": marks, "size": 11, "line": {"width": 1.5, "color": shade}}


def _is_number(values: pd.Series) -> bool:
    return bool(pd.api.types.is_numeric_dtype(values))


def _colour_bar(title: str) -> dict[str, Any]:
    return {"title": {"text": label(title), "side": "right"}, "thickness": 12, "outlinewidth": 0}


def _points(rows: pd.DataFrame, across: str) -> dict[str, Any]:
    """Return the points of a trace, each with its run's id and its hover text."""
    return {
        "x": rows[across],
        "y": rows["mean"],
        "customdata": rows["run"].tolist(),
        "text": [_hover_text(row) for _, row in rows.iterrows()],
        "hovertemplate": "%{text}<extra></extra>",
    }


def _hover_text(row: pd.Series) -> str:
    """Write the hover text of a point."""
    called = row["name"] or row["model"]
    drift = "" if pd.isna(row["drift"]) else f"<br>drift {row['drift']:.3f}"
    cost = "" if pd.isna(row["cost"]) else f"<br>{row['cost']:.1f} s of the processor"
    worst = f"{decimals(row['worst'], 1)} % ({label(cut_text(row['worst task'], 40))})"
    return f"{label(cut_text(called, 80))}<br>mean {decimals(row['mean'], 1)} %, worst task {worst}{drift}{cost}"

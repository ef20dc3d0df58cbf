"""Draw the picture of README and home page: clip-mini before and after, `python docs/before_after.py`.

On the left the drift after every layer, measured anew; on the right the test scores of `data/clip-mini/compare.json`,
means over its calibration seeds. Plotly draws both in a browser (kaleido), once for light and once for dark ground, and
once below the name as the picture that a forge shows beside links (`social-preview.png`).
"""

from __future__ import annotations

from pathlib import Path

import kaleido
import pandas as pd
import plotly.graph_objects as go
from kaleido import PageGenerator
from plotly.subplots import make_subplots

import featcal
from featcal.figures.theme import COLOUR, apply_theme
from featcal.studies.study import read_study
from featcal.system.resources import data_path

AFTER = featcal.CalibrationConfig(recipe="informed", samples=64)
ROWS = {"merged": "merged", "calibrated": "calibrated:recipe=informed", "expert": "expert"}
"""Role → row of the study."""
INK = {"light": "#1f2329", "dark": "#ced6dd"}
OUT = Path(__file__).parent / "images"


def measure_drift() -> dict[str, pd.DataFrame]:
    """Return the relative drift of both models, one row per layer and one column per task."""
    session = featcal.open_session("clip-mini")
    ledgers = {"merged": featcal.measure_drift(session), "calibrated": featcal.measure_drift(session, AFTER)}
    return {
        model: pd.DataFrame(
            {name: {one.layer: one.relative_drift for one in task.layers} for name, task in ledger.tasks.items()}
        )
        for model, ledger in ledgers.items()
    }


def read_scores() -> dict[str, dict[str, float]]:
    """Return role → task → test score in %, the mean over calibration seeds."""
    found = {one.method: one for one in read_study(data_path("clip-mini", "compare.json")).summaries()}
    return {role: {task: 100 * value for task, value in found[row].tasks.items()} for role, row in ROWS.items()}


def draw(drift: dict[str, pd.DataFrame], scores: dict[str, dict[str, float]], ink: str) -> go.Figure:
    """Return the picture with words in the colour `ink`."""
    titles = ["Drift after every layer", "Test score of every task"]
    figure = make_subplots(1, 2, column_widths=[0.47, 0.53], horizontal_spacing=0.12, subplot_titles=titles)
    for model, frame in drift.items():
        for task in frame:
            figure.add_scatter(x=frame.index, y=frame[task], mode="lines", opacity=0.25, showlegend=False,
                               line={"color": COLOUR[model], "width": 1.5}, row=1, col=1)  # fmt: skip
        figure.add_scatter(x=frame.index, y=frame.mean(axis=1), mode="lines+markers", showlegend=False,
                           line={"color": COLOUR[model], "width": 4}, marker={"size": 9}, row=1, col=1)  # fmt: skip
    _draw_scores(figure, scores)
    apply_theme(figure, 400)
    figure.update_xaxes(tickangle=0, tickfont={"size": 13})
    figure.update_xaxes(ticksuffix=" %", row=1, col=2)
    figure.update_layout(
        font={"color": ink, "size": 15, "family": "system-ui, sans-serif"},
        legend={"y": -0.12, "yanchor": "top", "x": 0.77, "xanchor": "center"},
        margin={"l": 48, "r": 20, "t": 44, "b": 72},
    )
    figure.update_annotations(font={"size": 18, "color": ink})
    return figure


def _draw_scores(figure: go.Figure, scores: dict[str, dict[str, float]]) -> None:
    tasks = list(scores["merged"])[::-1]
    for task in tasks:
        ends = [scores[model][task] for model in ("merged", "calibrated")]
        figure.add_scatter(x=ends, y=[task, task], mode="lines", showlegend=False,
                           line={"color": COLOUR["calibrated"], "width": 3}, opacity=0.5, row=1, col=2)  # fmt: skip
    symbols = {"merged": "diamond", "calibrated": "circle", "expert": "star"}
    for model, sign in symbols.items():
        figure.add_scatter(x=[scores[model][task] for task in tasks], y=tasks, mode="markers", name=model,
                           marker={"color": COLOUR[model], "symbol": sign, "size": 13}, row=1, col=2)  # fmt: skip


def draw_preview(drift: dict[str, pd.DataFrame], scores: dict[str, dict[str, float]]) -> go.Figure:
    """Return the picture for links: the name and what featcal is for above the same charts, on white."""
    figure = draw(drift, scores, INK["light"])
    figure.update_layout(paper_bgcolor="#ffffff", margin={"l": 70, "r": 50, "t": 220, "b": 90})
    lines = (
        ("<b>featcal</b>", 52, 1.48),
        ("See where a merged model went wrong, and repair it in closed form", 30, 1.25),
    )
    for text, size, y in lines:
        figure.add_annotation(text=text, font={"size": size, "color": INK["light"]}, x=-0.03, y=y, xref="paper",
                              yref="paper", xanchor="left", yanchor="middle", showarrow=False)  # fmt: skip
    return figure


def main() -> None:
    drift, scores = measure_drift(), read_scores()
    jobs = [
        {
            "fig": draw(drift, scores, ink).to_dict(),
            "path": str(OUT / f"before-after-{theme}.svg"),
            "opts": {"format": "svg", "width": 1060, "height": 400},
        }
        for theme, ink in INK.items()
    ]
    jobs.append(
        {
            "fig": draw_preview(drift, scores).to_dict(),
            "path": str(OUT / "social-preview.png"),
            "opts": {"format": "png", "width": 1280, "height": 640},
        }
    )
    kaleido.write_fig_from_object_sync(jobs, kopts={"page_generator": PageGenerator(mathjax=False)})


if __name__ == "__main__":
    main()

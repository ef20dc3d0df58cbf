"""A figure on a page is one that plotly draws once: what streamlit would add later is in it, and nothing is packed."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pytest

from app import drawing

ROWS = pd.DataFrame({"x": [1.5, 2.5], "y": [3, 4]})


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[go.Figure, dict[str, Any]]]:
    """Return the figure and the options that streamlit gets."""
    found: list[tuple[go.Figure, dict[str, Any]]] = []
    monkeypatch.setattr(drawing.st, "plotly_chart", lambda figure, **options: found.append((figure, options)))
    return found


def test_a_second_look_of_plotly_finds_the_same(sent: list[tuple[go.Figure, dict[str, Any]]]) -> None:
    nested = {"color": np.array([0.5, 0.25])}
    figure = go.Figure(go.Scatter(x=ROWS["x"], y=ROWS["y"], marker=nested, error_x={"array": ROWS["x"]}))
    drawing.draw_figure(figure, "chart", "words", {})
    document = json.loads(sent[0][0].to_json())
    trace, layout = document["data"][0], document["layout"]
    assert (trace["x"], trace["y"]) == ([1.5, 2.5], [3, 4])
    assert (trace["marker"]["color"], trace["error_x"]["array"]) == ([0.5, 0.25], [1.5, 2.5])
    assert "template" not in layout
    assert layout["datarevision"] == 1
    assert (sent[0][1]["theme"], sent[0][1]["on_select"]) == (None, "ignore")


@pytest.mark.parametrize(("drag", "then"), [(None, ("pan", "event+select")), ("lasso", ("lasso", "event"))])
def test_how_a_click_works_is_said_at_once(
    sent: list[tuple[go.Figure, dict[str, Any]]], drag: str | None, then: tuple[str, str]
) -> None:
    keys: list[str] = []
    figure = go.Figure(layout={"dragmode": drag, "clickmode": "event+select"})
    drawing.draw_figure(figure, "chart", "words", {}, on_select=keys.append)
    shown, options = sent[0]
    assert (shown.layout.dragmode, shown.layout.clickmode, shown.layout.hovermode) == (*then, "closest")
    options["on_select"]()
    assert keys == ["chart"]

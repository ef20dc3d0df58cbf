"""Tokens as charts: every patch over its place, and words that are shown and not obeyed."""

from __future__ import annotations

import re

import pandas as pd
import pytest

from featcal.figures import token_charts


@pytest.mark.parametrize(
    ("count", "height", "width", "grid"),
    [(49, 224, 224, (7, 7)), (6, 32, 48, (2, 3)), (50, 224, 224, None), (4, 64, 16, (4, 1)), (0, 8, 8, None)],
)
def test_patches_fill_the_picture(count: int, height: int, width: int, grid: tuple[int, int] | None) -> None:
    assert token_charts.patch_grid(count, height, width) == grid


def test_a_patch_lies_over_its_part_of_the_picture() -> None:
    """Row by row from above, all models on the scale of the largest drift."""
    frame = pd.DataFrame({"drift": [1.0, 2, 3, 4, 5, 6], "share": [0.0, 0.1, 0.2, 0.2, 0.2, 0.3]})
    figure = token_charts.patches(frame, "drift", 8.0, (2, 3), "data:image/png;base64,", ".2f")
    heat, bar = figure.data
    assert [list(row) for row in heat.z] == [[1, 2, 3], [4, 5, 6]]
    assert (heat.zmin, heat.zmax) == (bar.marker.cmin, bar.marker.cmax) == (0, 8)
    # Red, green and blue of the full colour at the opacity of the heat map, over the grey of the picture.
    assert bar.marker.colorscale == ((0, "rgb(225, 225, 225)"), (1, "rgb(215, 120, 45)"))
    (under,) = figure.layout.images
    assert (under.x, under.y, under.sizex, under.sizey) == (-0.5, -0.5, 3, 2)
    assert (figure.layout.xaxis.range, figure.layout.yaxis.range) == ((-0.5, 2.5), (1.5, -0.5))


def test_words_are_text_with_their_drift_as_colour() -> None:
    frame = pd.DataFrame(
        {"token": ["<b>", 'x" onclick="y', "last"], "drift": [0.0, 1.0, 4.0], "share": [0, 1 / 17, 16 / 17]}
    )
    html = token_charts.mark_words(frame, "drift", 4.0, 2)
    unmoved = token_charts.mark_words(frame.assign(drift=0.0, share=float("nan")), "drift", 0.0, 2)
    assert 'title="drift 0.00"' in unmoved
    assert "&lt;b&gt;" in html
    assert "onclick=&quot;" in html
    assert 'onclick="' not in html
    opacity = [float(one) for one in re.findall(r"rgba\([\d, ]+, ([\d.]+)\)", html)]
    assert opacity == pytest.approx([0, opacity[2] / 4, opacity[2]])
    assert 'title="drift 4.00, 94.1% of the layer&#x27;s squared drift"' in html

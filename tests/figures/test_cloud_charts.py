"""Maps of features as data: what is lit, what a point gives back when it is clicked, what the frame is."""

from __future__ import annotations

import numpy as np
import plotly.graph_objects as go
import pytest

from featcal.figures import cloud_charts, theme
from featcal.figures.cloud_charts import MapPosition
from featcal.figures.sample_charts import Dots

MODELS = ("expert", "merged", "calibrated")
LABELS = ("a", "b", "c")


def points(n: int = 3, models: tuple[str, ...] = MODELS) -> dict[str, cloud_charts.Array]:
    return {model: np.arange(2.0 * n).reshape(n, 2) + place for place, model in enumerate(models)}


def clouds(figure: go.Figure) -> dict[str, go.Scatter]:
    """The traces of samples, by model."""
    return {trace.name: trace for trace in figure.data if trace.customdata is not None}


def test_a_map_by_answers_colours_them_alike_in_every_model() -> None:
    dots = Dots(range(3), LABELS, ["yes", "no", "yes"])
    figure = cloud_charts.feature_map(points(models=MODELS[:2]), dots, "PCA")
    no, yes = theme.OTHERS[:2]
    assert list(clouds(figure)) == ["expert", "merged"]
    for model, cloud in clouds(figure).items():
        assert list(cloud.marker.color) == [yes, no, yes]
        assert cloud.marker.symbol == theme.SYMBOL[model]
    legend = [trace.name for trace in figure.data if trace.showlegend is not False]
    assert legend == ["expert", "merged", "no", "yes"]


def test_a_map_by_models_has_one_colour_each() -> None:
    figure = cloud_charts.feature_map(points(models=("expert",)), Dots(range(3), LABELS), "PCA")
    assert [trace.marker.color for trace in figure.data] == [theme.COLOUR["expert"]]


def test_a_picked_sample_stays_lit_in_every_model_by_its_id() -> None:
    """Ids, not positions: some of many samples are on the map, and traces of other things lie between."""
    dots = Dots((4, 7, 9), LABELS, picked=(9, 4))
    figure = cloud_charts.feature_map(points(), dots, "PCA", moved=("merged", "calibrated"))
    assert {name: list(cloud.selectedpoints) for name, cloud in clouds(figure).items()} == {n: [0, 2] for n in MODELS}
    assert all(list(cloud.customdata) == [4, 7, 9] for cloud in clouds(figure).values())
    elsewhere = cloud_charts.feature_map(points(), Dots((4, 7, 9), LABELS, picked=(5,)), "PCA")
    assert all(cloud.selectedpoints == () for cloud in clouds(elsewhere).values())
    (ring,) = (trace for trace in figure.data if trace.name == "selected")
    flats = points().values()
    assert (list(ring.x), list(ring.y)) == tuple([flat[i, axis] for flat in flats for i in (0, 2)] for axis in (0, 1))
    assert "selected" not in [trace.name for trace in elsewhere.data]
    untouched = cloud_charts.feature_map(points(), Dots((4, 7, 9), LABELS), "PCA")
    assert all(trace.selectedpoints is None for trace in untouched.data)


@pytest.mark.parametrize(("n", "kind", "arrows"), [(1500, "scatter", 1), (1501, "scattergl", 0)])
def test_many_points_are_drawn_without_arrows_by_the_graphics_card(n: int, kind: str, arrows: int) -> None:
    dots = Dots(range(n), [""] * n)
    figure = cloud_charts.feature_map(points(n, MODELS[:2]), dots, "PCA", moved=("expert", "merged"))
    assert {cloud.type for cloud in clouds(figure).values()} == {kind}
    assert len([trace for trace in figure.data if "→" in trace.name]) == arrows


def test_a_layer_is_shown_in_the_frame_of_all_layers() -> None:
    trails = {model: np.array([[0.0, 0.0], [1.0, 2.0], [5.0, 1.0]]) for model in MODELS[:2]}
    depth = MapPosition(("embeddings", "block 0", "block 1"), "block 0", trails, ((-1.0, 6.0), (-2.0, 3.0)))
    figure = cloud_charts.feature_map(points(models=MODELS[:2]), Dots(range(3), LABELS), "UMAP", depth=depth)
    assert (figure.layout.xaxis.range, figure.layout.yaxis.range) == ((-1.0, 6.0), (-2.0, 3.0))
    lines = [trace for trace in figure.data if "mean by layer" in trace.name]
    assert [list(line.text) for line in lines] == [["embeddings", "block 0", "block 1"]] * 2
    assert [int(np.argmax(line.marker.size)) for line in lines] == [1, 1]
    assert all(line.customdata is None for line in lines)  # nothing to pick
    depth = MapPosition(depth.layers, "block 0", trails, None)
    alone = cloud_charts.feature_map(points(models=MODELS[:2]), Dots(range(3), LABELS), "UMAP", depth=depth)
    assert alone.layout.xaxis.range is None
    assert [trace.name for trace in alone.data] == list(MODELS[:2])


def test_small_maps_have_a_panel_per_task_and_one_legend() -> None:
    maps = {f"<i>{i}</i>": points() for i in range(5)}
    dots = {task: Dots((3, 5, 8), LABELS, picked=(8,) if task == "<i>1</i>" else ()) for task in maps}
    figure = cloud_charts.small_maps(maps, dots, chosen="<i>1</i>")
    titles = [one.text for one in figure.layout.annotations][:5]
    assert titles[:2] == ["&lt;i&gt;0&lt;/i&gt;", "<b>&lt;i&gt;1&lt;/i&gt;</b>"]
    assert len(figure.data) == 5 * len(MODELS)
    assert [trace.name for trace in figure.data if trace.showlegend] == list(MODELS)
    lit = {trace.xaxis: trace.selectedpoints for trace in figure.data}
    assert lit == {"x": None, "x2": (2,), "x3": None, "x4": None, "x5": None}
    assert [list(one) for one in figure.data[3].customdata] == [[1, 3], [1, 5], [1, 8]]
    panels = {trace.xaxis: [one.name for one in figure.data if one.xaxis == trace.xaxis] for trace in figure.data}
    assert panels == {axis: list(MODELS) for axis in ("x", "x2", "x3", "x4", "x5")}
    anchors = {axis.anchor: axis.scaleanchor for axis in figure.select_yaxes() if axis.anchor in panels}
    assert anchors == {axis: axis for axis in panels}

"""The Features page: layers, picked samples, small maps, and what it says of samples that are not drawn."""

from __future__ import annotations

import base64
import io
import json
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import streamlit as st
from app_pages import InstantMaps, button, charts, control, go, healthy, name_of, opened
from PIL import Image
from streamlit.testing.v1 import AppTest
from tiny_clip import BLOCKS
from tiny_text import write_text_suite

from app import cloud, hover, maps, picking, state
from app.samples import measured_samples
from app.selection import PageSelection
from featcal.figures.sample_tables import answer_column, find_samples, sample_table
from featcal.session import projection as figures_maps
from featcal.session.feature_maps import FeatureMaps
from featcal.session.session import open_session
from featcal.suite.views import EvaluationSamples

pytestmark = [pytest.mark.usefixtures("instant_maps"), pytest.mark.filterwarnings("ignore")]
BOTH = {"merge": "merged", "beside": "base"}
SHOWN = ("expert", "merged", "base")
SHAPES = ("star", "diamond", "square")
"""Of the models that are shown."""


def figure(app: AppTest, place: int = 0) -> Any:
    return json.loads(app.get("plotly_chart")[place].proto.spec)


def clouds(app: AppTest, place: int = 0) -> dict[str, Any]:
    """Traces of samples, by model."""
    return {one["name"]: one for one in figure(app, place)["data"] if "customdata" in one}


def numbers(values: Any) -> np.ndarray:
    """The array that a list was written from."""
    return np.asarray(values)


def said(app: AppTest, words: str) -> list[str]:
    return [one.value for one in app.caption if words in one.value]


def picked(app: AppTest) -> list[int]:
    (found,) = [one for one in app.multiselect if name_of(one) == "features-picked"]
    return [int(one) for one in found.value]


def pick(app: AppTest, *ids: int) -> AppTest:
    (field,) = [one for one in app.multiselect if name_of(one) == "features-picked"]
    return field.set_value(list(ids)).run()


@pytest.mark.slow
def test_the_layer_slider_moves_clouds_within_one_map(tiny_suite_file: Path) -> None:
    app = opened(tiny_suite_file, "features", **BOTH)
    assert healthy(app)
    assert control(app, "layer").value == "head"
    assert "range" not in figure(app)["layout"]["xaxis"]
    frames, places = set(), set()
    for layer in ("block 0", "block 1", "block 2"):
        control(app, "layer").set_value(layer).run()
        assert healthy(app)
        layout = figure(app)["layout"]
        frames.add((*layout["xaxis"]["range"], *layout["yaxis"]["range"]))
        found = clouds(app)
        assert [one["marker"]["symbol"] for one in found.values()] == list(SHAPES)
        places.add(tuple(numbers(found["merged"]["x"]).tolist()))
        assert len(said(app, "this layer's part of the UMAP map")) == 1
        assert app.session_state["selection"].layer == layer
    assert len(frames) == 1
    assert len(places) == 3
    assert len([one for one in figure(app)["data"] if "mean by layer" in one["name"]]) == 3
    control(app, "frame").set_value("this layer").run()
    assert healthy(app)
    assert "range" not in figure(app)["layout"]["xaxis"]
    assert tuple(numbers(clouds(app)["merged"]["x"]).tolist()) in places  # the positions stay


def test_the_cloud_of_a_layer_is_its_part_of_the_map_of_all(tiny_suite_file: Path) -> None:
    """The instant map is PCA: the very same as one made here of all layers and models together."""
    app = opened(tiny_suite_file, "features", layer="block 1", n="8", **BOTH)
    assert healthy(app)
    session = open_session(str(tiny_suite_file), resident=True)
    shown = FeatureMaps(session, {name: session.resolve(name) for name in SHOWN}, EvaluationSamples(8))
    by_layer = shown.features(session.tasks[0], "block 1")
    assert list(by_layer) == [f"block {i}" for i in range(BLOCKS)]
    rows = [one / one.norm(dim=1, keepdim=True) for models in by_layer.values() for one in models.values()]
    whole = np.concatenate([one.numpy() for one in rows])
    flat = figures_maps.pca_map(whole).reshape(len(by_layer), 3, 8, 2)
    place = list(by_layer).index("block 1")
    for model, expected in zip(("expert", "merged", "base"), flat[place], strict=True):
        np.testing.assert_allclose(numbers(clouds(app)[model]["x"]), expected[:, 0], atol=1e-5)
    assert (
        said(app, "Trustworthiness")[0]
        .split(": ")[1]
        .startswith(f"{maps.trust(whole.reshape(len(by_layer), 24, -1)[place], flat[place].reshape(24, 2)):.3f}")
    )


def test_a_layer_that_was_chosen_on_another_page_is_shown(tiny_suite_file: Path) -> None:
    app = opened(tiny_suite_file, "features", layer="block 1 attention", **BOTH)
    assert healthy(app)
    assert control(app, "layer").value == "block 1"
    assert said(app, "class token after block 1")
    assert control(opened(tiny_suite_file, "features", layer="embeddings"), "layer").value == "block 0"
    assert control(opened(tiny_suite_file, "features", layer="nowhere"), "layer").value == "head"


@pytest.mark.slow
def test_text_has_means_over_tokens_in_both_stages(tmp_path: Path) -> None:
    app = opened(write_text_suite(tmp_path / "suite", "t5"), "features", layer="decoder block 0")
    assert healthy(app)
    assert said(app, "mean over the stage's own tokens")
    assert control(app, "layer").options[0] == "encoder embeddings"
    assert control(app, "layer").options[-1] == "head"


@pytest.mark.slow
def test_picked_samples_stay_whatever_else_changes(tiny_suite_file: Path) -> None:
    app = opened(tiny_suite_file, "features", **BOTH)
    pick(app, 3, 7)
    assert app.session_state["selection"].picked == (3, 7)
    for field, value in (("colour", "model"), ("layer", "block 1"), ("map", "PCA"), ("every", True)):
        control(app, field).set_value(value).run()
        assert healthy(app)
        assert picked(app) == [3, 7]
        assert {name: one["selectedpoints"] for name, one in clouds(app).items()} == {name: [3, 7] for name in SHOWN}
    go(app, "cosines")
    go(app, "features")
    assert picked(app) == [3, 7]
    control(app, "task").set_value("signs").run()
    assert picked(app) == []
    assert all("selectedpoints" not in one for one in clouds(app).values())


def test_what_a_late_browser_still_sends_undoes_nothing(tiny_suite_file: Path) -> None:
    app = opened(tiny_suite_file, "features", picked="5", **BOTH)
    (old,) = [one for one in app.multiselect if name_of(one) == "features-picked"]
    app.session_state["selection"] = app.session_state["selection"].change(picked=(2, 3))  # as a lasso does it
    app.run()
    assert picked(app) == [2, 3]
    (new,) = [one for one in app.multiselect if name_of(one) == "features-picked"]
    assert new.key != old.key
    sent = app._tree.get_widget_states()
    sent.widgets.append(old.set_value([])._widget_state)
    app._run(sent)
    assert picked(app) == [2, 3]
    pick(app, 7)
    assert picked(app) == [7]
    (used,) = [one for one in app.multiselect if name_of(one) == "features-picked"]
    assert used.key == new.key  # one's own choice leaves the widget, and the keyboard's focus, where they are


def test_samples_of_an_address_are_lit(tiny_suite_file: Path) -> None:
    app = opened(tiny_suite_file, "features", picked="5,2,400", **BOTH)
    assert healthy(app)
    assert picked(app) == [5, 2, 400]  # beyond what was drawn: kept, since another n has it
    assert clouds(app)["expert"]["selectedpoints"] == [2, 5]


def test_a_lasso_gives_ids_whatever_traces_it_crosses(tiny_suite_file: Path) -> None:
    assert picking.ids_of(
        [{"customdata": 9}, {"customdata": 2}, {"customdata": 9}, {"x": 1.0}, {"customdata": None}]
    ) == (2, 9)
    assert picking.ids_of([]) == ()
    assert len(picking.ids_of([{"customdata": one} for one in range(1000)])) == picking.MOST_PICKED
    app = opened(tiny_suite_file, "features", **BOTH)
    chart = app.get("plotly_chart")[0].proto
    assert set(chart.selection_mode) == {0, 1, 2}  # points, box, lasso
    tools = [one for group in json.loads(chart.config)["modeBarButtons"] for one in group]
    assert {"lasso2d", "select2d", "pan2d"} <= set(tools)
    assert figure(app)["layout"]["dragmode"] == "lasso"


def test_every_task_has_a_small_map(tiny_suite_file: Path) -> None:
    app = opened(tiny_suite_file, "features", layer="block 0", **BOTH)
    before = charts(app)
    control(app, "every").set_value(True).run()
    assert healthy(app)
    assert charts(app) == before + 1
    small = figure(app, before)
    assert [one["text"] for one in small["layout"]["annotations"]][:2] == ["<b>pets</b>", "signs"]
    samples = {(one["xaxis"], one["name"]): len(one["customdata"]) for one in small["data"]}
    assert samples == {(axis, name): 12 for axis in ("x", "x2") for name in SHOWN}
    assert "pets" in said(app, "Trustworthiness: ")[0]


def test_samples_beyond_what_a_map_holds_are_drawn_and_said(
    tiny_suite_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures_maps, "MOST_POINTS", 15)
    app = opened(tiny_suite_file, "features", n="11", **BOTH)  # whose clouds no other test has made
    assert healthy(app)
    drawn = figures_maps.draw_points(11, 3)
    assert len(drawn) == 5
    assert {name: list(one["customdata"]) for name, one in clouds(app).items()} == dict.fromkeys(SHOWN, drawn)
    assert said(app, "5 of 11 samples are on the map, drawn with seed 42")
    pick(app, drawn[1], next(i for i in range(11) if i not in drawn))
    assert clouds(app)["merged"]["selectedpoints"] == [1]
    assert not said(opened(tiny_suite_file, "features", n="4", **BOTH), "samples are on the map, drawn")


@pytest.mark.parametrize(
    ("future", "said"),
    [
        ("made", "This is the UMAP."),
        ("waited for", "Showing PCA while UMAP is computed"),
        ("failed", "UMAP failed on these features; this is PCA."),
    ],
)
def test_a_map_says_what_it_is_before_it_is_drawn(future: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spoken: list[str] = []
    for name in ("caption", "warning"):
        monkeypatch.setattr(st, name, lambda text, **_: spoken.append(text))
    monkeypatch.setattr(st, "button", lambda *_, on_click, **__: on_click())
    monkeypatch.setattr(state, "selection", PageSelection)
    forgotten: list[str] = []
    job: Future[list[maps.Points]] = Future()
    if future == "made":
        job.set_result([])
    elif future == "failed":
        job.set_exception(ValueError())
    cloud._say_which_map(job, cloud._axes(job, "UMAP"), lambda: forgotten.append(future))
    assert len(spoken) == 1
    assert spoken[0].startswith(said)
    assert forgotten == ["failed"] * (future == "failed")


def test_a_umap_that_failed_is_made_again_when_asked(tiny_suite_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both the task's map and the small ones, once the process that died has a successor."""
    failed: Future[list[maps.Points]] = Future()
    failed.set_exception(RuntimeError("the map process ended"))
    with monkeypatch.context() as patched:
        patched.setattr(InstantMaps, "submit", lambda *_: failed)
        app = opened(tiny_suite_file, "features", n="7", **BOTH)  # whose maps no other test has made
        control(app, "every").set_value(True).run()
        assert [one.value for one in app.warning] == ["UMAP failed on these features; this is PCA."]
        assert not said(app, "UMAP 1 across")
        assert [one.label for one in app.button].count("Compute the UMAP again") == 2
    app.button(key="umap-again").click().run()
    assert healthy(app)
    assert not app.warning
    assert said(app, "This is the UMAP.")
    assert said(app, "UMAP 1 across")


def test_only_a_wanted_map_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[object] = []
    monkeypatch.setattr(st, "fragment", lambda look, run_every: waited.append(run_every) or look)
    monkeypatch.setattr(state, "selection", PageSelection)
    drawn: list[str] = []
    job: Future[list[maps.Points]] = Future()
    cloud._draw_until_there(job, "PCA", lambda: drawn.append("PCA"))
    assert (drawn, waited) == (["PCA"], [])
    cloud._draw_until_there(job, "UMAP", lambda: drawn.append("PCA in place of UMAP"))
    assert (drawn, waited) == (["PCA", "PCA in place of UMAP"], [cloud.POLL_SECONDS])
    job.set_result([])
    cloud._draw_until_there(job, "UMAP", lambda: drawn.append("UMAP"))
    assert (drawn[2:], len(waited)) == (["UMAP"], 1)


def field(app: AppTest, label: str) -> Any:
    return next(one for one in app.text_input if one.label == label)


def test_words_that_are_searched_for_select_samples(tiny_suite_file: Path) -> None:
    app = opened(tiny_suite_file, "features", n="8", **BOTH)
    session = open_session(str(tiny_suite_file), resident=True)
    data = session.viewable_samples(session.tasks[0], EvaluationSamples(8))
    answers = answer_column(data)
    assert answers is not None
    models = {name: session.resolve(name) for name in ("merged", "base")}
    frame = sample_table(data, measured_samples(session, models, session.tasks[0], EvaluationSamples(8)), *models)
    expected = find_samples(frame, answers[3].upper())
    assert 3 in expected
    field(app, "Search").set_value(answers[3].upper()).run()
    assert healthy(app)
    assert picked(app) == expected
    assert said(app, f"{len(expected)} of 8 samples have it")
    field(app, "Search").set_value("5").run()
    assert picked(app) == [5]
    field(app, "Search").set_value("nothing at all").run()
    assert picked(app) == []


def test_the_neighbours_of_a_picked_point_are_those_of_the_full_space(tiny_suite_file: Path) -> None:
    app = opened(tiny_suite_file, "features", n="16", **BOTH)
    assert not [one for one in app.dataframe if "nearest" in one.value]
    pick(app, 2)
    table = next(one.value for one in app.dataframe if "nearest" in one.value).set_index("model")
    session = open_session(str(tiny_suite_file), resident=True)
    shown = FeatureMaps(session, {name: session.resolve(name) for name in SHOWN}, EvaluationSamples(16))
    near = {}
    for name, own in shown.features(session.tasks[0], "head")["head"].items():
        unit = own.double().numpy() / np.linalg.norm(own.double().numpy(), axis=1, keepdims=True)
        order = np.argsort(-(unit @ unit[2]), kind="stable")
        near[name] = [int(one) for one in order if one != 2][: cloud.NEIGHBOURS]
        assert table.loc[name, "nearest"] == ", ".join(map(str, near[name]))
        assert table.loc[name, "shared"] == len({*near[name]} & {*near["expert"]})
    button(app, "Select all of them").click().run()
    assert healthy(app)
    assert picked(app) == sorted({2, *near["expert"], *near["merged"], *near["base"]})


def test_points_are_coloured_by_any_column_of_the_samples(tiny_suite_file: Path) -> None:
    app = opened(tiny_suite_file, "features", n="8", **BOTH)
    offered = control(app, "colour").options
    assert offered[:2] == ["model", "class"] or offered[:3] == ["model", "flip", "class"]
    session = open_session(str(tiny_suite_file), resident=True)
    drift = session.measure.features("merged", EvaluationSamples(8)).tasks[session.tasks[0]].layers[-1].drift
    control(app, "colour").set_value("merged drift").run()
    assert healthy(app)
    for trace in clouds(app).values():
        np.testing.assert_allclose(numbers(trace["marker"]["color"]), drift.numpy())
    assert figure(app)["layout"]["coloraxis"]["colorbar"]["title"]["text"] == "merged drift"
    control(app, "colour").set_value("class").run()
    assert len(set(clouds(app)["merged"]["marker"]["color"])) > 1


def test_a_sheet_has_every_picture_in_its_place() -> None:
    session = open_session("clip-mini")
    data = session.viewable_samples(session.tasks[0], EvaluationSamples(6))
    assert data.images is not None
    address, columns = hover.picture_sheet(data)
    kind, _, content = address.partition(",")
    assert (kind, columns) == ("data:image/jpeg;base64", 3)
    sheet = Image.open(io.BytesIO(base64.b64decode(content)))
    assert sheet.size == (3 * 64, 2 * 64)
    for place in range(6):
        x, y = place % 3 * 64, place // 3 * 64
        there = np.asarray(sheet.crop((x, y, x + 64, y + 64))).astype(float)
        one = np.asarray(Image.fromarray(np.asarray(data.images[place])).convert("RGB").resize((64, 64))).astype(float)
        assert np.abs(there - one).mean() < 12

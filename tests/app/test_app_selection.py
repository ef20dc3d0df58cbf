"""One selection on all pages: picked samples are marked by their ids, and the bar counts what became of them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qsl, urlencode

import numpy as np
import pytest
import streamlit as st
from app_pages import button, control, go, healthy, opened
from hypothesis import example, given
from hypothesis import strategies as made_of
from lanes import rows
from streamlit.testing.v1 import AppTest
from tiny_clip import TASKS

from app import picking, samples, state
from app.selection import HOME, from_query
from featcal.samples.sources import Samples
from featcal.session.session import open_session
from featcal.suite.views import EvaluationSamples

pytestmark = [pytest.mark.usefixtures("instant_maps"), pytest.mark.filterwarnings("ignore")]
PICKED = [2, 5, 7]
CHOSEN = {"beside": "calibrated", "tab": "Decisions", "task": TASKS[1], "picked": ",".join(map(str, PICKED))}
LIT = {
    "cosines": {"a sample"},
    "features": {"expert", "merged", "calibrated"},
    "drift": {"merged", "calibrated"},
}
"""Page → traces of samples."""


def scatters(app: AppTest) -> list[dict[str, Any]]:
    """Charts whose points are samples: their traces by name."""
    drawn = [json.loads(one.proto.spec)["data"] for one in app.get("plotly_chart") if 2 in one.proto.selection_mode]
    return [{one["name"]: one for one in traces} for traces in drawn]


def lit(traces: dict[str, Any]) -> dict[str, list[int]]:
    """The ids of lit samples, by trace."""
    samples = {name: one for name, one in traces.items() if "customdata" in one}
    return {name: [one["customdata"][i] for i in one["selectedpoints"]] for name, one in samples.items()}


def bar(app: AppTest) -> str:
    (said,) = [one.value for one in app.markdown if re.match(r"\*\*\d+\*\* of .* selected", one.value)]
    return said


def kinds(suite: Path) -> list[str]:
    """Return the flip of every validation sample from merged to calibrated, made of scores alone."""
    session, on = open_session(str(suite)), EvaluationSamples(64)
    was, now = (
        session.measure.scores(session.resolve(one), on).tasks[TASKS[1]] for one in ("merged", "calibrated:samples=64")
    )
    names = {(0, 1): "fixed", (1, 0): "broken", (1, 1): "both right", (0, 0): "both wrong"}
    pairs = zip(was.predictions == was.labels, now.predictions == now.labels, strict=True)
    return [names[int(a), int(b)] for a, b in pairs]


def expected_bar(suite: Path, picked: list[int]) -> str:
    found = kinds(suite)
    count = {kind: (sum(found[i] == kind for i in picked), found.count(kind)) for kind in found}
    fixed, broken, right, wrong = (count.get(kind, (0, 0)) for kind in ("fixed", "broken", "both right", "both wrong"))
    return (
        f"**{len(picked)}** of {len(found)} validation samples of {TASKS[1]} selected · merged → "
        f"calibrated: **{fixed[0]}** of all {fixed[1]} fixed samples, **{broken[0]}** of all {broken[1]} broken ones · "
        f"{right[0]} both right, {wrong[0]} both wrong"
    )


@pytest.mark.slow
def test_samples_that_are_picked_are_lit_on_every_page_and_counted(tiny_suite_file: Path) -> None:
    expected = expected_bar(tiny_suite_file, PICKED)
    app = opened(tiny_suite_file, "verdict", **CHOSEN)
    for page in ("verdict", "drift", "features", "cosines", "accuracy", "calibrate"):
        if page != "verdict":
            go(app, page)
        assert healthy(app)
        assert bar(app) == expected, page
        tables = [
            one.value
            for one in app.dataframe
            if {"base", "sample"} <= {*one.value} and one.value["sample"].tolist() == PICKED
        ]
        assert len(tables) == (page in ("features", "accuracy")), page  # elsewhere folded, and not made
        for table in tables:
            first = [name for name in table if name in ("base", "merged", "calibrated", "expert")]
            assert list(table)[4:8] == first, page  # beside the right answer
        found = scatters(app)
        assert len(found) == (page in LIT), page
        for traces in found:
            assert lit(traces) == dict.fromkeys(LIT[page], PICKED), page
            assert len(traces["selected"]["x"]) == len(PICKED) * len(LIT[page]), page
    button(app, "Clear the selection").click().run()
    for page in ("calibrate", "drift", "features", "cosines", "accuracy"):
        go(app, page)
        assert healthy(app)
        assert not [one for one in app.markdown if " selected" in one.value]
        assert all("selectedpoints" not in one for traces in scatters(app) for one in traces.values())
        assert all("selected" not in traces for traces in scatters(app))


def test_a_widget_that_was_replaced_meanwhile_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A browser that has not seen yet what a button changed sends the old slider's value with its next request."""
    kept: dict[str, Any] = {}
    monkeypatch.setattr(st, "session_state", kept)
    monkeypatch.setattr(st, "query_params", SimpleNamespace(to_dict=dict))
    moves: list[Callable[[int], None]] = []

    def draw(label: str, value: int, *, key: str, on_change: Callable[..., None], args: tuple[Any, ...]) -> int:
        def move(to: int) -> None:
            kept[key] = to
            on_change(*args)

        moves.append(move)
        return value

    state.begin_page("drift", st.container())
    for n in (64, 16):  # drawn, then changed by something else and drawn again
        state.look_at(n=n)
        state.control(draw, "n", n, 64, "Samples")
    old, new = moves
    old(32)
    assert state.selection().n == 16
    new(32)
    assert state.selection().n == 32


@pytest.mark.parametrize(("page", "chart"), [("cosines", "b"), ("drift", "margins"), ("features", "feature-map")])
def test_a_lasso_picks_on_every_scatter(page: str, chart: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: dict[str, Any] = {}
    monkeypatch.setattr(st, "session_state", kept)
    monkeypatch.setattr(st, "query_params", SimpleNamespace(to_dict=dict))
    state.begin_page(page, st.container())
    kept[chart] = SimpleNamespace(selection=SimpleNamespace(points=[{"customdata": 9}, {"customdata": 2}, {"x": 1}]))
    picking._pick(chart)
    assert (state.selection().picked, state.selection().picked_of) == ((2, 9), None)
    kept[chart] = SimpleNamespace(selection=SimpleNamespace(points=[]))  # as a chart that is drawn anew says
    picking._pick(chart)
    assert state.selection().picked == (2, 9)


def test_samples_of_test_are_not_lit_among_others_and_are_counted_by_their_own_scores(tiny_suite_file: Path) -> None:
    app = opened(tiny_suite_file, "cosines", **CHOSEN, picked_of="test")
    assert healthy(app)
    (traces,) = scatters(app)
    assert all("selectedpoints" not in one for one in traces.values())
    assert bar(app).startswith(f"**3** of 12 test samples of {TASKS[1]} selected")


@pytest.mark.slow
def test_samples_of_validation_are_shown_with_what_all_models_say_beside_test_scores(tiny_suite_file: Path) -> None:
    app = opened(tiny_suite_file, "accuracy", **CHOSEN, n="8")
    assert healthy(app)
    (table,) = [one.value for one in app.dataframe if "merged margin" in one.value and len(one.value) == len(PICKED)]
    assert table["sample"].tolist() == PICKED
    session, on = open_session(str(tiny_suite_file)), EvaluationSamples(8)
    names = session.viewable_samples(TASKS[1], on).class_names
    assert names is not None
    models = {"base": "base", "merged": "merged", "calibrated": "calibrated:samples=64", "expert": "expert"}
    for shown, model in models.items():
        found = session.measure.scores(session.resolve(model), on).tasks[TASKS[1]].predictions
        assert table[shown].tolist() == [names[int(found[i])] for i in PICKED], shown


@pytest.mark.parametrize(("count", "drawn", "more"), [(3, 3, []), (20, 16, ["and 4 more"])])
def test_the_bar_has_small_pictures_of_the_first_samples(
    count: int, drawn: int, more: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[Any] = []
    said: list[str] = []
    monkeypatch.setattr(
        st, "image", lambda pictures, **options: shown.extend(zip(pictures, options["alt"], strict=True))
    )
    monkeypatch.setattr(st, "caption", said.append)
    data = Samples("t", "test", {}, None, tuple(range(30)), None, [np.full((2, 2, 3), i, np.uint8) for i in range(30)])
    samples._thumbnails(data, range(5, 5 + count))
    assert [(int(picture[0, 0, 0]), alt) for picture, alt in shown] == [
        (i, f"Picture of sample {i}") for i in range(5, 5 + drawn)
    ]
    assert said == more


def test_the_bar_says_the_beginnings_of_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(st, "caption", said.append)
    texts = tuple(f"text {i} " + "word " * 30 for i in range(9))
    samples._thumbnails(Samples("t", "test", {}, None, tuple(range(9)), None, None, texts), [1, 4, 7])
    (line,) = said
    assert [part.split(" word")[0] for part in line.split(" · ")] == ["text 1", "text 4", "and 1 more"]
    assert len(line) < 150


def test_a_point_says_what_every_model_says_of_it(tiny_suite_file: Path) -> None:
    app = opened(tiny_suite_file, "cosines", **CHOSEN)
    session, on = open_session(str(tiny_suite_file)), EvaluationSamples(64)
    data = session.viewable_samples(TASKS[1], on)
    assert data.class_names is not None
    assert data.labels is not None
    said = scatters(app)[0]["a sample"]["text"]
    scores = session.measure.scores("merged", on).tasks[TASKS[1]]
    for i, text in enumerate(said):
        first, *models = text.split("<br>")
        assert first == f"<b>{data.class_names[int(data.labels[i])]}</b>"
        right = "✓" if scores.predictions[i] == data.labels[i] else "✗"
        assert f"merged: {data.class_names[int(scores.predictions[i])]} {right}" in models
        assert {"calibrated", "expert"} <= {one.split(":")[0] for one in models}


@pytest.mark.parametrize(
    "page", rows(["features", "cosines", "drift"], quick=[], slow=["features", "cosines", "drift"])
)
def test_a_slice_becomes_the_selection(tiny_suite_file: Path, page: str) -> None:
    session, on = open_session(str(tiny_suite_file)), EvaluationSamples(64)
    data, found = session.viewable_samples(TASKS[1], on), kinds(tiny_suite_file)
    assert data.class_names is not None
    assert data.labels is not None
    margin = session.measure.margins(session.resolve("calibrated:samples=64"), on)[TASKS[1]]
    low = sorted(range(len(data)), key=lambda i: float(margin[i]))[: len(data) // 2]
    app = opened(tiny_suite_file, page, beside="calibrated", task=TASKS[1], tab="Decisions")
    name = data.class_names[int(data.labels[low[0]])]
    of_class = [i for i in sorted(low) if data.class_names[int(data.labels[i])] == name]
    wrong = [i for i in of_class if found[i] in ("fixed", "both wrong")]
    for field, value in (("slice_class", name), ("slice_margin", "lowest half")):
        control(app, field).set_value(value).run()
    for answers, ids in (("any", of_class), ("merged wrong", wrong)):
        control(app, "slice_answers").set_value(answers).run()
        assert healthy(app)
        select = button(app, "Select these")
        assert select.label == f"Select these {len(ids)}"
        assert select.disabled == (not ids)
    control(app, "slice_answers").set_value("any").run()
    button(app, "Select these").click().run()
    assert healthy(app)
    assert app.session_state["selection"].picked == tuple(of_class)
    (traces,) = scatters(app)
    assert lit(traces) == dict.fromkeys(LIT[page], of_class)


@pytest.mark.parametrize(
    ("on", "long", "taken"),
    [
        (EvaluationSamples(3), False, ["base", "merged", "expert"]),
        (EvaluationSamples(3), True, []),  # where it would take long
        (EvaluationSamples(None, "test"), False, []),  # a look at the test split, which is counted elsewhere
    ],
)
def test_the_bar_measures_what_is_quick_and_never_the_test_split(
    on: EvaluationSamples, long: bool, taken: list[str], tiny_suite_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = open_session(str(tiny_suite_file), resident=True)
    found: list[str] = []
    monkeypatch.setattr(samples, "is_long", lambda *_: long)
    monkeypatch.setattr(samples, "measure_samples", lambda _, models, view: found.extend(models))
    samples._measure_if_quick(session, {"merged": session.resolve("merged")}, on)
    assert found == taken


@given(
    made_of.lists(
        made_of.text("al,:%+@=& -'\n\u3000é", min_size=1).filter(str.strip), min_size=1, max_size=4, unique=True
    )
)
@example(["a,b", "c"])
@example(["all"])
def test_names_go_both_ways_in_an_address(names: list[str]) -> None:
    chosen = HOME.change(tasks=tuple(names), task=names[0], merge=f"expert:{names[0]}", picked=(3, 1))
    address = urlencode(chosen.to_query())
    assert from_query(dict(parse_qsl(address, keep_blank_values=True))) == (chosen, [])

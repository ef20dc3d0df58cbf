"""What the app shows of single samples: flips in a table, selected samples on any page, differences with intervals."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from html import unescape
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import streamlit as st
from app_pages import button, charts, control, healthy, opened
from streamlit.testing.v1 import AppTest
from tiny_clip import TASKS
from tiny_text import TASKS as TEXT_TASKS
from tiny_text import write_text_suite

from app import samples, state, view
from app.ledger_view import TOKENS
from app.selection import HOME, MOST_PICKED, PageSelection, from_query
from featcal.figures.sample_tables import FLIPS
from featcal.samples.sources import Samples
from featcal.session.model_ref import MERGED
from featcal.session.session import Session, open_session
from featcal.suite.views import EvaluationSamples

pytestmark = [pytest.mark.usefixtures("instant_maps"), pytest.mark.filterwarnings("ignore")]
WHOLE = EvaluationSamples(None, "test")


def scored(suite: Path, **query: str) -> AppTest:
    """The Accuracy page with both models scored."""
    app = opened(suite, "accuracy", beside="calibrated", **query)
    if any(one.label.endswith("on the test split") for one in app.button):
        button(app, "on the test split").click().run()
    assert healthy(app)
    return app


def frame_with(app: AppTest, *columns: str) -> pd.DataFrame:
    """The first table of a page that has these columns."""
    return next(one.value for one in app.dataframe if {*columns} <= {*one.value})


def flips_of(suite: Path, task: str) -> list[str]:
    """What became of a task's test samples from merged to calibrated, of scores alone."""
    session = open_session(str(suite))
    before, after = (
        session.measure.scores(session.resolve(one), WHOLE).tasks[task] for one in ("merged", "calibrated:samples=64")
    )
    names = {(False, True): "fixed", (True, False): "broken", (True, True): "both right", (False, False): "both wrong"}
    pairs = zip(before.predictions == before.labels, after.predictions == after.labels, strict=True)
    return [names[bool(was), bool(now)] for was, now in pairs]


@pytest.mark.slow
def test_every_difference_of_scores_has_its_interval(tiny_suite_file: Path) -> None:
    app = scored(tiny_suite_file)
    session = open_session(str(tiny_suite_file))
    found = session.measure.compare("merged", session.resolve("calibrated:samples=64"), WHOLE)
    table = frame_with(app, "from", "to", "McNemar p")
    columns = [*table.columns]
    assert columns.index("within noise") == columns.index("McNemar p") + 1  # beside what it is about, and seen
    for row, task in zip(table.to_dict("records")[:-1], TASKS, strict=True):
        one = found.tasks[task]
        assert (row["from"], row["to"], row["McNemar p"]) == pytest.approx((100 * one.low, 100 * one.high, one.p))
        assert bool(row["within noise"]) == one.is_within_noise
    card = app.metric[0]
    assert card.label == "Accuracy, test"
    assert card.proto.delta_description.endswith(", within noise)")
    assert card.proto.color == type(card.proto).MetricColor.GRAY
    assert found.average.is_within_noise
    assert charts(app) == 2


@pytest.mark.slow
def test_flips_can_be_filtered_and_sorted(tiny_suite_file: Path) -> None:
    expected = flips_of(tiny_suite_file, TASKS[1])
    app = scored(tiny_suite_file, task=TASKS[1])
    for show, kinds in {"flipped": FLIPS[:2], "fixed": FLIPS[:1], "unchanged": FLIPS[2:], "all": FLIPS}.items():
        if show != "flipped":
            control(app, "flips").set_value(show).run()
        assert healthy(app)
        ids = [i for i, flip in enumerate(expected) if flip in kinds]
        assert frame_with(app, "flip")["sample"].tolist() == ids
    if any(one.label.startswith("Measure margin") for one in app.button):  # unless a test before did
        button(app, "Measure margin").click().run()
    control(app, "sort").set_value("calibrated drift").run()
    drift = frame_with(app, "flip")["calibrated drift"].tolist()
    assert drift == sorted(drift, reverse=True)
    assert len(drift) == len(expected)
    measured = open_session(str(tiny_suite_file)).measure.features("merged", WHOLE).tasks[TASKS[1]]
    shown = frame_with(app, "flip").sort_values("sample")
    assert shown["merged drift"].tolist() == pytest.approx(measured.layers[-1].drift.tolist())


@pytest.mark.slow
def test_picked_samples_show_what_every_model_says(tiny_suite_file: Path) -> None:
    expected = flips_of(tiny_suite_file, TASKS[1])
    flipped = [i for i, flip in enumerate(expected) if flip in FLIPS[:2]]
    picked = [flipped[0], next(i for i, flip in enumerate(expected) if flip == "both wrong"), 99]
    app = scored(tiny_suite_file, task=TASKS[1], picked=",".join(map(str, picked)), picked_of="test", flips="all")
    said = next(one.value for one in app.markdown if "selected" in one.value)
    assert said.startswith(f"**2** of 12 test samples of {TASKS[1]} selected · ")
    assert " · merged → calibrated: " in said
    assert f"of all {expected.count('fixed')} fixed samples" in said
    assert said.endswith(" broken ones · 0 both right, 1 both wrong")
    tables = [one.value for one in app.dataframe if "flip" in one.value]
    assert tables[-1]["sample"].tolist() == sorted(picked[:2])
    assert {"base", "merged", "calibrated", "expert", "right"} <= {*tables[-1]}
    button(app, "Clear the selection").click().run()
    assert healthy(app)
    assert not [one for one in app.markdown if "selected" in one.value]


def panel_alone(suite: str, models: dict[str, str], task: str, n: int, picked: tuple[int, ...]) -> None:
    """A page that is a panel and nothing else."""
    import streamlit as st

    from app import samples, state
    from featcal.session.session import open_session

    state.begin_page("panel", st.container())
    if "chosen" not in st.session_state:
        state.look_at(task=task, n=n, picked=picked)
        st.session_state["chosen"] = True
    session = open_session(suite)
    samples.panel(session, {shown: session.resolve(one) for shown, one in models.items()}, details=True)


def test_a_panel_measures_what_it_shows(tiny_suite_file: Path) -> None:
    given = {"suite": str(tiny_suite_file), "models": {"merged": "merged"}, "task": TASKS[0], "n": 5}
    app = AppTest.from_function(panel_alone, kwargs={**given, "picked": (4, 0, 7)}, default_timeout=60).run()
    assert healthy(app)
    table = app.dataframe[0].value
    assert table["sample"].tolist() == [4, 0]
    session = open_session(str(tiny_suite_file))
    task = session.measure.features("merged", EvaluationSamples(5)).tasks[TASKS[0]]
    assert table["merged cosine"].tolist() == pytest.approx(task.cosine[[4, 0]].tolist())
    margins = session.measure.margins("base", EvaluationSamples(5))[TASKS[0]]
    assert table["base margin"].tolist() == pytest.approx(margins[[4, 0]].tolist())
    assert "expert margin" in table
    assert "flip" not in table
    scores = session.measure.quick_scores("merged", EvaluationSamples(5)).tasks[TASKS[0]]
    right = int((scores.predictions == scores.labels)[[4, 0]].sum())
    said = (
        f"**2** of 5 validation samples of {TASKS[0]} selected · **{right}** right, **{2 - right}** wrong with merged"
    )
    assert said in [one.value for one in app.markdown]
    button(app, "Clear the selection").click().run()
    assert not [*app.markdown, *app.dataframe, *app.caption, *app.button]


@pytest.mark.slow
def test_a_panel_of_text_counts_first_tokens_until_models_answer(tmp_path: Path) -> None:
    file = write_answered(tmp_path / "text")
    session = open_session(str(file))  # held as the app holds it, with its results
    models = {"merged": "merged", "half": "task-arithmetic:scale=0.5"}
    given = {"suite": str(file), "models": models, "task": TEXT_TASKS[0], "n": 6, "picked": (1, 2)}
    app = AppTest.from_function(panel_alone, kwargs=given, default_timeout=60).run()
    assert healthy(app)
    assert any("first token" in one.value for one in app.caption)
    assert {"merged right", "expert right", "right", "text"} <= {*app.dataframe[0].value}
    button(app, "answer in full").click().run()
    assert healthy(app)
    table = app.dataframe[0].value
    said = session.measure.scores("merged", EvaluationSamples(6)).tasks[TEXT_TASKS[0]].predictions
    assert table["merged"].tolist() == [said[1], said[2]]
    assert not any("first token" in one.value for one in app.caption)
    assert [one.value for one in app.text] == list(
        session.viewable_samples(TEXT_TASKS[0], EvaluationSamples(6)).texts or ()
    )[1:3]


@pytest.mark.slow
def test_tokens_of_a_text_stand_in_their_order_by_model_and_part(tmp_path: Path) -> None:
    """The decoder's and the encoder's, words shown as they are; after the head there are none."""
    app = opened(
        write_answered(tmp_path / "text"), beside="base", tab=TOKENS, sample="2", n="6", layer="decoder block 1"
    )
    assert healthy(app)
    shown = [one.proto.body for one in app.get("html") if 'class="marked-tokens"' in one.proto.body]
    words = [[unescape(word) for word in re.findall(r">([^<]*)</span>", one)] for one in shown]
    assert words == 2 * [["<pad>", "yes"], ["w0", "w2", "w4", "<unk>", "<unk>", "</s>"]]
    assert len({*shown}) == 4
    control(app, "layer").set_value("head").run()
    assert healthy(app)
    assert not any('class="marked-tokens"' in one.proto.body for one in app.get("html"))
    assert any("one feature and no tokens" in one.value for one in app.caption)


def write_answered(folder: Path) -> Path:
    """A suite of a tiny language model whose samples are sentences with answers."""
    import yaml

    file = write_text_suite(folder, "t5")
    content = yaml.safe_load(file.read_text())
    rows = [{"text": f"w{i} w{2 * i} * #", "answer": "yes" if i % 3 else "no"} for i in range(8)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for task in TEXT_TASKS:
        for split in ("calibration", "validation", "test"):
            content["tasks"][task][split] = {"jsonl": "rows.jsonl", "input": "w0 {text}", "target": "{answer}"}
        content["tasks"][task] |= {"max_target_length": 3}
    file.write_text(yaml.safe_dump(content))
    return file


@pytest.fixture
def visit(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A session's state without streamlit's runtime; what a table was drawn with is in "drawn"."""
    kept: dict[str, Any] = {}
    monkeypatch.setattr(st, "session_state", kept)
    monkeypatch.setattr(st, "query_params", SimpleNamespace(to_dict=dict))
    monkeypatch.setattr(st, "dataframe", lambda frame, **options: kept.update(drawn=options))
    monkeypatch.setattr(st, "download_button", lambda *args, **options: None)
    state.begin_page("accuracy", st.container())
    return kept


def select_rows(visit: dict[str, Any], *rows: int) -> None:
    """As the browser does it: the widget's state, then its callback."""
    drawn = visit["drawn"]
    visit[drawn["key"]] = SimpleNamespace(selection=SimpleNamespace(rows=list(rows)))
    on_select: Callable[[], None] = drawn["on_select"]
    on_select()


def test_a_browser_rounds_halves_of_scores_as_charts_do(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[pd.DataFrame] = []
    monkeypatch.setattr(st, "dataframe", lambda frame, **options: drawn.append(frame))
    monkeypatch.setattr(view, "csv", lambda numbers: None)
    frame = pd.DataFrame({"merged": [60.15, 60.1499], "McNemar p": [0.05, 0.5], "mean, %": [6.25, 2.65]})
    for digits in (1, 3):
        view.show_table(samples.Numbers("scores", frame, "", samples.downloads.Origin("s", "test", {}), digits))
    assert [one.to_dict("list") for one in drawn] == [
        {"merged": merged, "McNemar p": [0.05, 0.5], "mean, %": [6.25, 2.7]}
        for merged in ([60.2, 60.1499], [60.15, 60.1499])
    ]


def test_rows_and_picked_samples_are_one(visit: dict[str, Any]) -> None:
    def table(*ids: int) -> dict[str, Any]:
        frame = pd.DataFrame({"sample": ids})
        samples.show_sample_table(
            samples.Numbers("flips", frame, "", samples.downloads.Origin("s", "test", {"t": 9})), "test"
        )
        drawn: dict[str, Any] = visit["drawn"]
        return drawn

    first = table(5, 2, 8)
    assert first["selection_default"] == {"selection": {"rows": []}}
    select_rows(visit, 0, 2)
    assert (state.selection().picked, state.selection().picked_of) == ((5, 8), "test")
    assert table(5, 2, 8)["key"] == first["key"]  # the same table: it keeps its place
    filtered = table(2, 8)
    assert filtered["key"] != first["key"]
    assert filtered["selection_default"] == {"selection": {"rows": [1]}}
    select_rows(visit, 0)
    assert state.selection().picked == (2, 5)  # 5 is not shown here, so it stays
    table(2, 8)
    samples.pick_samples([])
    assert (state.selection().picked, state.selection().picked_of) == ((), None)
    cleared = table(2, 8)
    assert cleared["key"] != filtered["key"]
    assert cleared["selection_default"] == {"selection": {"rows": []}}


def test_no_more_are_picked_than_an_address_holds(visit: dict[str, Any]) -> None:
    samples.pick_samples(range(1000), "test")
    assert state.selection().picked == tuple(range(MOST_PICKED))
    again, problems = from_query(state.selection().to_query())
    assert (again, problems) == (state.selection(), [])


def test_what_is_picked_belongs_to_its_split() -> None:
    of_test = HOME.change(picked=(1, 2), picked_of="test")
    assert of_test.change(picked=(3,)) == HOME.change(picked=(3,))
    assert of_test.change(lam=0.1).picked_of == "test"
    assert of_test.change(task="x") == PageSelection(task="x")
    assert of_test.change(suite="x") == PageSelection(suite="x")


def test_known_is_what_was_measured(tiny_suite_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from featcal.family.opening import open_family
    from featcal.suite.schema import load_suite

    session = Session(open_family(load_suite(tiny_suite_file), "cpu"))
    models = {"merged": MERGED}
    nothing = samples.measured_samples(session, models, TASKS[0], EvaluationSamples(4))["merged"]
    assert (nothing.answers, nothing.margin, nothing.drift) == (None, None, None)
    session.measure.scores("merged", EvaluationSamples(4))
    answered = samples.measured_samples(session, models, TASKS[0], EvaluationSamples(4))["merged"]
    assert answered.answers is not None
    assert answered.drift is None
    session.measure.features("merged", EvaluationSamples(4))
    monkeypatch.setattr(samples, "is_long", lambda *_: True)  # as where heads would have to be made of many class names
    slow = samples.measured_samples(session, models, TASKS[0], EvaluationSamples(4))["merged"]
    assert slow.drift is not None
    assert slow.margin is None
    session.measure.quick_scores("merged", EvaluationSamples(4))
    walked = samples.measured_samples(session, models, TASKS[0], EvaluationSamples(4))["merged"]
    assert walked.answers == answered.answers
    assert walked.margin is not None
    assert walked.drift is not None
    assert (len(walked.margin), len(walked.drift)) == (4, 4)


def test_of_many_texts_the_first_are_shown_each_under_its_own_number(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(st, "caption", said.append)
    monkeypatch.setattr(st, "text", said.append)
    texts = tuple(f"text {i}" for i in range(9))
    data = Samples("t", "test", {}, None, tuple(range(9)), None, None, texts, texts)
    samples.gallery(data, pd.DataFrame({"sample": range(1, 9)}))
    assert said[:12] == [word for i in range(1, 7) for word in (f"sample {i}", f"text {i}")]
    assert said[12:] == ["The first 6 of 8 are shown; the table has all."]

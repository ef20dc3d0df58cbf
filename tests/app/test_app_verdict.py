"""The page that the app opens on: the lines of the command, what to do next, and what it keeps for the next start."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest
from app_pages import button, charts, control, healthy, opened, shown_model
from lanes import rows
from streamlit.testing.v1 import AppTest
from tiny_text import write_text_suite

from app import compare, first_page, jobs, ledger_view, verdict, view
from featcal.figures import ledger_tables, tables
from featcal.figures.names import plain
from featcal.figures.verdict import sentences
from featcal.figures.verdict.measure import diagnose_model
from featcal.figures.verdict.sentences import Verdict
from featcal.session.model_ref import ModelRef
from featcal.session.session import Session, open_session
from featcal.suite.views import DriftOptions, EvaluationSamples
from featcal.system.progress import Progress

pytestmark = [pytest.mark.usefixtures("instant_maps"), pytest.mark.filterwarnings("ignore")]  # streamlit warns a lot


def lines(app: AppTest) -> list[str]:
    """Every line of the verdict on the page."""
    listed = [one.value for one in app.markdown if one.value.startswith("- ")]
    said = [one.value for kind in ("markdown", "success", "caption") for one in app.get(kind)]
    assert not [line for line in said if " %" in line]  # on a narrow screen no sign stands alone in the next line
    listed = [line.replace("\u00a0", " ") for line in listed]
    shown = [line.removeprefix("- ").removeprefix("**").removesuffix("**") for line in listed]
    rest = [line.split(" Known of")[0].replace("\u00a0", " ") for line in said]
    return [*shown, *(one for one in rest if one.startswith(("Next: ", "Measured on")))]


def expected(found: Verdict) -> list[str]:
    return [plain(line) for line in found.lines]


@pytest.mark.parametrize("family", rows(("clip", "t5", "llama"), quick=["clip"], slow=["t5", "llama"]))
def test_the_page_says_what_the_command_says(family: str, tiny_suite_file: Path, tmp_path: Path) -> None:
    file = tiny_suite_file if family == "clip" else write_text_suite(tmp_path / "suite", family)
    app = opened(file, "verdict", n="8", rho="1.5", lam="0.05")
    assert healthy(app)
    assert charts(app) == 2
    session = open_session(str(file), resident=True)
    calibrated = "calibrated:rho=1.5,lam=0.05,samples=64"
    assert lines(app) == expected(diagnose_model(session, "merged", EvaluationSamples(8), calibrated))


STEPS = {
    sentences.REPAIR: ("Repair it", "Repair it in closed form"),
    sentences.CHECK: ("Check the experts", "What is loaded?"),
    sentences.NOTHING: (None, ""),
}


@pytest.mark.parametrize("step", STEPS)
def test_one_button_leads_to_what_is_next(tiny_suite_file: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    monkeypatch.setattr(verdict, "judge_numbers", lambda found: replace(sentences.judge_numbers(found), next=step))
    app = opened(tiny_suite_file, "verdict", n="8")
    primary = [one.label for one in app.button if one.proto.type == "primary"]
    label, header = STEPS[step]
    assert primary == ([label] if label else [])
    assert len(app.success) == (label is None)
    if label:
        button(app, label).click().run()
        assert healthy(app)
        assert header in app.title[0].value


@pytest.mark.slow
def test_another_merge_is_judged_by_its_name(tiny_suite_file: Path) -> None:
    app = opened(tiny_suite_file, "verdict", n="8", merge="ties:scale=1")
    assert healthy(app)
    session = open_session(str(tiny_suite_file), resident=True)
    found = diagnose_model(session, "ties:scale=1", EvaluationSamples(8), "calibrated:samples=64@ties:scale=1")
    assert lines(app) == expected(found)
    assert lines(app)[0].startswith(plain("ties:scale=1 keeps"))


def test_repair_it_repairs_the_merge_that_was_judged(tiny_suite_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        verdict, "judge_numbers", lambda found: replace(sentences.judge_numbers(found), next=sentences.REPAIR)
    )
    app = opened(tiny_suite_file, "verdict", n="8", samples="6", merge="ties:scale=1")
    session = open_session(str(tiny_suite_file), resident=True)
    found = diagnose_model(session, "ties:scale=1", EvaluationSamples(8), "calibrated:samples=6@ties:scale=1")
    assert lines(app)[:-2] == expected(found)[:-2]
    button(app, "Repair it").click().run()
    assert healthy(app)
    assert "Repair it in closed form" in app.title[0].value
    assert control(app, "merge").value == "ties:scale=1"
    assert shown_model(app) == "λ 0.05 · ρ 2 · α 0.3 · n 6"


def test_a_base_is_not_calibrated(tiny_suite_file: Path) -> None:
    app = opened(tiny_suite_file, "verdict", n="8", merge="base")
    assert healthy(app)
    assert not any("Calibrating" in line for line in lines(app))


@pytest.mark.slow
def test_work_that_takes_a_job_is_left_to_its_page(tiny_suite_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (verdict, jobs, compare):
        monkeypatch.setattr(module, "is_long", lambda session, seconds: True)
    monkeypatch.setattr(verdict, "seconds_to_calibrate", lambda session, config: 8000.0)
    app = opened(tiny_suite_file, "verdict", n="8")
    assert healthy(app)
    assert "The gain of calibration is not measured: it takes about 2.2 h" in " ".join(lines(app))
    taken: list[str] = []

    def take_over(session: Session, model: ModelRef, progress: Progress) -> None:
        taken.append(model.name)
        session.fit.calibrate(model, progress)

    monkeypatch.setattr(jobs, "is_quick_or_done", lambda session, model: True)
    monkeypatch.setattr(jobs, "ensure_calibrated", take_over)
    app = opened(tiny_suite_file, "verdict", n="8")  # the job is done: its result is taken over, not made again
    assert healthy(app)
    assert "is not measured" not in " ".join(lines(app))
    assert {*taken} == {taken[0]}


@pytest.mark.slow
def test_what_was_measured_opens_the_next_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEATCAL_CACHE", str(tmp_path / "cache"))
    first = opened("clip-mini", "verdict")
    assert healthy(first)
    kept = first_page.read_kept()
    assert kept is not None
    assert lines(first) == expected(kept.verdict)

    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("what is kept is not measured again")

    monkeypatch.setattr(verdict, "_measure", fail)
    again = opened("clip-mini", "verdict")
    assert (healthy(again), lines(again), charts(again)) == (True, lines(first), 2)


Pictures = list[tuple[str, str, go.Figure]]


@pytest.fixture
def pictures(monkeypatch: pytest.MonkeyPatch) -> Pictures:
    """Every chart that pages draw, with its key and its text, in the order in which they do."""
    drawn: Pictures = []
    picture = view.picture

    def noted(figure: go.Figure, key: str, alt: str, *rest: Any, **kwargs: Any) -> Any:
        drawn.append((key, alt, figure))
        return picture(figure, key, alt, *rest, **kwargs)

    monkeypatch.setattr(view, "picture", noted)
    return drawn


@pytest.mark.slow
@pytest.mark.parametrize("page", rows(("verdict", "drift"), quick=["verdict"], slow=["drift"]))
def test_weights_of_large_models_are_drawn_before_anything_is_measured(
    own_suite_file: Path, pictures: Pictures, monkeypatch: pytest.MonkeyPatch, page: str
) -> None:
    """Once, until what is measured takes their place; small models go without."""
    assert healthy(opened(own_suite_file, page, n="6"))
    assert "weights-first" not in [key for key, *_ in pictures]
    pictures.clear()
    monkeypatch.setattr(ledger_view, "SMALL", 0)
    app = opened(own_suite_file, page, n="7")
    assert healthy(app)
    assert not any(one.value.startswith("Weights alone") for one in app.caption)
    app.run()
    assert [key for key, *_ in pictures].index("weights-first") == 0
    assert [key for key, *_ in pictures].count("weights-first") == 1
    changes = open_session(str(own_suite_file)).measure.weight_changes("merged")["pets"]
    rows = [one.to_json() for one in changes]
    wanted = [100 * row["model_change"] / row["base_norm"] for row in rows]
    assert [*pictures[0][2].data[-1].y] == pytest.approx(wanted, rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("page", ["verdict", "drift"])
def test_tasks_that_are_done_are_drawn_while_others_are_measured(
    own_suite_file: Path, pictures: Pictures, monkeypatch: pytest.MonkeyPatch, page: str
) -> None:
    """The waterfall of these tasks is drawn, and at the end gives way to the whole."""
    monkeypatch.setattr(ledger_view, "PATIENCE", -1.0)
    app = opened(own_suite_file, page, n="7")
    assert healthy(app)
    waterfalls = [(alt, figure) for key, alt, figure in pictures if key.startswith("so-far") or key == "attribution"]
    (said, part), (_, whole) = waterfalls
    assert said.endswith("Mean over 1 of 2 tasks so far: pets.")
    assert not any("so far" in one.value for one in app.caption)
    session = open_session(str(own_suite_file))
    ledger = session.measure.drift("merged", DriftOptions(7, attribution=True))
    for task, shown in (("pets", part), (tables.ALL_TASKS, whole)):
        booked = ledger_tables.attribution_table(ledger, task)["contribution"].tolist()
        assert [*shown.data[0].y[:-1]] == pytest.approx(booked, rel=1e-6)

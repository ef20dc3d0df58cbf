"""The merge on the table: what the Calibrate page repairs, shows and writes is the calibration of the one subject."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from app_pages import button, control, export_command, go, headline, healthy, opened, shown_model
from lanes import pairs
from safetensors.torch import load_file
from streamlit.testing.v1 import AppTest

import featcal
from app import jobs, on_table, state
from app.selection import PageSelection
from featcal.evaluation.comparison import compare_scores
from featcal.figures import tables
from featcal.session.session import Session, open_session
from featcal.studies import recording
from featcal.studies.history import History
from featcal.suite.calibration_options import CalibrationConfig
from featcal.suite.views import EvaluationSamples
from featcal.system.formatting import percent, points

pytestmark = [pytest.mark.usefixtures("instant_maps"), pytest.mark.filterwarnings("ignore")]  # streamlit warns a lot
FEW = {"n": "8", "samples": "8"}
ON = EvaluationSamples(8)
RUN = "task-arithmetic:scale=0.5"
KINDS = ("merged", "ties", "folder", "pinned run")
SUITES = ("tiny", "clip-mini", "t5-mini", "lm-mini")
QUICK = [("tiny", "folder"), ("tiny", "pinned run")]
SLOW = [(suite, kind) for suite in SUITES for kind in KINDS if (suite, kind) not in QUICK]
Run = Callable[..., tuple[int, str, str]]


def chosen(app: AppTest) -> tuple[str, str]:
    selection: PageSelection = app.session_state["selection"]
    return selection.merge, selection.beside


def captions(app: AppTest, words: str) -> list[str]:
    return [one.value for one in app.caption if words in one.value]


def put_on_the_table(app: AppTest, kind: str, session: Session, folder: Path) -> str:
    """Choose a merge of a kind in the sidebar, and return its name."""
    name = {"folder": str(folder / "my-ties"), "pinned run": RUN}.get(kind, kind)
    if kind == "folder":
        featcal.merge(session.family, "ties").save(name)
        app.session_state["selection"] = app.session_state["selection"].change(merge=name)
        app.run()
        assert "my-ties" in control(app, "merge").options  # a short name; the tooltip has the whole
    if kind == "pinned run":
        run = recording.run_of(session, RUN)
        assert History().add(run, recording.measure_model(session, RUN, ON))
        History().mark(run.id, "pinned", True)
        app.run()
        assert f"{RUN} · pinned run" in control(app, "merge").options
    if kind != "folder":
        control(app, "merge").set_value(name).run()
    return name


@pytest.mark.parametrize(("suite", "kind"), pairs(SUITES, KINDS, quick=QUICK, slow=SLOW))
def test_what_is_shown_and_written_is_the_calibration_of_the_subject(
    suite: str, kind: str, tiny_suite_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    monkeypatch.setenv("FEATCAL_CACHE", str(tmp_path / "cache"))
    reference = str(tiny_suite_file) if suite == "tiny" else suite
    session = open_session(reference, resident=True)
    app = opened(reference, "calibrate", **FEW)
    a = put_on_the_table(app, kind, session, tmp_path)
    assert healthy(app)
    calibrated = session.resolve(f"calibrated:samples=8@{a}")
    before, after, expert = (recording.score_run(session, one, ON, state.page_score_kind(session, ON))
                             for one in (a, calibrated, "expert"))  # fmt: skip
    gain = compare_scores(before, after).average
    scored = headline(app)[f"{tables.metric_name({'': before}).capitalize()}, validation"]
    assert scored[0] == f"{percent(before.average)} → {percent(after.average)} %"
    assert scored[1] == f"{points(gain.difference)} points"
    assert headline(app)["Gap closed"][2] in ("", f"to the experts' {percent(expert.average)} %")
    app.text_input(key="folder").set_value(str(tmp_path / "page")).run()
    button(app, "Write the checkpoint").click().run()
    assert not app.exception
    assert not app.error
    words = [*shlex.split(export_command(app))[1:-1], str(tmp_path / "command")]
    assert (words[2:4] == ["--model", a]) == (kind != "merged")
    code, _, err = run(*words)
    assert code == 0, err
    page, command = (load_file(tmp_path / one / "model.safetensors") for one in ("page", "command"))
    assert page.keys() == command.keys()
    assert all(torch.equal(tensor, command[name]) for name, tensor in page.items())
    rows = []
    for card in ((tmp_path / one / "README.md").read_text() for one in ("page", "command")):
        rows += [line.replace("\\", "") for line in card.splitlines() if line.startswith("| merged model |")]
    assert rows[0] == rows[1]
    assert a in rows[0] or kind == "merged"


@pytest.mark.parametrize(
    ("a", "why", "offered"),
    [
        ("base", "base is what the experts were fine-tuned from", "merged"),
        pytest.param("expert:signs", "expert:signs is an expert", "merged", marks=pytest.mark.slow),
        pytest.param("anchor:rho=2", "anchor:rho=2 is the anchor of a calibration", "merged", marks=pytest.mark.slow),
        pytest.param("calibrated:rho=1", "calibrated:rho=1 is calibrated already", "merged", marks=pytest.mark.slow),
        ("calibrated@ties", "calibrated@ties is calibrated already", "ties"),
        pytest.param("surgery@ties", "surgery@ties is more than its weights", "ties", marks=pytest.mark.slow),
    ],
)
def test_what_cannot_be_calibrated_says_so_and_offers_the_merge(
    tiny_suite_file: Path, a: str, why: str, offered: str
) -> None:
    app = opened(tiny_suite_file, "calibrate", merge=a, **FEW)
    assert healthy(app)
    assert [one.value.replace("\\", "").split(":rho")[0] for one in app.info] == [f"{why}: this page calibrates merges."
                                                                               .split(":rho")[0]]  # fmt: skip
    assert not [one for one in app.button if "checkpoint" in one.label]
    button(app, f"Calibrate {offered}").click().run()
    assert healthy(app)
    assert chosen(app) == (offered, "calibrated")
    assert button(app, "Write the checkpoint")


def test_a_calibrated_folder_is_calibrated_already(tiny_suite_file: Path, tmp_path: Path) -> None:
    session = open_session(str(tiny_suite_file), resident=True)
    session.fit.calibrate("calibrated:samples=8@ties").save(tmp_path / "repaired")
    model = session.resolve(str(tmp_path / "repaired"))
    assert on_table.why_not(session, model) == "is calibrated already"
    assert on_table.merge_of(session, model.name).name == "ties"


@pytest.mark.parametrize(
    ("models", "merge"),
    [
        (("merged", "calibrated"), "merged"),
        (("ties", "calibrated"), "ties"),
        (("calibrated", "ties"), "ties"),  # swapped
        (("svc@ties", "calibrated"), "svc"),
        (("surgery@ties", "calibrated"), "ties"),
        (("calibrated:lam=1@tsv-m", "calibrated"), "tsv-m"),
        (("polished:steps=1@calibrated@ties", "calibrated"), "ties"),
        (("anchor:rho=2@ties", "calibrated"), "ties"),
        (("base", "calibrated"), "merged"),
        (("base", "ties"), "ties"),
        (("calibrated", None), "merged"),
        (("expert:signs", "calibrated:lam=1@ties"), "ties"),
    ],
)
def test_the_merge_on_the_table_is_the_first_that_can_be_calibrated(
    tiny_suite_file: Path, models: tuple[str | None, ...], merge: str
) -> None:
    session = open_session(str(tiny_suite_file), resident=True)
    assert on_table.merge_of(session, *models).name.partition(":")[0] == merge


def test_calibrated_alone_is_of_the_merge_on_the_table_on_every_page(tiny_suite_file: Path) -> None:
    app = opened(tiny_suite_file, "cosines", merge="ties", beside="calibrated", **FEW)
    assert healthy(app)
    assert shown_model(app) == "λ 0.05 · ρ 2 · α 0.3 · n 8"
    commands = [word for one in app.code if one.value.startswith("featcal drift") for word in one.value.split()]
    named = {word for word, flag in zip(commands[1:], commands, strict=False) if flag == "--model"}
    assert named == {"ties", "calibrated:lam=0.05,rho=2,alpha=0.3,samples=8@ties"}
    assert chosen(go(app, "calibrate")) == ("ties", "calibrated")
    assert "--model ties" in export_command(app)


@pytest.mark.slow
def test_another_merge_has_options_and_scores_of_its_own(tiny_suite_file: Path) -> None:
    """Neither preview, ghost, undo nor the last models of one merge are shown with another."""
    app = opened(tiny_suite_file, "calibrate", merge="ties", **FEW)
    control(app, "rho").set_value(1.5).run()
    assert not button(app, "Undo").disabled
    assert len([one for one in app.button if str(one.key).startswith("chip")]) == 2
    control(app, "merge").set_value("merged").run()
    assert healthy(app)
    assert button(app, "Undo").disabled
    assert [one.label.split(" · ")[0] for one in app.button if str(one.key).startswith("chip")] == ["ρ 1.5"]
    assert not captions(app, "The preview said")
    control(app, "merge").set_value("ties").run()
    button(app, "Undo").click().run()
    assert (chosen(app), control(app, "rho").value) == (("ties", "calibrated"), 2.0)


@pytest.mark.slow
def test_a_long_calibration_of_another_merge_is_a_job_of_that_merge(
    tiny_suite_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, Any]] = []
    monkeypatch.setattr(jobs, "is_long", lambda *_: True)
    monkeypatch.setattr(jobs, "ensure", lambda kind, args, *_, **__: asked.append((kind, args.get("model"))))
    opened(tiny_suite_file, "calibrate", merge="ties", samples="7")
    assert asked == [("calibrate", "ties")]


def test_a_run_is_shown_beside_the_merge_that_it_calibrates(
    tiny_suite_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEATCAL_CACHE", str(tmp_path / "cache"))
    session = open_session(str(tiny_suite_file), resident=True)
    config = CalibrationConfig(samples=8, rho=1.5)
    for of in ("merged", "ties"):
        assert not recording.record(session, session.resolve(config, of), ON, History())
    runs = {run.model.partition("@")[2]: run for run in History().runs()}
    assert runs[""].id != runs["ties"].id
    assert runs[""].options == runs["ties"].options
    app = opened(tiny_suite_file, "runs", merge="tsv-m", run=runs["ties"].id, against=runs[""].id, **FEW)
    button(app, "Show it on every page").click().run()
    assert healthy(app)
    assert chosen(app) == ("ties", "calibrated")
    assert shown_model(app) == "λ 0.05 · ρ 1.5 · α 0.3 · n 8"
    button(app, "Compare both on every page").click().run()
    assert healthy(app)
    assert chosen(app) == (runs["ties"].model, runs[""].model)

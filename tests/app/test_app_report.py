"""The Suite page writes a report of the models that are looked at."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from app_pages import button, control, go, healthy, opened
from safetensors.torch import load_file, save_file
from suite_edits import Edit

from app import jobs
from app import report as app_report
from featcal import open_session
from featcal.export.merge import merge_to_folder
from featcal.family.opening import Family
from featcal.figures.report.write import write_report
from featcal.server import worker
from featcal.server.queue import Queue
from featcal.suite.views import EvaluationSamples

pytestmark = [pytest.mark.usefixtures("instant_maps"), pytest.mark.filterwarnings("ignore")]  # streamlit warns a lot
Offered = dict[str, bytes]


@pytest.mark.slow
def test_what_was_written_of_other_files_is_offered_no_longer(
    own_suite_file: Path, tmp_path: Path, offered: Offered, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files change below an open page: the report, the folder with its card, and the scores of the last models are
    those of the files before."""

    monkeypatch.setenv("FEATCAL_CACHE", str(tmp_path / "cache"))

    def find_reports() -> list[str]:
        return [name for name in offered if name.startswith("report")]

    app = opened(own_suite_file, "report", n="8", samples="6")
    button(app, "Write a report").click().run()
    assert len(find_reports()) == 1
    go(app, "calibrate").text_input(key="folder").set_value(str(tmp_path / "mine"))
    button(app, "Write the checkpoint").click().run()
    assert [one.value for one in app.success if "Written and verified" in one.value]
    shutil.move(tmp_path / "mine", tmp_path / "away")
    assert healthy(app.run())
    assert not app.success  # the folder is not there
    shutil.move(tmp_path / "away", tmp_path / "mine")
    assert app.run().success
    control(app, "rho").set_value(1.5).run()
    control(app, "rho").set_value(2.0).run()

    def find_chips() -> list[str]:
        return [one.label for one in app.button if str(one.key).startswith("chip-")]

    assert len(find_chips()) == 2
    file = own_suite_file.parent / "experts" / "signs" / "model.safetensors"
    save_file({name: 1.5 * tensor for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    assert healthy(app.run())
    assert not app.success
    assert len(find_chips()) == 1
    offered.clear()
    assert healthy(go(app, "report"))
    assert not find_reports()


@pytest.mark.slow
def test_a_suite_without_test_samples_has_a_report(edit_suite: Edit) -> None:
    app = opened(edit_suite(lambda content: [task.pop("test") for task in content["tasks"].values()]), "report", n="8")
    assert healthy(app)
    assert button(app, "Write a report")


@pytest.mark.slow
def test_a_report_is_written_when_it_is_asked_for(tiny_suite_file: Path, offered: Offered) -> None:
    app = opened(tiny_suite_file, "report", n="8", beside="calibrated", rho="1.5", samples="6")
    assert healthy(app)
    assert not any(name.startswith("report") for name in offered)
    (line,) = (block.value for block in app.code if block.value.startswith("featcal report"))
    assert line == (
        f"featcal report {tiny_suite_file} --model merged "
        "--model calibrated:lam=0.05,rho=1.5,alpha=0.3,samples=6 --eval-samples 8 --seed 42 --out report.html"
    )
    button(app, "Write a report").click().run()
    assert healthy(app)
    ((name, content),) = ((n, c) for n, c in offered.items() if n.startswith("report"))
    assert name == "report-tiny-lam0.05-rho1.5-alpha0.3-n6-8-validation.html"
    assert content.startswith(b"<!DOCTYPE html>")
    assert b"calibrated:lam=0.05,rho=1.5,alpha=0.3,samples=6" in content

    offered.clear()
    go(go(app, "drift"), "report")
    assert [one for one in offered if one.startswith("report")] == [name]  # still there after other pages
    offered.clear()
    control(app, "n").set_value(16).run()
    assert not any(one.startswith("report") for one in offered)  # it was about other samples


@pytest.mark.slow
def test_a_report_on_a_folder_that_was_written_anew_is_offered_no_longer(
    tiny: Family, tiny_suite_file: Path, tmp_path: Path, offered: Offered
) -> None:
    """The suite is the same, and so is the folder's name."""
    merge_to_folder(tiny, "ties", 1.0, tmp_path / "mine")
    app = opened(tiny_suite_file, "report", n="8", merge=str(tmp_path / "mine"), beside="base")
    button(app, "Write a report").click().run()
    assert [name for name in offered if name.startswith("report")]
    file = tmp_path / "mine" / "model.safetensors"
    save_file({name: 1.5 * tensor for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    offered.clear()
    assert healthy(app.run())
    assert not [name for name in offered if name.startswith("report")]


def test_a_model_that_is_none_is_said(tiny_suite_file: Path) -> None:
    app = opened(tiny_suite_file, "report", merge="calibrated:lamb=1")
    assert not app.exception
    assert any("lamb" in one.value for one in app.error)


@pytest.mark.slow
def test_a_report_that_takes_long_is_written_by_a_job(
    tiny_suite_file: Path, offered: Offered, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEATCAL_CACHE", str(tmp_path))
    monkeypatch.setattr(app_report, "is_long", lambda *_: True)
    monkeypatch.setattr(jobs, "ensure_manager", lambda _: None)
    app = opened(tiny_suite_file, "report", n="8", merge="base", beside="merged")
    assert healthy(app)
    button(app, "Start").click().run()
    (job,) = Queue().jobs()
    assert (job.order.kind, job.order.args["models"]) == ("report", ["base", "merged"])
    assert not offered
    claimed = Queue().claim()
    assert claimed is not None
    assert worker.work(Queue(), claimed.id) == 0
    assert healthy(app.run())
    ((name, content),) = offered.items()
    assert name.startswith("report-tiny")
    assert content.startswith(b"<!DOCTYPE html>")
    session, out = open_session(str(tiny_suite_file)), tmp_path / "again.html"
    again = write_report(session, str(tiny_suite_file), out, models=("base", "merged"), on=EvaluationSamples(8))
    assert len(content) == pytest.approx(again["bytes"], rel=1e-3)

"""The app without a browser: every page runs, says what is missing, and computes what its controls ask for."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import streamlit as st
import torch
from streamlit.testing.v1 import AppTest

from featcal.calibration.config import CalibrationConfig
from featcal.errors import NumericalError
from featcal.evaluation.evaluate import Scores, TaskScore
from featcal.resources import bundle_root

sys.path.insert(0, str(bundle_root()))

from app import export, maps, state, tables
from app.workspace import Workspace, open_workspace

PAGES = ("drift", "calibrate", "features", "cosines", "accuracy", "suite")
pytestmark = pytest.mark.filterwarnings("ignore")  # streamlit warns of much that is not ours


class InstantMaps:
    """Stands in for the process that runs UMAP, whose compilation takes long."""

    def submit(self, features: maps.Points) -> Future[maps.Map]:
        future: Future[maps.Map] = Future()
        future.set_result(maps.Map(maps.pca_map(features), 0.9, 0.8))
        return future


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(state, "MapWorker", InstantMaps)
    yield
    st.cache_resource.clear()


def opened(suite: Path | str, page: str = "drift", **query: str) -> AppTest:
    """The app on a suite, run once on a page."""
    app = AppTest.from_file(str(bundle_root() / "app" / "main.py"), default_timeout=60)
    for name, value in {"suite": str(suite), **query}.items():
        app.query_params[name] = value
    if page != "drift":
        app.switch_page(str(bundle_root() / "pages" / f"{page}.py"))
    return app.run()


def go(app: AppTest, page: str) -> AppTest:
    return app.switch_page(str(bundle_root() / "pages" / f"{page}.py")).run()


def charts(app: AppTest) -> int:
    return len(app.get("plotly_chart"))


def button(app: AppTest, label: str) -> Any:
    return next(one for one in app.button if label in one.label)


def healthy(app: AppTest) -> bool:
    return not app.exception and not app.error


@pytest.mark.parametrize(("page", "drawn"), list(zip(PAGES, (5, 2, 2, 4, 1, 0), strict=True)))
def test_every_page_shows_its_charts_from_a_link(tiny_suite_file: Path, page: str, drawn: int) -> None:
    app = opened(tiny_suite_file, page, calibrated="true", rho="1.5")
    assert healthy(app)
    assert charts(app) == drawn


def test_the_app_opens_on_the_embedded_suite_with_a_chart() -> None:
    app = AppTest.from_file(str(bundle_root() / "app" / "main.py"), default_timeout=60).run()
    assert healthy(app)
    assert app.selectbox(key="suite").value == "clip-mini"
    assert charts(app) == 5


def test_a_slider_calibrates_anew(tiny_suite_file: Path) -> None:
    app = opened(tiny_suite_file, "calibrate")
    before = app.metric[0].value
    app.slider(key="rho").set_value(0.5).run()
    assert healthy(app)
    assert app.metric[0].value != before
    assert "--rho 0.5" in app.code[-1].value


def test_a_calibration_follows_to_other_pages(tiny_suite_file: Path) -> None:
    app = opened(tiny_suite_file, "calibrate")
    app.slider(key="alpha").set_value(0.6).run()
    go(app, "drift")
    assert healthy(app)
    assert app.toggle(key="calibrated").value
    assert app.slider(key="alpha").value == 0.6


def test_back_to_the_papers_values(tiny_suite_file: Path) -> None:
    app = opened(tiny_suite_file, "calibrate", rho="0.5", lam="1")
    assert "--lam 1 --rho 0.5" in app.code[-1].value
    button(app, "paper's values").click().run()
    assert "--lam 0.05 --rho 2 --alpha 0.3" in app.code[-1].value


def test_a_page_that_needs_a_calibration_offers_one(tiny_suite_file: Path) -> None:
    app = opened(tiny_suite_file, "cosines")
    assert charts(app) == 0
    assert "calibrated" in app.info[0].value
    button(app, "paper's defaults").click().run()
    assert healthy(app)
    assert charts(app) == 4


def test_the_test_split_is_scored_on_demand(tiny_suite_file: Path) -> None:
    app = opened(tiny_suite_file, "accuracy", calibrated="true")
    assert len(app.metric) == 3
    button(app, "test split").click().run()
    assert healthy(app)
    assert any("gap" in one.label for one in app.metric)


@pytest.mark.parametrize("page", PAGES)
def test_a_suite_that_is_not_there_is_one_message_and_one_way_out(page: str) -> None:
    app = opened("/nowhere/suite.yaml", page)
    assert not app.exception
    assert ["no suite '/nowhere/suite.yaml'" in one.value for one in app.error] == [True]
    assert len(app.button) == 1


@pytest.mark.parametrize("page", PAGES)
def test_a_broken_suite_is_explained(edit_suite: Callable[[Callable[[dict[str, Any]], None]], Path], page: str) -> None:
    app = opened(edit_suite(lambda content: content.update(base="gone")), page)
    assert not app.exception
    assert "gone" in app.error[0].value


def test_a_suite_without_labels_still_shows_drift(
    edit_suite: Callable[[Callable[[dict[str, Any]], None]], Path],
) -> None:
    def drop_labels(content: dict[str, Any]) -> None:
        for task in content["tasks"].values():
            for split in ("calibration", "validation", "test"):
                del task[split]["labels"]

    app = opened(edit_suite(drop_labels))
    assert healthy(app)
    go(app, "calibrate")
    assert healthy(app)
    assert "no labels" in app.info[0].value
    go(app, "accuracy")
    assert not app.exception
    assert "no labels" in app.error[0].value


def test_export_writes_once_and_says_how_to_load(tiny_suite_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "repaired"
    app = opened(tiny_suite_file, "calibrate")
    app.text_input(key="folder").set_value(str(out)).run()
    button(app, "Write").click().run()
    assert healthy(app)
    assert (out / "model.safetensors").is_file()
    assert str(out) in app.success[0].value
    assert f'CLIPModel.from_pretrained("{out.as_posix()}")' in app.code[0].value
    button(app, "Write").click().run()
    assert not app.exception
    assert "exists" in app.error[0].value


def test_an_impossible_calibration_is_a_message(tiny_suite_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise NumericalError("not positive definite; raise lam")

    monkeypatch.setattr(Workspace, "calibrated", fail)
    app = opened(tiny_suite_file, "calibrate")
    assert not app.exception
    assert app.error[0].value == "not positive definite; raise lam"


def test_work_that_is_overtaken_leaves_the_workspace_usable(tiny_suite_file: Path) -> None:
    class NewerRun(Exception):
        pass

    def overtaken(label: str, done: int, total: int) -> None:
        if done == 1:
            raise NewerRun

    config = CalibrationConfig(samples=8)
    disturbed, calm = open_workspace(str(tiny_suite_file)), open_workspace(str(tiny_suite_file))
    with pytest.raises(NewerRun):
        disturbed.calibrated(config, overtaken)
    with pytest.raises(NewerRun):
        disturbed.drift("merged", 8, overtaken)
    assert disturbed.drift(config, 8).macro_cosine == calm.drift(config, 8).macro_cosine


def test_results_are_kept_by_options_and_bounded(tiny_suite_file: Path) -> None:
    ws = open_workspace(str(tiny_suite_file))
    first = ws.calibrated(CalibrationConfig(samples=8))
    assert ws.calibrated(CalibrationConfig(samples=8)) is first
    for step in range(10):
        ws.calibrated(CalibrationConfig(samples=8, rho=step / 10))
    assert ws.calibrated(CalibrationConfig(samples=8)) is not first


def test_quick_scores_agree_with_an_evaluation(tiny_suite_file: Path) -> None:
    ws = open_workspace(str(tiny_suite_file))
    for model in ("merged", "expert"):
        assert ws.quick_scores(model, 12).to_json() == ws.scores(model, "validation").to_json()


def test_score_table_shares_of_the_gap() -> None:
    def scores(model: str, *values: float) -> Scores:
        none = torch.zeros(0, dtype=torch.int64)
        tasks = {f"t{i}": TaskScore("accuracy", value, none, none) for i, value in enumerate(values)}
        return Scores("s", model, "test", tasks)

    frame = tables.score_table(
        {"merged": scores("m", 0.5, 0.9), "calibrated": scores("c", 0.6, 0.8), "expert": scores("e", 0.9, 0.9)}
    ).set_index("task")
    assert frame.loc["t0", "gap closed, %"] == pytest.approx(25)
    assert np.isnan(frame.loc["t1", "gap closed, %"])
    assert frame.loc["average", "calibrated − merged"] == pytest.approx(0)


def test_the_command_line_repeats_the_sliders() -> None:
    config = CalibrationConfig(lam=1e-6, rho=0.0, alpha=1.0, samples=8, biases=False)
    line = export.command("my suite.yaml", config, "out")
    assert line == ("featcal calibrate 'my suite.yaml' --lam 1e-06 --rho 0 --alpha 1 --samples 8 --no-biases --out out")


@pytest.mark.slow
def test_the_map_process_maps_and_survives_a_kill() -> None:
    worker = maps.MapWorker()
    cloud = np.random.default_rng(0).normal(size=(60, 8)).astype(np.float32)
    found = worker.submit(cloud).result(timeout=120)
    assert found.points.shape == (60, 2)
    assert 0 < found.pca_trust <= 1
    worker._process.kill()
    worker._process.wait()
    assert np.array_equal(worker.submit(cloud).result(timeout=120).points, found.points)
    worker.close()

"""The calibrated model is one and the same on every page, however it was chosen and whichever way one goes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from e2e.conftest import App
from e2e.visitor import QUICK, QUICK_LINK, Model, Visitor

pytestmark = pytest.mark.e2e
DEFAULTS = Model(0.05, 2.0, 0.3, 64)
LINKED = Model(0.0002, 1.2, 0.35, 16)
"""A model none of whose options is a default."""
ALL = ("calibrate", "drift", "features", "cosines", "accuracy", "models")


def test_the_tour_shows_one_calibrated_model(visitor: Visitor) -> None:
    """Drift, Calibrate, Features, Cosines, Accuracy, Drift, as the README goes; numbers agree from page to page."""
    start = replace(LINKED, rho=1.1)
    visitor.open(f"/drift?{start.query()}&n=16")
    visitor.go("calibrate")
    assert visitor.model == start
    visitor.step("rho")
    assert visitor.model == LINKED  # the model of the next journey: what is measured here is there already
    shown, drift = visitor.result("Final drift"), visitor.chart("compared")["calibrated"][-1]
    assert shown == pytest.approx(drift, abs=5.1e-3)
    assert visitor.walk(["features", "cosines"]) == {"features": LINKED, "cosines": LINKED}
    assert visitor.result("Final drift") == shown
    assert visitor.walk(["accuracy", "drift"]) == {"accuracy": LINKED, "drift": LINKED}
    assert visitor.chart("drift-layers")["drift, calibrated"][-1] == pytest.approx(drift, rel=1e-5)


@pytest.mark.parametrize(
    "order",
    [pytest.param(ALL[1:], id="forwards"), pytest.param(ALL[:0:-1], id="backwards", marks=pytest.mark.nightly)],
)
def test_the_model_of_a_link_is_on_every_page(visitor: Visitor, order: tuple[str, ...]) -> None:
    visitor.open(f"/calibrate?{LINKED.query()}&n=16")
    assert visitor.model == LINKED
    assert visitor.walk(order) == dict.fromkeys(order, LINKED)
    visitor.go("calibrate")
    assert visitor.model == LINKED


def test_the_model_of_the_button_is_on_every_page(visitor: Visitor) -> None:
    """The app's own code sets it: back to the defaults."""
    order = ("accuracy", "drift", "calibrate", "features")
    visitor.open(f"/calibrate?{replace(QUICK, rho=1.9).query()}&n=16")
    visitor.click("Defaults")
    assert visitor.model == DEFAULTS
    assert visitor.walk(order) == dict.fromkeys(order, DEFAULTS)


def test_samples_to_measure_on_and_the_task_are_the_same_on_every_page(visitor: Visitor) -> None:
    visitor.open("/accuracy?task=flags&samples=16&n=16")
    seen, task = {}, {}
    for name in ("features", "models", "drift", "cosines", "calibrate"):
        visitor.go(name)
        seen[name] = visitor.n
        if name in ("features", "drift"):
            task[name] = visitor.value("task")
    assert seen == dict.fromkeys(seen, 16)
    assert task == dict.fromkeys(task, "flags")


def test_a_reload_and_a_copied_address_show_the_same(newcomer: Callable[[], Visitor]) -> None:
    visitor, other = newcomer(), newcomer()
    visitor.open(f"/calibrate?{QUICK_LINK}")
    visitor.step("lam")
    model = visitor.model
    assert model == replace(QUICK, lam=0.1)
    visitor.go("features")
    before = visitor.metric("cosine, calibrated")
    visitor.reload()
    assert (visitor.model, visitor.metric("cosine, calibrated")) == (model, before)
    other.open(visitor.address)
    assert (other.model, other.metric("cosine, calibrated")) == (model, before)
    assert other.walk(["calibrate"]) == {"calibrate": model}


def test_a_page_switch_is_one_history_entry_and_back_undoes_it(visitor: Visitor) -> None:
    visitor.open(f"/calibrate?{QUICK_LINK}")
    start, model = visitor.history, replace(QUICK, rho=2.2)
    visitor.step("rho", 2)
    moved = visitor.history
    lengths = []
    for name in ("features", "cosines", "models"):
        visitor.go(name)
        lengths.append(visitor.history - moved)
    way = []
    for _ in range(3):
        visitor.back()
        way.append((visitor.place, visitor.model))
    assert lengths == [1, 2, 3]
    assert way == [("cosines", model), ("features", model), ("calibrate", model)]
    assert moved - start <= 1


def test_a_checkpoint_is_written_into_a_folder_that_names_it(app: App, visitor: Visitor) -> None:
    visitor.open(f"/calibrate?{QUICK_LINK}")
    visitor.drag("rho", 0.8)
    visitor.step("alpha")
    model = visitor.model
    assert model is not None
    assert (model.lam, model.alpha, model.samples) == (0.05, 0.35, 16)
    assert model.rho == pytest.approx(3.2, abs=0.11)
    name = model.folder("clip-mini")
    assert visitor.value("folder") == name
    command = visitor.page.get_by_test_id("stCode").first.inner_text()
    assert f"--lam 0.05 --rho {model.rho:g} --alpha 0.35 --samples 16" in command
    assert command.strip().endswith(f"--out {name}")
    visitor.click("Write the checkpoint")
    options = json.loads((app.folder / name / "featcal.json").read_text())["config"]
    assert {key: options[key] for key in ("lam", "rho", "alpha", "samples")} == vars(model)


def test_the_folder_follows_the_suite(visitor: Visitor) -> None:
    visitor.open("/calibrate?samples=16&n=16")
    assert visitor.value("folder") == QUICK.folder("clip-mini")
    visitor.choose("suite", "t5-mini")
    assert visitor.model is not None
    assert visitor.model != QUICK
    name = visitor.model.folder("t5-mini")
    assert visitor.value("folder") == name
    assert visitor.page.get_by_test_id("stCode").first.inner_text().strip().endswith(f"--out {name}")

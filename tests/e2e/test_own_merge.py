"""A person with a merge of their own: its folder, what is wrong with it, why, the repair, the checkpoint."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from own_merges import plant, write_parents
from safetensors.torch import load_file

import featcal
from e2e.conftest import App
from e2e.visitor import QUICK, QUICK_LINK, Visitor
from featcal.session.session import open_session
from featcal.suite.schema import load_suite

pytestmark = pytest.mark.e2e


def check(visitor: Visitor, folder: Path) -> str:
    """Type the folder into the field of the first screen; returns what the page says then."""
    visitor.page.get_by_role("textbox", name="Check my merge").fill(str(folder))
    visitor.page.keyboard.press("Enter")
    visitor.settle()
    visitor.click("Check my merge")
    return visitor.page.get_by_test_id("stMain").inner_text().replace("\u00a0", " ")


def test_a_merge_of_ones_own_is_checked_repaired_and_written(visitor: Visitor, app: App) -> None:
    folder = app.folder / "my-ties"
    featcal.merge(load_suite("clip-mini"), "ties").save(folder)
    visitor.open(f"/?{QUICK_LINK}")
    said = check(visitor, folder)
    assert visitor.value("merge") == "my-ties"
    (blamed,) = re.findall(r"(Block \d) causes the largest part of it", said)
    before = visitor.page.locator(".st-key-headline").get_by_test_id("stMetricValue").all_inner_texts()
    visitor.click(f"see {blamed.lower()}")
    assert (visitor.place, visitor.value("layer")) == ("drift", blamed.lower())
    assert visitor.page.locator(".st-key-headline").get_by_test_id("stMetricValue").all_inner_texts() == before
    visitor.page.locator(".st-key-model-settings button").first.click()  # the options lead to where they are chosen
    visitor.settle()
    assert (visitor.place, visitor.value("merge"), visitor.model) == ("calibrate", "my-ties", QUICK)
    visitor.step("rho")
    moved = replace(QUICK, rho=2.1)
    assert visitor.model == moved
    name = visitor.value("folder")
    visitor.click("Write the checkpoint")
    written = load_file(app.folder / name / "model.safetensors")
    session = open_session("clip-mini", resident=True)
    featcal_own = session.fit.calibrate(f"calibrated:lam=0.05,rho=2.1,alpha=0.3,samples=16@{folder}").save(
        app.folder / "by-the-library"
    )
    assert "model.safetensors" in featcal_own
    expected = load_file(app.folder / "by-the-library" / "model.safetensors")
    assert written.keys() == expected.keys()
    assert all(torch.equal(one, expected[name]) for name, one in written.items())
    assert "my-ties" in (app.folder / name / "README.md").read_text()


def test_a_folder_of_mergekit_needs_no_suite_file(visitor: Visitor, app: App) -> None:
    root = app.folder / "by-mergekit"
    root.mkdir()
    write_parents(root)
    visitor.open("/?n=16")
    said = check(visitor, plant(root, ""))
    assert "healthy is healthy: nothing is wrong with its weights" in said
    assert "0.50 of 'left' and 0.25 of 'right', as its recipe says" in said
    (blamed,) = re.findall(r"(Block \d|Embeddings|Head) causes? the largest part of it", said)
    visitor.click(f"see {blamed.lower()}")
    assert (visitor.place, visitor.value("layer")) == ("drift", blamed.lower())
    visitor.go("calibrate")
    visitor.click("Write the checkpoint")
    folder = app.folder / visitor.page.locator(".st-key-folder input").input_value()
    assert (folder / "model.safetensors").is_file()

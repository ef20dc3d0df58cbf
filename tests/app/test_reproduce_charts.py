"""Every chart of the app has a command that gives its numbers: run, and held against the chart's own table."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from app_pages import button, control, drain, go, healthy, opened
from chart_numbers import CHARTS
from reproducing import document

from app import downloads, jobs, layer_view, ledger_view
from app.downloads import Numbers
from featcal.figures.commands import command_lines, python_lines

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("instant_maps"),
    pytest.mark.filterwarnings("ignore"),
]  # streamlit warns a lot

MODELS = {"beside": "calibrated", "rho": "1.5", "lam": "0.02", "samples": "6", "n": "8"}
PAGES: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "verdict": ("verdict", {}),
    "drift": ("drift", {}),
    "growth": ("drift", {"tab": "Growth"}),
    "decisions": ("drift", {"tab": "Decisions"}),
    "sources": ("drift", {"tab": "Feature sources", "sources": "true"}),
    "weights": ("drift", {"tab": "Weights"}),
    "depth": ("drift", {"tab": "Through depth", "sample": "2"}),
    "inside": ("drift", {"tab": "Inside the block"}),
    "tokens": ("drift", {"tab": "Token by token", "sample": "2"}),
    "calibrate": ("calibrate", {"booked": "true", "spread": "true", "conditioning": "true"}),
    "cosines": ("cosines", {}),
    "accuracy": ("accuracy", {"picked": "1,4", "picked_of": "test"}),
    "features": ("features", {"layer": "block 1", "map": "PCA", "every": "true"}),
    "head": ("features", {"layer": "head", "map": "PCA", "picked": "1,4"}),
    "UMAP": ("features", {"layer": "block 1", "every": "true"}),
    "methods": (
        "calibrate",
        {"bench": "Sweep and methods", "sweep_lam": "0.02", "sweep_rho": "1.5, 2", "sweep_alpha": "0.3"},
    ),
}
"""What is opened: a page, and how."""


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> dict[str, Numbers]:
    """Tables of the pages that are run, by what they are of."""
    found: dict[str, Numbers] = {}
    measured = downloads.Numbers.measurement

    def noted(numbers: Numbers, reference: str) -> Any:
        found[numbers.what] = numbers
        return measured(numbers, reference)

    monkeypatch.setattr(downloads.Numbers, "measurement", noted)
    return found


def test_every_view_of_the_drift_page_is_opened() -> None:
    opened_views = {chosen["tab"] for page, chosen in PAGES.values() if page == "drift" and "tab" in chosen}
    assert opened_views == {*ledger_view.VIEWS, *layer_view.VIEWS, ledger_view.INSIDE, ledger_view.TOKENS}


@pytest.mark.parametrize("where", PAGES)
def test_commands_give_the_numbers_of_charts(
    where: str, tiny_suite_file: Path, shown: dict[str, Numbers], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEATCAL_CACHE", str(tmp_path / "of the page"))
    monkeypatch.setattr(jobs, "ensure_manager", drain)  # a sweep is a job
    page, chosen = PAGES[where]
    app = opened(tiny_suite_file, page, **(MODELS | {"task": "signs", "layer": "block 1"} | chosen))
    for label in [one.label for one in app.button if one.label.startswith(("Score calibrated", "Run the sweep"))]:
        button(app, label).click().run()
        shown.clear()
        app.run()
    assert healthy(app)
    assert set(shown) == set(CHARTS[where])
    monkeypatch.setenv("FEATCAL_CACHE", str(tmp_path / "of the commands"))
    on_page = {block.value for block in app.code}
    ran: dict[str, dict[str, Any]] = {}
    for what, numbers in shown.items():
        measured = numbers.measurement(str(tiny_suite_file))
        assert measured is not None
        lines = command_lines(measured)
        assert {"\n".join(lines), python_lines(measured)} <= on_page
        for line in set(lines) - ran.keys():
            ran[line] = document(line)
        models = [label for label, name in numbers.origin.models.items() if name in measured.models]
        named = models if len(lines) == len(models) else map(str, range(len(lines)))
        found = {label: ran[line] for label, line in zip(named, lines, strict=True)}
        pairs = list(CHARTS[where][what](numbers.frame, found))
        assert pairs
        for said, again in pairs:
            assert list(np.ravel(said)) == pytest.approx(list(np.ravel(again)), rel=2e-4, abs=1e-5), what


@pytest.mark.parametrize("choice", [{"tab": "Growth", "tokens": "class token"}, {"parts": "attention and MLP"}])
def test_options_of_a_chart_are_in_its_command(choice: dict[str, str], tiny_suite_file: Path) -> None:
    app = opened(tiny_suite_file, "drift", n="8", **choice)
    assert healthy(app)
    lines = [line for block in app.code for line in block.value.splitlines() if line.startswith("featcal drift")]
    flag = "--tokens class" if "tokens" in choice else "--sublayers"
    assert any(flag in line and ("--attribution" in line) == ("parts" in choice) for line in lines)


def test_a_model_of_controls_is_named_in_full(tiny_suite_file: Path) -> None:
    app = opened(tiny_suite_file, "calibrate", **MODELS)
    control(app, "alpha").set_value(0.5).run()
    go(app, "drift")
    lines = [line for block in app.code for line in block.value.splitlines()]
    name = "--model calibrated:lam=0.02,rho=1.5,alpha=0.5,samples=6"
    assert any(line.startswith("featcal drift") and name in line for line in lines)

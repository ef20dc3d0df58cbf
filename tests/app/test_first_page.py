"""The kept first page: the live one again, for the very same files only, without torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from app import first_page
from app.cards import Card
from app.first_page import FirstPage
from featcal.family.opening import Family
from featcal.figures import ledger_tables, tables
from featcal.figures.verdict.measure import diagnose_model
from featcal.session.session import Session
from featcal.suite.views import DriftOptions, EvaluationSamples


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEATCAL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def measured(tiny: Family) -> FirstPage:
    session, on = Session(tiny), EvaluationSamples(4)
    ledger = session.measure.drift("merged", DriftOptions(4, attribution=True))
    rows = tables.layer_rows(tables.drift_table(ledger), tables.ALL_TASKS, relative=True)
    return FirstPage(
        [Card("Final drift", "0.50", "-20 %", "of the norm", "inverse")],
        diagnose_model(session, "merged", on),
        ledger_tables.attribution_table(ledger, tables.ALL_TASKS),
        {"merged": rows, "calibrated": rows},
    )


def test_what_is_kept_comes_back(measured: FirstPage, cache: Path) -> None:
    assert first_page.read_kept() is None
    first_page.keep_first_page(measured)
    found = first_page.read_kept()
    assert found is not None
    assert found.verdict.lines == measured.verdict.lines
    assert found.verdict == measured.verdict
    pd.testing.assert_frame_equal(found.booked, measured.booked, check_dtype=False, rtol=1e-9)
    assert found.cards == measured.cards
    assert [*found.layers] == ["merged", "calibrated"]
    for name, rows in measured.layers.items():
        pd.testing.assert_frame_equal(found.layers[name], rows, check_dtype=False, rtol=1e-9)
    assert len(list(cache.iterdir())) == 1


def test_changed_files_are_measured_anew(
    measured: FirstPage, tiny: Family, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first_page.keep_first_page(measured)
    monkeypatch.setattr(first_page, "data_path", lambda name: tiny.suite.root)
    assert first_page.read_kept() is None


def test_a_folder_that_cannot_be_written_is_no_failure(
    measured: FirstPage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FEATCAL_CACHE", str(tmp_path / "file" / "cache"))
    first_page.keep_first_page(measured)
    assert "not kept" in capsys.readouterr().err


@pytest.mark.slow
def test_the_first_page_needs_no_torch() -> None:
    code = "import sys; from app import first_page; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_what_another_version_measured_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    own = first_page._file()
    monkeypatch.setattr(first_page, "versions", lambda _: {"featcal": "0.1.0", "torch": "0"})
    assert first_page._file() != own

"""The kept first chart: the live numbers again, for the very same files only, without torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from tiny_text import write_text_suite

from app import opening, preview
from featcal.family.opening import Family
from featcal.figures import tables
from featcal.session.api import measure_drift


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEATCAL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_what_is_kept_comes_back(tiny: Family, cache: Path) -> None:
    table = tables.drift_table(measure_drift(tiny, samples=4))
    assert preview.read_kept() is None
    preview.keep(table)
    found = preview.read_kept()
    assert found is not None
    pd.testing.assert_frame_equal(found, table, check_dtype=False, rtol=1e-9)
    assert len(list(cache.iterdir())) == 1


def test_changed_files_are_measured_anew(tiny: Family, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preview.keep(tables.drift_table(measure_drift(tiny, samples=4)))
    monkeypatch.setattr(preview, "data_path", lambda name: tiny.suite.root)
    assert preview.read_kept() is None


def test_another_suite_leaves_what_is_kept_alone(tiny: Family, tmp_path: Path, cache: Path) -> None:
    preview.keep(tables.drift_table(measure_drift(tiny, samples=4)))
    before = {file: file.read_bytes() for file in cache.iterdir()}
    opening.prepare(str(write_text_suite(tmp_path / "text", "t5")))
    assert {file: file.read_bytes() for file in cache.iterdir()} == before
    opening._prepared.clear()


def test_a_folder_that_cannot_be_written_is_no_failure(
    tiny: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FEATCAL_CACHE", str(tmp_path / "file" / "cache"))
    preview.keep(tables.drift_table(measure_drift(tiny, samples=4)))
    assert "not kept" in capsys.readouterr().err


def test_the_first_chart_needs_no_torch() -> None:
    imports = "from app import preview"
    code = f"import sys; {imports}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])

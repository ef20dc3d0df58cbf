"""The Runs page without a browser."""

from __future__ import annotations

from pathlib import Path

import pytest
from app_pages import button, go, healthy, opened

pytestmark = [pytest.mark.usefixtures("instant_maps", "own_history"), pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def own_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache folder of the test's own."""
    monkeypatch.setenv("FEATCAL_CACHE", str(tmp_path / "cache"))


def test_smoke(tiny_suite_file: Path) -> None:
    app = opened(tiny_suite_file, "calibrate", rho="1.5", n="8", samples="8")
    assert healthy(app)
    go(app, "runs")
    assert healthy(app), app
    print(app.dataframe[0].value.T, [c.value for c in app.caption])
    button(app, "Run the sweep").click().run()
    assert healthy(app), app
    print(app.dataframe[0].value.T, [c.value for c in app.caption])

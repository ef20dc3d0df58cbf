"""The app in headless Chromium: what `docs/screenshots.py` has, and what moments look like from inside the page."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "docs"))

from screenshots import READY, Browser, chromium, running_app

__all__ = ["CHART", "READY", "Browser", "arguments", "chromium", "running_app", "settle"]

CHART = '[data-testid="stPlotlyChart"]'
SETTLED = 0.5
"""Seconds without a change after which a page counts as finished; not part of any figure."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Options that all browser benchmarks share."""
    found = shutil.which("chromium") or "chromium"
    parser.add_argument("--chromium", default=os.environ.get("CHROMIUM", found))


def settle(browser: Browser, seconds: float = 300) -> None:
    """Wait until the page has finished and stays so."""
    browser.wait(READY, seconds, steady=SETTLED)
    time.sleep(0.05)

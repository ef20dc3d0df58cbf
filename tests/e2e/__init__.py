"""Journeys through the app in a real browser, and many sessions at once: `make e2e`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

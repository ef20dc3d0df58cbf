"""Several people at once, each at another place, in a hurry."""

from __future__ import annotations

from pathlib import Path

import browser
import pytest
import sessions

pytestmark = [pytest.mark.e2e, pytest.mark.nightly]
ENOUGH = sessions.Wanted(compared=5, overtaken=5, seconds=240)
"""What the sessions go on for, however slow the machine is."""


def test_sessions_over_two_suites_see_no_error_and_equal_numbers(tmp_path: Path) -> None:
    """Suites that differ in the merger's scale alone: what one session computed must not reach the other's page."""
    suites = ["clip-mini", sessions.other_scale(tmp_path)]
    with browser.running_app(tmp_path) as server:
        log = sessions.load(server, suites, sessions=6, seconds=20, wanted=ENOUGH)
    assert not log.errors
    assert not log.differing

"""Long work in a browser: followed, cancelled, found again after a reload and by a server that was started anew."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import browser
import pytest
from playwright.sync_api import Browser, Page, expect

pytestmark = pytest.mark.e2e
PROGRAM = (str(Path(__file__).with_name("app_of_jobs.py")),)
PATIENCE = 120_000
"""Milliseconds for a process to start and to calibrate, on a machine that others use too."""


@pytest.fixture(autouse=True)
def own_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEATCAL_CACHE", str(tmp_path))


@contextmanager
def opened(chromium: Browser, path: str) -> Iterator[Page]:
    """A new server and a new visitor at an address of it."""
    with ExitStack() as stack:
        server = stack.enter_context(browser.running_app(program=PROGRAM))
        page = stack.enter_context(chromium.new_context()).new_page()
        page.set_default_timeout(PATIENCE)
        page.goto(server.address + path)
        yield page


def test_a_job_is_cancelled_where_it_is_watched(chromium: Browser) -> None:
    with opened(chromium, "/calibrate?rho=1.7&samples=256") as page:
        page.get_by_role("button", name="Start").click()
        expect(page.get_by_role("progressbar")).to_be_visible(timeout=PATIENCE)
        page.get_by_role("button", name="Cancel").click()
        expect(page.get_by_text("This was cancelled")).to_be_visible(timeout=PATIENCE)
        expect(page.get_by_role("progressbar")).to_have_count(0)
        page.get_by_test_id("stSidebarNavLink").filter(has_text="Jobs").click()
        expect(page.get_by_text("Nothing is running or in line.")).to_be_visible(timeout=PATIENCE)
        expect(page.get_by_text("· cancelled").first).to_be_visible()


def test_a_job_survives_a_reload_and_its_server(chromium: Browser) -> None:
    path = "/calibrate?rho=1.8&samples=256"
    with opened(chromium, path) as page:
        page.get_by_role("button", name="Start").click()
        expect(page.get_by_role("progressbar")).to_be_visible(timeout=PATIENCE)
        page.reload()
        expect(page.get_by_role("button", name="Cancel").or_(page.locator(browser.CHART)).first).to_be_visible(
            timeout=PATIENCE
        )
        expect(page.get_by_role("button", name="Start")).to_have_count(0)
    with opened(chromium, path) as page:
        expect(page.locator(browser.CHART)).to_have_count(3, timeout=PATIENCE)
        expect(page.get_by_role("button", name="Start")).to_have_count(0)


def test_a_page_that_was_stopped_says_so(chromium: Browser) -> None:
    with opened(chromium, "/drift") as page:
        browser.settle(page)
        notice = page.get_by_text("This page was stopped before it was whole")
        expect(notice).to_have_count(0)
        page.goto(page.url.split("?")[0] + "?n=256")
        page.get_by_role("button", name="Stop").click()
        expect(notice).to_be_visible(timeout=PATIENCE)
        page.get_by_role("button", name="Run the page again").click()
        browser.settle(page)
        expect(notice).to_have_count(0)

"""Long work in a browser: followed, cancelled, found again after a reload and by a server that was started anew."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import browser
import pytest
from playwright.sync_api import Page, expect

from e2e.conftest import Profile

pytestmark = pytest.mark.e2e
PROGRAM = (str(Path(__file__).with_name("app_of_jobs.py")),)
PATIENCE = 480_000
"""Milliseconds for a process to start and to calibrate, on a machine that others use too."""


class Server:
    """An app with jobs of its own, which starts when somebody comes; and starts anew once it was ended."""

    def __init__(self) -> None:
        self._running, self._address = ExitStack(), ""

    @property
    def address(self) -> str:
        if not self._address:
            self._address = self._running.enter_context(browser.running_app(program=PROGRAM)).address
        return self._address

    def end(self) -> None:
        self._running.close()
        self._address = ""


@pytest.fixture(scope="module")
def server(cheap_apps: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("FEATCAL_CACHE", str(tmp_path_factory.mktemp("jobs")))
        server = Server()
        yield server
        server.end()


Open = Callable[[str], Page]


@pytest.fixture
def opened(profile: Profile, server: Server) -> Iterator[Open]:
    """Opens an address of the server as a visitor who was never there."""
    with ExitStack() as stack:

        def come(path: str) -> Page:
            page = stack.enter_context(profile.new_page(server.address))
            page.set_default_timeout(PATIENCE)
            page.goto(server.address + path)
            return page

        yield come


def test_a_job_is_cancelled_where_it_is_watched(opened: Open) -> None:
    page = opened("/calibrate?rho=1.7&samples=256")
    page.get_by_role("button", name="Start").click()
    expect(page.get_by_role("progressbar")).to_be_visible(timeout=PATIENCE)
    page.get_by_role("button", name="Cancel").click()
    expect(page.get_by_text("This was cancelled")).to_be_visible(timeout=PATIENCE)
    expect(page.get_by_role("progressbar")).to_have_count(0)
    page.locator(".st-key-jobs").get_by_role("button").first.click()
    expect(page.get_by_text("Nothing is running or in line.")).to_be_visible(timeout=PATIENCE)
    expect(page.get_by_text("· cancelled").first).to_be_visible()


def test_a_job_survives_a_reload_and_its_server(opened: Open, server: Server) -> None:
    path = "/calibrate?rho=1.8&samples=64&n=16"
    page = opened(path)
    page.get_by_role("button", name="Start").click()
    expect(page.get_by_role("progressbar")).to_be_visible(timeout=PATIENCE)
    page.reload()
    expect(page.get_by_role("button", name="Cancel").or_(page.locator(browser.CHART)).first).to_be_visible(
        timeout=PATIENCE
    )
    expect(page.get_by_role("button", name="Start")).to_have_count(0)
    page.close()
    server.end()
    page = opened(path)
    expect(page.locator(browser.CHART)).to_have_count(2, timeout=PATIENCE)
    expect(page.get_by_role("button", name="Start")).to_have_count(0)


def test_a_sweep_goes_on_while_other_pages_are_looked_at(opened: Open) -> None:
    tab = "/calibrate?bench=Sweep+and+methods&samples=16&n=16"
    page = opened(f"{tab}&sweep_lam=0.05&sweep_rho=1.5,2&sweep_alpha=0.3")
    # In this app every calibration is a job, so that of the sliders is not made by looking here.
    expect(page.get_by_text("2 calibrations (2 new")).to_be_visible(timeout=PATIENCE)
    page.get_by_role("button", name="Run the sweep").click()
    expect(page.get_by_role("button", name="Cancel")).to_be_visible(timeout=PATIENCE)
    page.get_by_test_id("stSidebarNavLink").filter(has_text="Drift").click()
    expect(page.get_by_role("heading", level=1)).not_to_contain_text("tried", timeout=PATIENCE)
    page.get_by_test_id("stSidebarNavLink").filter(has_text="Calibrate").click()
    expect(page.get_by_text("2 calibrations (0 new)")).to_be_visible(timeout=PATIENCE)
    expect(page.get_by_role("button", name="Cancel")).to_have_count(0, timeout=PATIENCE)
    expect(page.get_by_role("button", name="Run the sweep")).to_be_disabled()


def test_a_page_that_was_stopped_says_so(opened: Open) -> None:
    page = opened("/drift?n=16")
    browser.settle(page)
    notice = page.get_by_text("This page was stopped before it was complete")
    expect(notice).to_have_count(0)
    page.goto(page.url.split("?")[0] + "?n=32")  # what this app is slow at
    page.get_by_role("button", name="Stop").click()
    expect(notice).to_be_visible(timeout=PATIENCE)
    page.get_by_role("button", name="Run the page again").click()
    browser.settle(page)
    expect(notice).to_have_count(0)

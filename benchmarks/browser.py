"""The app in a real browser: one way to start it, to open it and to wait for it. Tests and pictures take it from here.

The browser is the Chromium that the machine has (`CHROMIUM` names another one); Playwright drives it, downloads none.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from playwright.sync_api import Browser, Locator, Page, sync_playwright

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("verdict", "drift", "calibrate", "features", "cosines", "accuracy", "runs", "models")
PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
CHART = '[data-testid="stPlotlyChart"]'
READY = """(() => {
  const app = document.querySelector('[data-testid="stApp"]');
  if (!app || app.dataset.testScriptState !== 'notRunning') return false;
  const charts = [...document.querySelectorAll('[data-testid="stPlotlyChart"]')];
  const drawn = charts.every(chart => chart.querySelector('.js-plotly-plot:has(.main-svg)')?._fullLayout);
  return drawn && !document.querySelector('[data-stale="true"], [data-testid="stSkeleton"]');
})()"""
"""Streamlit has finished running and every chart is drawn."""
STEADY = f"""([steady, asked]) => {{
  const ready = window.ready?.asked === asked ? window.ready : (window.ready = {{asked, looks: 0}});
  ready.looks = {READY} ? ready.looks + 1 : 0;
  if (!ready.looks) ready.since = undefined;
  else ready.since ??= performance.now();
  return ready.looks > 16 * steady && performance.now() - ready.since >= 1000 * steady;
}}"""
"""Ready at every look for so many seconds since this was first asked; at several, as a browser that is too busy to look
is not at rest."""
SETTLED = 0.5
"""Seconds without a change after which a page counts as finished; not part of any figure."""


@dataclass(frozen=True)
class Server:
    """A running app."""

    address: str
    pid: int


def control(page: Page, key: str) -> Locator:
    """The place of a widget by its key; one that many pages have bears the page's name before it, and one that
    something else has changed the number of the change after it."""
    names = [f"st-key-{before}{key}" for before in ("", "home-", *(f"{name}-" for name in PAGES))]
    return page.locator(", ".join(f'.{name}, [class*="{name}--"]' for name in names))


class Slider:
    """One slider of the page, by its key."""

    def __init__(self, page: Page, key: str) -> None:
        self._page = page
        self._place = control(page, key)
        self._input = self._place.locator("input[type=range]")

    @property
    def value(self) -> str:
        """What it shows."""
        return str(self._input.get_attribute("aria-valuetext"))

    def step(self, key: str = "ArrowRight") -> None:
        """One value up (or what another key does), by the keyboard."""
        self._input.press(key)

    def drag(self, share: float) -> None:
        """Take the thumb to a share of the track and let it go."""
        self._place.scroll_into_view_if_needed()
        settle(self._page)  # what comes into the window may be drawn once more
        x, y, left, width = self._input.evaluate(
            "input => { const thumb = input.closest('[style*=\"left\"]').getBoundingClientRect();"
            "const track = input.closest('[role=group]').firstElementChild.getBoundingClientRect();"
            "return [thumb.x + thumb.width / 2, thumb.y + thumb.height / 2, track.x, track.width]; }"
        )
        mouse, target = self._page.mouse, left + share * width
        mouse.move(x, y)
        mouse.down()
        mouse.move((x + target) / 2, y)
        mouse.move(target, y)
        mouse.up()


def program() -> str | None:
    """The Chromium of this machine; None where there is none."""
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, PROGRAMS)), None)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Options that all programs with a browser share."""
    parser.add_argument("--chromium", default=program() or "chromium")


def free_port() -> int:
    """A port on which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running_app(
    folder: Path | None = None,
    program: Sequence[str] = ("-m", "featcal"),
    options: Sequence[str] = (),
    base: str = "",
) -> Iterator[Server]:
    """The app of this clone on a free port, started in a folder (here); `program` is what Python is told to run,
    `options` are further ones of `featcal app`, `base` is the path below which it serves."""
    port = free_port()
    places = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen(
        [sys.executable, *program, "app", "--no-browser", "--port", str(port), "--base-url", base, *options],
        stdout=sys.__stderr__,  # the programs print JSON; what went wrong in the app is said there too
        cwd=folder,
        env={**os.environ, "PYTHONPATH": places},
    )
    address = f"http://127.0.0.1:{port}{base}"
    try:
        wait_for_answer(f"{address}/_stcore/health")
        yield Server(address, process.pid)
    finally:
        process.terminate()
        process.wait()


@contextmanager
def chromium(executable: str, options: Sequence[str] = ()) -> Iterator[Browser]:
    """A headless browser; every page of its own context is a visitor that was never here before. `options` are its
    own."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=list(options))
        try:
            yield browser
        finally:
            browser.close()


def settle(page: Page, seconds: float = 300, steady: float = SETTLED) -> None:
    """Wait until the page has finished and stays so."""
    page.wait_for_function(STEADY, arg=[steady, time.monotonic()], polling=50, timeout=1000 * seconds)


def go(page: Page, name: str, seconds: float = 300, steady: float = SETTLED) -> None:
    """To another page of the app by its link in the sidebar, as a user goes; waits until it has finished."""
    page.get_by_test_id("stSidebarNavLink").filter(has_text=name.capitalize()).click()
    here = re.compile(rf"^(?!.*/({'|'.join(PAGES[1:])})(\?|$))" if name == "verdict" else rf"/{name}(\?.*)?$")
    page.wait_for_url(here)
    settle(page, seconds, steady)


def wait_for_answer(address: str, seconds: float = 60) -> None:
    """Until a server on this machine is up."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    started = time.perf_counter()
    while True:
        try:
            direct.open(address, timeout=5).close()
            return
        except OSError:
            if time.perf_counter() - started > seconds:
                raise
            time.sleep(0.05)

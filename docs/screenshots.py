"""Photograph every page of the app, for each embedded suite, in both themes: `python docs/screenshots.py [--out DIR]`.

Starts the app on a free port and drives a headless Chromium over its debugging protocol. A page is ready when
streamlit has finished running, every chart is drawn and nothing on it changes any more.
"""

from __future__ import annotations

import argparse
import base64
import itertools
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from websockets.sync.client import ClientConnection, connect

PAGES = ("drift", "calibrate", "features", "cosines", "accuracy", "suite")
SUITES = {"clip-mini": "", "t5-mini": "-t5"}
"""Suite → what the names of its pictures have between page and theme."""
THEMES = ("light", "dark")
WIDTH, HEIGHT = 1400, 900
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)
READY = """(() => {
  const app = document.querySelector('[data-testid="stApp"]');
  if (!app || app.dataset.testScriptState !== 'notRunning') return false;
  const charts = [...document.querySelectorAll('[data-testid="stPlotlyChart"]')];
  return charts.every(chart => chart.querySelector('.main-svg')) && !document.querySelector('[data-stale="true"]')
    && !document.querySelector('[data-testid="stSkeleton"]');
})()"""
CONTENT_HEIGHT = """Math.ceil(document.querySelector('[data-testid="stMainBlockContainer"]').scrollHeight)"""


class Browser:
    """One page of a headless Chromium."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._ids = itertools.count(1)
        self.call("Page.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send one command and wait for its answer; events in between are dropped."""
        number = next(self._ids)
        self._socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            answer: dict[str, Any] = json.loads(self._socket.recv(timeout=120))
            if answer.get("id") == number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return dict(answer["result"])

    def js(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        return result["result"].get("value")

    def wait(self, expression: str, seconds: float = 90, steady: float = 0.0) -> float:
        """Until the expression has been true for `steady` seconds; returns how long that took to begin."""
        started = since = time.perf_counter()
        while time.perf_counter() - started < seconds:
            if not self.js(expression):
                since = time.perf_counter()
            elif time.perf_counter() - since >= steady:
                return since - started
            time.sleep(0.02)
        raise TimeoutError(f"not true within {seconds} s: {expression}")

    def look(self, theme: str, height: int = HEIGHT) -> None:
        """Set the size of the window and the colour scheme that the system asks for."""
        self.call("Emulation.setDeviceMetricsOverride", width=WIDTH, height=height, deviceScaleFactor=1, mobile=False)
        feature = {"name": "prefers-color-scheme", "value": theme}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def click(self, selector: str, text: str = "") -> None:
        """Click the first element that matches the selector and contains the text."""
        every = f"[...document.querySelectorAll({json.dumps(selector)})]"
        find = f"{every}.find(e => e.textContent.includes({json.dumps(text)}))"
        self.wait(f"!!({find})")
        self.js(f"({find}).click()")

    def photograph(self, file: Path, theme: str, full: bool = True) -> None:
        """Write a PNG of the whole page (the window grows to its content), or of the window."""
        height = max(HEIGHT, int(self.js(CONTENT_HEIGHT)) + 20) if full else HEIGHT
        self.look(theme, height)
        self.wait(READY, steady=0.7)
        file.parent.mkdir(parents=True, exist_ok=True)
        shot = Image.open(BytesIO(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])))
        few_colours(shot.convert("RGB")).save(file, optimize=True)
        self.look(theme)


def few_colours(shot: Image.Image) -> Image.Image:
    """256 colours, a third of the bytes: the most frequent ones as they are, each other one by its nearest."""
    pixels = np.asarray(shot).reshape(-1, 3)
    colours, place, count = np.unique(pixels, axis=0, return_inverse=True, return_counts=True)
    rest = np.array(shot.quantize(192, dither=Image.Dither.NONE).getpalette()).reshape(-1, 3)[:192]
    palette = np.concatenate([colours[np.argsort(-count)[: 256 - len(rest)]], rest])
    parts = np.array_split(colours.astype(np.int32), len(colours) // 4096 + 1)
    nearest = np.concatenate([((part[:, None] - palette) ** 2).sum(2).argmin(1) for part in parts])
    few = Image.fromarray(nearest[place].reshape(shot.height, shot.width).astype(np.uint8), "P")
    few.putpalette(palette.astype(np.uint8).tobytes())
    return few


@contextmanager
def running_app(command: list[str] | None = None) -> Iterator[str]:
    """The app on a free port; yields its address."""
    port = _free_port()
    command = command or [sys.executable, "-m", "featcal", "app"]
    process = subprocess.Popen([*command, "--port", str(port)], stdout=subprocess.DEVNULL)
    try:
        _answer(f"http://127.0.0.1:{port}/_stcore/health")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


@contextmanager
def chromium(program: str) -> Iterator[Browser]:
    """A headless browser with an empty profile."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        port = _free_port()
        options = [f"--user-data-dir={profile}", f"--remote-debugging-port={port}", "about:blank"]
        process = subprocess.Popen([program, *FLAGS, *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            targets = json.loads(_answer(f"http://127.0.0.1:{port}/json/list"))
            page = next(target["webSocketDebuggerUrl"] for target in targets if target["type"] == "page")
            with connect(page, max_size=None) as connection:
                yield Browser(connection)
        finally:
            process.terminate()
            process.wait()


def tour(browser: Browser, address: str, suite: str, theme: str, out: Path) -> None:
    """Visit every page as a user would: calibrate first, so that the others have something to compare."""
    browser.look(theme)
    browser.call("Page.navigate", url=f"{address}/calibrate?suite={suite}")
    browser.wait(READY, seconds=240, steady=1.0)
    for page in PAGES:
        browser.click('[data-testid="stSidebarNavLink"]', page.capitalize())
        browser.wait(f"location.pathname.endsWith('{'' if page == 'drift' else page}')")
        browser.wait(READY, seconds=240, steady=1.0)
        if page == "accuracy":
            if browser.js("document.body.textContent.includes('Score the calibrated model')"):
                browser.click("button", "Score the calibrated model")
            browser.wait("document.body.textContent.includes('gap to the experts closed')", seconds=240)
        if page == "features":
            browser.wait("document.body.textContent.includes('Trustworthiness')")
        browser.wait(READY, steady=1.0)
        browser.photograph(out / f"{page}{SUITES[suite]}-{theme}.png", theme)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _answer(address: str, seconds: float = 60) -> bytes:
    """What a server on this machine says, once it is up."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    started = time.perf_counter()
    while True:
        try:
            with direct.open(address, timeout=5) as answer:
                return bytes(answer.read())
        except OSError:
            if time.perf_counter() - started > seconds:
                raise
            time.sleep(0.05)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "images")
    parser.add_argument("--suite", choices=[*SUITES], action="append", help="default: every embedded suite")
    parser.add_argument("--chromium", default=os.environ.get("CHROMIUM", "chromium"))
    options = parser.parse_args()
    with running_app() as address, chromium(options.chromium) as browser:
        for suite, theme in itertools.product(options.suite or SUITES, THEMES):
            tour(browser, address, suite, theme, options.out)
    print(f"pictures in {options.out}")


if __name__ == "__main__":
    main()

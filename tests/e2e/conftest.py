"""One app and one browser for all journeys; every test comes as visitors who were never there before."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import browser
import cpu_seconds
import psutil
import pytest
from playwright.sync_api import Browser, BrowserContext, Page

from e2e.visitor import Visitor

MAPS_AT_ONCE = Path(__file__).parents[1] / "fixtures" / "at_once"
WINDOW = {"width": 1280, "height": 900}
VISIT: dict[str, Any] = {"viewport": WINDOW, "reduced_motion": "reduce"}
"""Of a browser's visitor; nothing is drawn again and again while a page only waits."""
KEPT = "cookies,local_storage,indexeddb,cache_storage,service_workers"
"""What a visit leaves behind in a browser, but for scripts and pictures that were fetched."""


class Profile:
    """A browser profile for one visitor after the other, each of whom was never there before.

    Half of what a visit costs the processor is the compilation of the app's scripts. All pages of a profile are in one
    process, which keeps what it has compiled, and a page without a script keeps that process alive between visits.
    """

    def __init__(self, context: BrowserContext) -> None:
        self._context, self._keeper = context, context.new_page()

    def new_page(self, address: str) -> Page:
        """Open an empty page as somebody of whom the browser has nothing that an app at this address has left."""
        if not self._keeper.url.startswith(address):
            self._keeper.goto(f"{address}/_stcore/health")
        protocol = self._context.new_cdp_session(self._keeper)
        protocol.send("Storage.clearDataForOrigin", {"origin": address, "storageTypes": KEPT})
        protocol.detach()
        return self._context.new_page()


@dataclass(frozen=True)
class App:
    """A running app."""

    address: str
    folder: Path
    """Where it was started, so where it writes."""


@pytest.fixture(scope="session")
def executable() -> str:
    """The browser's program."""
    found = browser.program()
    if found is None:
        pytest.skip("no Chromium on this machine: install Debian's package chromium, or name one in CHROMIUM")
    return found


@pytest.fixture(scope="session")
def cheap_apps() -> Iterator[None]:
    """Apps whose process for maps does not compile first, as no journey looks at where a map has its points; and that
    compute in one thread, since two would wait for each other where browser and tests have the processor too."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", str(MAPS_AT_ONCE), prepend=os.pathsep)
        patched.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="session")
def app(executable: str, cheap_apps: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[App]:
    folder = tmp_path_factory.mktemp("served")
    with browser.running_app(folder) as server:
        yield App(server.address, folder)


@pytest.fixture(scope="session")
def chromium(executable: str) -> Iterator[Browser]:
    with browser.chromium(executable, ["--process-per-site"]) as running:
        yield running
        count_browser()


def count_browser() -> None:
    """Add what the browser has spent to what tests cost: no parent is told of it when it ends."""
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if "chrom" in process.name():
                cpu_seconds.elsewhere += sum(process.cpu_times()[:2])


@pytest.fixture(scope="session")
def profile(chromium: Browser) -> Iterator[Profile]:
    with chromium.new_context(**VISIT) as context:
        yield Profile(context)


@pytest.fixture
def newcomer(app: App, chromium: Browser, profile: Profile) -> Iterator[Callable[[], Visitor]]:
    """Makes visitors: the first with the profile that all tests share, further ones with a profile of their own."""
    with ExitStack() as stack:
        shared = [profile]

        def make() -> Visitor:
            if shared:
                page = shared.pop().new_page(app.address)
            else:
                page = stack.enter_context(chromium.new_context(**VISIT)).new_page()
            return Visitor(stack.enter_context(page), app.address)

        yield make


@pytest.fixture
def visitor(newcomer: Callable[[], Visitor]) -> Visitor:
    return newcomer()

"""One app and one browser for all journeys; every test comes as visitors who were never there before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import browser
import pytest
from playwright.sync_api import Browser

from e2e.visitor import Visitor


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
def app(executable: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[App]:
    folder = tmp_path_factory.mktemp("served")
    with browser.running_app(folder) as server:
        yield App(server.address, folder)


@pytest.fixture(scope="session")
def chromium(executable: str) -> Iterator[Browser]:
    with browser.chromium(executable) as running:
        yield running


@pytest.fixture
def newcomer(app: App, chromium: Browser) -> Iterator[Callable[[], Visitor]]:
    """Makes visitors with an empty profile each."""
    contexts = []

    def make() -> Visitor:
        contexts.append(chromium.new_context(viewport={"width": 1280, "height": 900}))
        return Visitor(contexts[-1].new_page(), app.address)

    yield make
    for context in contexts:
        context.close()


@pytest.fixture
def visitor(newcomer: Callable[[], Visitor]) -> Visitor:
    return newcomer()

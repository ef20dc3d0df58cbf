"""What a visitor does in the app and sees of it; how a page shows a calibrated model's options is known here alone."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

import browser
from playwright.sync_api import Page

ERRORS = '[data-testid="stException"], [data-testid="stAlertContentError"]'
TRACES = """place => Object.fromEntries(place.querySelector('.js-plotly-plot')._fullData.map(
  trace => [trace.name, Array.from(trace.y || [])]))"""
CUT_OFF = """() => ['stMetric', 'stButtonGroup', 'stButton']
  .flatMap(name => [...document.querySelectorAll(`[data-testid="stMain"] [data-testid="${name}"] *`)])
  .filter(e => e.checkVisibility() && e.clientWidth && e.scrollWidth > e.clientWidth + 1)
  .filter(e => getComputedStyle(e).overflowX !== 'visible')
  .map(e => e.innerText)"""
SIZE = """place => [Math.ceil(place.scrollHeight), [...place.querySelectorAll(
  ['Slider', 'Selectbox', 'MultiSelect', 'ButtonGroup', 'Checkbox', 'TextInput', 'NumberInput', 'TextArea']
    .map(name => `[data-testid="st${name}"]`).join())].filter(e => e.checkVisibility()).length]"""
DRESSED = """scheme => getComputedStyle(document.querySelector('.stApp')).colorScheme === scheme
  && document.getAnimations().every(one => one.playState !== 'running' || !(one instanceof CSSTransition))"""
SETTINGS = re.compile(r"λ\s*(\S+)\s*·\s*ρ\s*(\S+)\s*·\s*α\s*(\S+)\s*·\s*n\s*(\d+)")


@dataclass(frozen=True)
class Model:
    """The options that tell one calibrated model of a suite from another."""

    lam: float
    rho: float
    alpha: float
    samples: int

    def folder(self, suite: str) -> str:
        """The name of the folder that it is written to."""
        return f"{suite}-lam{self.lam:g}-rho{self.rho:g}-alpha{self.alpha:g}-n{self.samples}"

    def query(self) -> str:
        """The end of a link to it."""
        return f"lam={self.lam:g}&rho={self.rho:g}&alpha={self.alpha:g}&samples={self.samples}"


QUICK = Model(0.05, 2.0, 0.3, 16)
"""The defaults with few samples: whoever needs no other model takes this one, which the server computes once."""
QUICK_LINK = f"{QUICK.query()}&n=16"
MOST_TABS = 80
"""More than any page has places for the focus before its last control above the fold."""


class Visitor:
    """One person at one page of the app. Whatever it does, it waits until the page has finished and shows no error."""

    def __init__(self, page: Page, address: str) -> None:
        self.page = page
        self.hosts: set[str] = set()
        self._address = address
        page.set_default_timeout(60_000)  # of what takes no computation, on a machine that others use too
        page.on("request", self._note_host)

    def _note_host(self, request: object) -> None:
        host = urlsplit(str(getattr(request, "url", ""))).hostname
        if host:  # not data: and blob:
            self.hosts.add(host)

    def open(self, path: str) -> None:
        """Type an address: what follows the host."""
        self.page.goto(self._address + path, timeout=60_000)
        self.settle()

    def go(self, name: str) -> None:
        """Click a page in the sidebar."""
        browser.go(self.page, name)
        self.settle()

    def back(self) -> None:
        """Press the browser's Back."""
        self.page.go_back()
        self.settle()

    def reload(self) -> None:
        self.page.reload()
        self.settle()

    def click(self, label: str) -> None:
        """Press the button with this label."""
        self.page.get_by_role("button", name=label).click()
        self.settle()

    def tab_to(self, place: str) -> None:
        """Press Tab until the focus is at the place of a CSS selector, or in it."""
        for _ in range(MOST_TABS):
            self.page.keyboard.press("Tab")
            if self.page.evaluate("place => !!document.activeElement.closest(place)", place):
                return
        raise AssertionError(f"{self.address}: {MOST_TABS} Tabs do not lead to {place}")

    def press(self, key: str) -> None:
        """Press a key where the focus is."""
        self.page.keyboard.press(key)
        self.settle()

    def step(self, key: str, times: int = 1) -> None:
        """Move a slider up by the keyboard."""
        for _ in range(times):
            browser.Slider(self.page, key).step()
            self.settle()

    def drag(self, key: str, share: float) -> None:
        """Move a slider to a share of its track by the mouse."""
        browser.Slider(self.page, key).drag(share)
        self.settle()

    def choose(self, key: str, option: str) -> None:
        """Pick an option of a list."""
        browser.control(self.page, key).locator("input").click()
        self.page.get_by_role("option", name=option, exact=True).click()
        self.settle()

    def unfold(self) -> None:
        """Open everything that is folded."""
        self.page.evaluate("document.querySelectorAll('details:not([open]) > summary').forEach(e => e.click())")
        self.page.wait_for_function("!document.querySelector('details:not([open])')")
        self.settle()

    def dress(self, scheme: Literal["light", "dark"]) -> None:
        """Prefer a colour scheme, and wait until no colour is on its way to another."""
        self.page.emulate_media(color_scheme=scheme)
        self.page.wait_for_function(DRESSED, arg=scheme)
        self.settle()

    def settle(self) -> None:
        browser.settle(self.page)
        errors = self.page.locator(ERRORS).all_inner_texts()
        assert not errors, f"{self.address} shows {errors}"

    @property
    def address(self) -> str:
        """What the address bar shows, without the host."""
        return self.page.url.removeprefix(self._address)

    @property
    def place(self) -> str:
        """The name of the page."""
        return urlsplit(self.address).path.strip("/") or "verdict"

    @property
    def heading(self) -> str:
        """The title of the page."""
        assert not self.page.get_by_text("Page not found").count()
        return self.page.get_by_role("heading", level=1).first.inner_text()

    @property
    def levels(self) -> list[int]:
        """Levels of the headings that the page shows, from top to bottom."""
        shown = self.page.locator("[data-testid='stMain'] :is(h1, h2, h3, h4, h5, h6):visible")
        return [int(name[1]) for name in shown.evaluate_all("all => all.map(one => one.tagName)")]

    @property
    def history(self) -> int:
        """How many entries the browser's history has."""
        return int(self.page.evaluate("history.length"))

    @property
    def model(self) -> Model | None:
        """The calibrated model that this page shows or compares with; None where there is none."""
        sliders = [browser.Slider(self.page, key) for key in ("lam", "rho", "alpha", "samples")]
        held = [slider.value for slider in sliders] if browser.control(self.page, "lam").count() else None
        said = self.page.locator(".st-key-model-settings")
        if not said.count():
            return _model(held) if held else None
        words = said.inner_text()
        found = SETTINGS.search(words)
        assert found, f"{self.address} shows of its model only {words!r}"
        if held:
            assert _model(held) == _model(found.groups()), f"{self.address}: sliders differ from {words!r}"
        return _model(found.groups())

    @property
    def n(self) -> int:
        """How many samples per task this page measures on."""
        return int(self.value("n").split()[0])

    def value(self, key: str) -> str:
        """What stands in a field."""
        return browser.control(self.page, key).locator("input").input_value()

    def chart(self, key: str) -> dict[str, list[float]]:
        """Heights of every trace of a chart, by its name."""
        traces: dict[str, list[float]] = self.page.locator(f".st-key-{key}").evaluate(TRACES)
        return traces

    def metric(self, label: str) -> float:
        """The number on a card."""
        card = self.page.get_by_test_id("stMetric").filter(has_text=label)
        return float(card.get_by_test_id("stMetricValue").inner_text().split()[0])

    def result(self, label: str) -> float:
        """The number of the repair on a card of the headline, which stands after the arrow."""
        card = self.page.locator(".st-key-headline").get_by_test_id("stMetric").filter(has_text=label)
        said = card.get_by_test_id("stMetricValue").inner_text()
        found = re.search(r"\S+ → (\d+\.\d+)", said)
        assert found, f"{self.address} says {said!r}"
        return float(found.group(1))

    def resize(self, width: int, height: int = 900) -> None:
        """Give the window another size, in pixels."""
        self.page.set_viewport_size({"width": width, "height": height})
        self.settle()

    def cut_off(self, width: int) -> list[str]:
        """Texts of cards and buttons that are not wholly to be seen in a window of this width."""
        self.resize(width)
        found: list[str] = self.page.evaluate(CUT_OFF)
        return found

    def size(self, width: int) -> tuple[int, int]:
        """How high the page is in a window of this width, in pixels, and how many controls its body shows."""
        self.resize(width)
        height, controls = self.page.get_by_test_id("stMainBlockContainer").evaluate(SIZE)
        return height, controls

    def walk(self, names: Iterable[str]) -> dict[str, Model | None]:
        """Go through pages; the model on each that compares."""
        shown = {}
        for name in names:
            self.go(name)
            shown[name] = self.model
        return shown


def _model(values: Iterable[str]) -> Model:
    lam, rho, alpha, samples = values
    return Model(float(lam), float(rho), float(alpha), int(samples))

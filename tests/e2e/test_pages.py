"""What every page owes its visitors: numbers that can be read, nothing that shuts people out, formulas, an address, no
call to other hosts, and little to scroll."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import browser
import pytest
from browser import PAGES
from playwright.sync_api import Browser, expect
from turns import NIGHTLY

from e2e.conftest import App, Profile
from e2e.visitor import QUICK_LINK, Visitor

pytestmark = pytest.mark.e2e
WIDTHS = (390, 800, 960, 1024, 1280, 1920) if NIGHTLY else (390, 800, 1280)
"""Of windows: a phone, the narrowest with the sidebar beside the page, and a usual one; in a night those between."""
NUMBERED = ("verdict", "drift", "calibrate", "features", "accuracy", "models")
"""Pages whose first numbers stand on cards."""
QUICK = f"{QUICK_LINK}&sources=true"
SCHEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")
RULES = {"light": None, "dark": ["color-contrast"]}
"""What is looked for in a scheme: all of it, then what another scheme can change."""
AXE = files("axe_playwright_python").joinpath("axe.min.js").read_text(encoding="utf-8")
FOUND = """async rules => (await axe.run(document, {resultTypes: ['violations'], ...rules && {runOnly: rules}}))
  .violations
  .filter(one => ['serious', 'critical'].includes(one.impact))
  .map(one => [one.id, ...one.nodes.slice(0, 3).map(node => `${node.html.slice(0, 160)}: ${node.failureSummary}`)])"""

COVERED_NO_MORE = """document.querySelector('[data-testid="stSidebar"]').getBoundingClientRect().right < 40"""
SMALL = """() => [...document.querySelectorAll('[data-testid="stMain"] :is(button, summary)')]
  .map(e => [e.getBoundingClientRect(), e.getAttribute('aria-label') || e.innerText])
  .filter(([box]) => box.width && box.height && (box.width < 23.5 || box.height < 23.5))
  .map(([box, name]) => `${name}: ${box.width} x ${box.height}`)"""
UNFORMATTED = r"""() => [...document.querySelectorAll('[data-testid="stMarkdownContainer"]')].flatMap(place => {
  const bad = [...place.querySelectorAll('.katex-error')].map(e => e.title || e.innerText);
  const words = place.cloneNode(true);
  words.querySelectorAll('.katex').forEach(e => e.remove());
  return [...bad, ...(words.textContent.match(/\\[a-zA-Z]+|\$/g) || [])];
})"""
"""Formulas that are shown as their source."""
ABOVE_TABLES = """() => [...document.querySelectorAll('[data-testid="stDataFrame"]')].flatMap(table => {
  const place = table.closest('[data-testid="stElementContainer"]'), before = place.previousElementSibling;
  const tools = place.querySelector('[data-testid="stElementToolbar"]');
  return tools && before ? [tools.getBoundingClientRect().top - before.getBoundingClientRect().bottom] : [];
})"""
"""Pixels between the tools of every table and what stands above it."""


@dataclass(frozen=True)
class Seen:
    """What a visitor sees of one page, all of it unfolded."""

    heading: str
    levels: list[int]
    """Levels of its headings, from top to bottom."""
    serious: dict[str, list[Any]]
    """Colour scheme → serious and critical findings of axe-core, each with its first places."""
    cut_off: dict[int, list[str]]
    """Width of the window → texts of cards and buttons that are not wholly to be seen."""
    cards: int
    size: tuple[int, int]
    """Height in pixels in a window of 1400 pixels, and number of controls beside the sidebar's."""
    hosts: frozenset[str]
    """Where the browser has asked for anything until then."""


def path(name: str) -> str:
    """The first part of a page's address."""
    return "/" if name == "verdict" else f"/{name}"


def look(visitor: Visitor, name: str) -> Seen:
    """Open a page by its address and look at it in all ways."""
    visitor.open(f"{path(name)}?{QUICK}")
    score = visitor.page.get_by_role("button", name="Score calibrated")
    if name == "accuracy" and score.count():
        visitor.click("Score calibrated")
    size = visitor.size(1400)
    cards = visitor.page.get_by_test_id("stMetric").count()
    cut_off = {width: found for width in WIDTHS if name in NUMBERED and (found := visitor.cut_off(width))}
    visitor.page.set_viewport_size({"width": 1280, "height": 900})
    visitor.unfold()
    tools = visitor.page.get_by_test_id("stPopover").get_by_role("button", name="Table")
    if tools.count():
        tools.first.click()
    visitor.page.evaluate(AXE)
    serious = {}
    for scheme in SCHEMES:
        visitor.dress(scheme)
        if found := visitor.page.evaluate(FOUND, RULES[scheme]):
            serious[scheme] = found
    return Seen(visitor.heading, visitor.levels, serious, cut_off, cards, size, frozenset(visitor.hosts))


@pytest.fixture(scope="module")
def seen(app: App, profile: Profile) -> dict[str, Seen]:
    """Every page of the suite that the app opens on; one visit for all tests."""
    with profile.new_page(app.address) as page:
        visitor = Visitor(page, app.address)
        return {name: look(visitor, name) for name in PAGES}


def test_nothing_serious_is_found_on_any_page(seen: dict[str, Seen]) -> None:
    assert {name: page.serious for name, page in seen.items() if page.serious} == {}


def test_a_page_has_one_title_and_no_level_of_headings_is_left_out(seen: dict[str, Seen]) -> None:
    for page in seen.values():
        assert (page.levels[0], page.levels.count(1)) == (1, 1)
        assert all(below <= above + 1 for above, below in pairwise(page.levels))


def test_no_number_and_no_button_is_cut_off(seen: dict[str, Seen]) -> None:
    assert all(seen[name].cards for name in NUMBERED)
    assert {name: page.cut_off for name, page in seen.items() if page.cut_off} == {}


def test_a_page_is_read_without_much_scrolling_and_has_few_controls(seen: dict[str, Seen]) -> None:
    # The Runs page has a chart, the list of runs and that of checkpoints; Features has a search.
    height, controls = {"runs": 2200}, {"features": 9}
    long = {name: page.size[0] for name, page in seen.items() if page.size[0] > height.get(name, 1600)}
    full = {name: page.size[1] for name, page in seen.items() if page.size[1] > controls.get(name, 8)}
    assert (long, full) == ({}, {})


def test_tokens_above_picked_samples_are_read_without_much_scrolling(visitor: Visitor) -> None:
    visitor.open(f"/drift?{QUICK}&tab=Token+by+token&picked=1,3,5,8,12")
    assert visitor.page.locator(".st-key-selected-samples").count()
    assert visitor.page.locator(".st-key-tokens-1").count()
    assert visitor.size(1400)[0] <= 1700


def test_every_formula_is_set(chromium: Browser, tmp_path: Path) -> None:
    """All explanations on one page, of which a visitor opens one at a time."""
    with browser.running_app(tmp_path, (str(Path(__file__).with_name("app_of_texts.py")),)) as server:
        page = chromium.new_page()
        page.goto(server.address)
        browser.settle(page)
        formulas, wrong = page.locator(".katex").count(), page.evaluate(UNFORMATTED)
        page.close()
    assert wrong == []
    assert formulas >= 70


def test_every_page_is_reached_by_its_link_and_none_asks_other_hosts(visitor: Visitor, seen: dict[str, Seen]) -> None:
    visitor.open(f"/?{QUICK}")  # what `seen` has computed
    for name in PAGES[1:]:
        visitor.page.get_by_test_id("stSidebarNavLink").filter(has_text=name.capitalize()).click()
        expect(visitor.page.get_by_role("heading", level=1).first).to_have_text(seen[name].heading, timeout=60_000)
        assert visitor.place == name
    visitor.settle()
    visitor.go("verdict")
    assert visitor.heading == seen["verdict"].heading
    assert len({page.heading for page in seen.values()}) == len(PAGES)
    assert visitor.hosts.union(*(page.hosts for page in seen.values())) == {"127.0.0.1"}


def test_on_a_phone_a_chosen_page_is_seen_and_nothing_is_too_small_or_hidden_from_a_finger(
    app: App, chromium: Browser
) -> None:
    with chromium.new_context(viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True) as phone:
        visitor = Visitor(phone.new_page(), app.address)
        visitor.open(f"/models?{QUICK}")
        tools = visitor.page.evaluate(ABOVE_TABLES)
        assert tools
        assert min(tools) >= 0  # nothing shows them to whoever has no mouse, so they must not cover anything
        visitor.page.get_by_test_id("stExpandSidebarButton").click()
        visitor.go("calibrate")
        visitor.page.wait_for_function(COVERED_NO_MORE, timeout=10_000)
        assert visitor.page.evaluate(SMALL) == []

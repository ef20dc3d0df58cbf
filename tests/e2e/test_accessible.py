"""What axe-core finds on every page, in either theme: nothing serious; and what it does not look at on a phone."""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files
from typing import Any, Literal

import pytest
from browser import PAGES

from e2e.visitor import Model, Visitor

pytestmark = pytest.mark.e2e
QUICK = Model(0.05, 1.5, 0.3, 16).query() + "&n=16&b=calibrated"
AXE = files("axe_playwright_python").joinpath("axe.min.js").read_text(encoding="utf-8")
FOUND = """async () => (await axe.run(document, {resultTypes: ['violations']})).violations
  .filter(one => ['serious', 'critical'].includes(one.impact))
  .map(one => [one.id, ...one.nodes.slice(0, 3).map(node => `${node.html.slice(0, 160)}: ${node.failureSummary}`)])"""

COVERED_NO_MORE = """document.querySelector('[data-testid="stSidebar"]').getBoundingClientRect().right < 40"""
SMALL = """() => [...document.querySelectorAll('[data-testid="stMain"] :is(button, summary)')]
  .map(e => [e.getBoundingClientRect(), e.getAttribute('aria-label') || e.innerText])
  .filter(([box]) => box.width && box.height && (box.width < 23.5 || box.height < 23.5))
  .map(([box, name]) => `${name}: ${box.width} x ${box.height}`)"""


def findings(visitor: Visitor) -> list[Any]:
    """Serious and critical ones, each with its first places."""
    visitor.page.evaluate(AXE)
    found: list[Any] = visitor.page.evaluate(FOUND)
    return found


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_serious_is_found_on_any_page(
    newcomer: Callable[[], Visitor], scheme: Literal["light", "dark"]
) -> None:
    visitor, found = newcomer(), {}
    visitor.page.emulate_media(color_scheme=scheme)
    for name in PAGES:
        visitor.open(f"/{'' if name == 'drift' else name}?{QUICK}")
        visitor.unfold()
        if here := findings(visitor):
            found[name] = here
    assert found == {}


def test_on_a_phone_a_chosen_page_is_seen_and_what_is_touched_is_large_enough(newcomer: Callable[[], Visitor]) -> None:
    visitor = newcomer()
    visitor.page.set_viewport_size({"width": 390, "height": 844})
    visitor.open(f"/suite?{QUICK}")
    visitor.page.get_by_test_id("stExpandSidebarButton").click()
    visitor.go("calibrate")
    visitor.page.wait_for_function(COVERED_NO_MORE, timeout=10_000)
    assert visitor.page.evaluate(SMALL) == []

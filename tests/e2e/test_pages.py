"""What every page owes its visitors: numbers that can be read, formulas, an address, and no call to other hosts."""

from __future__ import annotations

import pytest
from browser import PAGES

from e2e.visitor import Model, Visitor

pytestmark = pytest.mark.e2e
WIDTHS = (390, 800, 960, 1024, 1280, 1920)
QUICK = Model(0.05, 1.5, 0.3, 16).query() + "&n=16&b=calibrated"


@pytest.mark.parametrize("name", ["drift", "calibrate", "features", "accuracy", "suite"])
def test_no_number_and_no_button_is_cut_off(visitor: Visitor, name: str) -> None:
    visitor.open(f"/{'' if name == 'drift' else name}?{QUICK}")
    if name == "accuracy" and not visitor.page.get_by_text("gap to the experts closed").count():
        visitor.click("Score the calibrated model")
    assert visitor.page.get_by_test_id("stButtonGroup" if name == "drift" else "stMetric").count()
    assert {width: cut for width in WIDTHS if (cut := visitor.cut_off(width))} == {}


@pytest.mark.parametrize("suite", ["clip-mini", "t5-mini"])
def test_every_formula_is_set(visitor: Visitor, suite: str) -> None:
    wrong, formulas = {}, 0
    for name in PAGES:
        visitor.open(f"/{'' if name == 'drift' else name}?suite={suite}&{QUICK}&sources=true")
        visitor.unfold()
        formulas += visitor.page.locator(".katex").count()
        if found := visitor.unformatted():
            wrong[name] = found
    assert wrong == {}
    assert formulas >= 30


def test_nothing_is_asked_of_other_hosts(visitor: Visitor) -> None:
    visitor.open("/")
    visitor.walk(PAGES[1:])
    assert visitor.hosts == {"127.0.0.1"}


def test_every_page_has_an_address(visitor: Visitor) -> None:
    def heading() -> str:
        assert not visitor.page.get_by_text("Page not found").count()
        return visitor.page.get_by_role("heading", level=2).first.inner_text()

    visitor.open("/")
    found = {}
    for name in PAGES:
        visitor.go(name)
        found[name] = heading()
    assert len(set(found.values())) == len(PAGES)
    for name in PAGES:
        visitor.open(f"/{name}")
        assert heading() == found[name]

"""A lasso on the map of features picks the samples inside it, for every model and every page."""

from __future__ import annotations

from itertools import pairwise
from typing import Any
from urllib.parse import parse_qs, urlsplit

import browser
import pytest

from e2e.visitor import QUICK_LINK, Visitor

pytestmark = pytest.mark.e2e
LINK = f"/features?{QUICK_LINK}&beside=calibrated&map=PCA"
ON_SCREEN = """place => {
  const plot = place.querySelector('.js-plotly-plot'), box = plot.getBoundingClientRect();
  const {xaxis: x, yaxis: y} = plot._fullLayout;
  return plot._fullData.filter(trace => trace.customdata).flatMap(trace => Array.from(trace.x, (_, i) => ({
    model: trace.name, id: trace.customdata[i],
    x: box.x + x._offset + x.c2p(trace.x[i]), y: box.y + y._offset + y.c2p(trace.y[i])})));
}"""
LIT = """place => Object.fromEntries(place.querySelector('.js-plotly-plot')._fullData
  .filter(trace => trace.customdata)
  .map(trace => [trace.name, (trace.selectedpoints || []).map(i => trace.customdata[i])]))"""


def on_screen(visitor: Visitor, chart: str = "feature-map") -> list[dict[str, Any]]:
    """Return the place of every sample of a chart, in pixels of the window."""
    found: list[dict[str, Any]] = visitor.page.locator(f".st-key-{chart}").evaluate(ON_SCREEN)
    return found


def picked(visitor: Visitor) -> list[int]:
    """What the address says."""
    return [int(one) for one in parse_qs(urlsplit(visitor.page.url).query).get("picked", [""])[0].split(",") if one]


def lit(visitor: Visitor, chart: str) -> dict[str, list[int]]:
    """Ids of the samples that a chart lights, by trace."""
    found: dict[str, list[int]] = visitor.page.locator(f".st-key-{chart}").evaluate(LIT)
    return found


def draw_around(visitor: Visitor, left: float, top: float, right: float, bottom: float) -> None:
    """A lasso along the edges of a rectangle."""
    mouse = visitor.page.mouse
    mouse.move(left, top)
    mouse.down()
    for x, y in ((right, top), (right, bottom), (left, bottom), (left, top + 1)):
        mouse.move(x, y, steps=8)
    mouse.up()
    visitor.page.wait_for_url("**picked=**")
    visitor.settle()


def test_a_lasso_picks_the_samples_inside_it(visitor: Visitor) -> None:
    visitor.open(LINK)
    visitor.page.locator(".st-key-feature-map").scroll_into_view_if_needed()
    visitor.settle()  # a chart that comes into the window may be drawn once more
    points = on_screen(visitor)
    assert {one["model"] for one in points} == {"expert", "merged", "calibrated"}, visitor.address
    across, up = (sorted(one[axis] for one in points) for axis in ("x", "y"))
    gaps = [(right - left, (left + right) / 2) for left, right in pairwise(across[12:-12])]
    point = points[0]
    visitor.page.mouse.move(point["x"] - 20, point["y"] - 20)
    visitor.page.mouse.move(point["x"], point["y"], steps=4)
    picture = visitor.page.locator(".featcal-hover-picture")
    picture.wait_for(state="visible")
    places = {f"{-96 * (one['id'] % 4)}px {-96 * (one['id'] // 4)}px" for one in points}  # four in a row of the sheet
    assert picture.evaluate("place => place.style.backgroundPosition").replace("-0px", "0px") in places
    middle = max(gaps)[1]  # far from any point: what lies on the edge is in or out by the rounding of a pixel
    left, top, bottom = across[0] - 6, up[0] - 6, up[-1] + 6
    inside = sorted({one["id"] for one in points if one["x"] < middle})
    assert 0 < len(inside) < 16
    draw_around(visitor, left, top, middle, bottom)
    assert picked(visitor) == inside

    shown = lit(visitor, "feature-map")
    assert shown == dict.fromkeys(("expert", "merged", "calibrated"), inside), visitor.address
    panel = visitor.page.get_by_test_id("stMain").inner_text()
    assert f"{len(inside)} of 16 validation samples of" in panel

    visitor.choose("colour", "class")
    assert picked(visitor) == inside
    visitor.go("cosines")
    visitor.go("features")
    assert picked(visitor) == inside
    assert lit(visitor, "feature-map") == shown
    visitor.reload()
    assert picked(visitor) == inside


def test_what_is_drawn_around_is_seen_on_every_page(visitor: Visitor) -> None:
    visitor.open(LINK)
    visitor.page.locator(".st-key-feature-map").scroll_into_view_if_needed()
    visitor.settle()
    points = on_screen(visitor)
    left, top, right, bottom = (
        end(one[axis] for one in points) + room for end, room in ((min, -6), (max, 6)) for axis in ("x", "y")
    )
    draw_around(visitor, left, top, (left + right) / 2, bottom)
    ids = picked(visitor)
    assert 0 < len(ids) <= 16
    bar = visitor.page.locator(".st-key-selected-samples")
    said = bar.inner_text()
    assert f"{len(ids)} of 16 validation samples" in said
    pictures = [one.bounding_box() for one in bar.locator("img").all()]
    assert len(pictures) == len(ids)
    assert len({round(one["y"]) for one in pictures}) == 1  # all in one line, none hidden below it
    for page, chart in (("cosines", "b"), ("drift", "margins"), ("accuracy", None)):
        visitor.go(page)
        assert picked(visitor) == ids
        assert bar.inner_text() == said, page
        assert bar.bounding_box()["y"] < 900, page  # in the window, however long the page is
        if page == "drift":
            visitor.page.get_by_role("tab", name="More views").click()
            visitor.settle()
            visitor.page.get_by_role("radio", name="Decisions").click()
            visitor.settle()
        if chart is not None:
            assert set(map(tuple, lit(visitor, chart).values())) == {tuple(ids)}, page
    visitor.go("cosines")
    visitor.click("Clear the selection")
    assert picked(visitor) == []
    assert not bar.count()
    assert set(map(tuple, lit(visitor, "b").values())) == {()}
    visitor.page.locator(".st-key-b").scroll_into_view_if_needed()
    visitor.settle()
    points = on_screen(visitor, "b")
    across = sorted(one["x"] for one in points)
    up = [one["y"] for one in points]
    in_window = min(up) > 0 and max(up) < 900
    assert in_window, "the chart is not in the window"
    middle = max((b - a, (a + b) / 2) for a, b in pairwise(across[2:-2]))[1]
    draw_around(visitor, across[0] - 6, min(up) - 6, middle, max(up) + 6)
    again = sorted({one["id"] for one in points if one["x"] < middle})
    assert picked(visitor) == again
    assert lit(visitor, "b") == {"a sample": again}
    visitor.go("features")
    assert set(map(tuple, lit(visitor, "feature-map").values())) == {tuple(again)}


def test_samples_are_picked_by_keyboard(visitor: Visitor) -> None:
    visitor.open(f"{LINK}&layer=block%201")
    field = browser.control(visitor.page, "picked").locator("input")
    field.press_sequentially("5:")  # the beginning of its name; above the names is one for all of them
    field.press("Enter")
    visitor.page.wait_for_url("**picked=5**")
    visitor.settle()
    shown = lit(visitor, "feature-map")["expert"]
    assert 5 in shown
    assert shown == picked(visitor)  # whatever else the typed text fits

"""What a newcomer wants to know of a merge, and how many clicks that takes."""

from __future__ import annotations

import re

import pytest

from e2e.conftest import App
from e2e.visitor import QUICK_LINK, Model, Visitor

pytestmark = pytest.mark.e2e
QUESTIONS = {
    "which layer": r"Block \d causes the largest part of it, \d+ %",
    "which task": r"Worst task: '\w+', \d+\.\d %, its expert \d+\.\d %",
    "whose fault": r"is inherited: \d\.\d\d from earlier layers, \d\.\d\d its own mismatch",
    "how much is repaired": r"raises the average accuracy to \d+\.\d % \(\+.*\), which closes \d+ % of the gap",
}


def test_five_questions_are_answered_within_three_clicks(visitor: Visitor, app: App) -> None:
    visitor.open("/")
    said = visitor.page.get_by_test_id("stMain").inner_text().replace("\u00a0", " ")
    assert {asked for asked, answer in QUESTIONS.items() if not re.search(answer, said)} == set()
    visitor.click("Repair it")
    assert (visitor.place, visitor.heading) == ("calibrate", "Repair it in closed form")
    (repaired,) = re.findall(r"the average accuracy to (\d+\.\d) %", said)
    assert visitor.result("Accuracy") == float(repaired)
    visitor.click("Write the checkpoint")
    folder = app.folder / Model(0.05, 2.0, 0.3, 64).folder("clip-mini")
    assert (folder / "model.safetensors").is_file()
    assert folder.name in visitor.page.get_by_test_id("stAlertContentSuccess").last.inner_text()


def test_pages_to_begin_with_are_short(visitor: Visitor) -> None:
    visitor.page.set_viewport_size({"width": 1400, "height": 900})
    visitor.open("/?suite=clip-mini")  # a link: without the tour
    for name in ("verdict", "drift"):
        if visitor.place != name:
            visitor.go(name)
        main = visitor.page.get_by_test_id("stMainBlockContainer")
        assert main.evaluate("place => place.scrollHeight") < 1600, name
        assert count_controls(visitor, "stMain") <= 30, name
        assert count_controls(visitor, "stSidebar") <= 12, name
    visitor.go("calibrate")
    assert count_controls(visitor, "stMain") <= 30
    assert count_controls(visitor, "stSidebar") <= 12


KINDS = ("ButtonGroup", "Selectbox", "Slider", "Checkbox", "Button", "Popover", "TextInput", "Tab", "SidebarNavLink")


def count_controls(visitor: Visitor, place: str) -> int:
    """How many controls are to be seen in a part of the window; a row of choices is one."""
    names = ", ".join(f'[data-testid="{place}"] [data-testid="st{kind}"]:visible' for kind in KINDS)
    return visitor.page.locator(names).count()


INSIDE = """names => names.flatMap(name => [...document.querySelectorAll(`.st-key-cockpit ${name}`)]
  .map(place => place.getBoundingClientRect()).map(box =>
    [name, box.width > 0 && box.top >= 0 && box.bottom <= innerHeight && box.right <= innerWidth]))"""


def test_sliders_result_and_charts_are_in_one_window(visitor: Visitor) -> None:
    visitor.page.set_viewport_size({"width": 1400, "height": 900})
    visitor.open(f"/calibrate?{QUICK_LINK}")
    slider, chart, write = (
        '[data-testid="stSlider"]',
        '[data-testid="stPlotlyChart"]',
        '.st-key-result [data-testid="stBaseButton-primary"]',
    )
    for width, height in ((1400, 900), (1280, 720)):
        visitor.resize(width, height)
        seen = visitor.page.evaluate(INSIDE, [slider, chart, write])
        assert [name for name, _ in seen if name != write] == [slider] * 4 + [chart] * 2
        numbers = visitor.page.locator('.st-key-headline [data-testid="stMetricValue"]')
        assert len({*numbers.evaluate_all("all => all.map(one => one.getBoundingClientRect().top)")}) == 1
        assert visitor.page.locator(".st-key-result").get_by_role("button", name="Write the checkpoint").is_visible()
        assert [name for name, inside in seen if not inside] == [], width


def test_moves_are_undone_by_keys_and_models_come_back_by_a_click(visitor: Visitor) -> None:
    visitor.open(f"/calibrate?{QUICK_LINK}")
    start = visitor.model
    visitor.step("rho", 2)
    moved, result = visitor.model, visitor.result("Accuracy")
    assert moved == Model(0.05, 2.2, 0.3, 16)
    visitor.page.keyboard.press("Control+z")
    visitor.settle()
    assert visitor.model == Model(0.05, 2.1, 0.3, 16)
    visitor.page.keyboard.press("Control+Shift+z")
    visitor.settle()
    assert (visitor.model, visitor.result("Accuracy")) == (moved, result)
    visitor.page.get_by_role("textbox", name="Folder to write").press("Control+z")  # what was typed there, no option
    visitor.settle()
    assert visitor.model == moved
    visitor.page.locator(".st-key-chip-0 button").first.click()
    visitor.settle()
    assert visitor.model == start


def test_tour_and_cockpit_go_by_keys_alone(visitor: Visitor, app: App) -> None:
    visitor.open("/")
    for step, place in enumerate(["verdict", "drift", "calibrate", "features", "accuracy"], 1):
        assert visitor.place == place
        box, bar = (visitor.page.locator(one).bounding_box() for one in (".st-key-tour", '[data-testid="stHeader"]'))
        assert box is not None
        assert bar is not None
        assert box["y"] >= bar["y"] + bar["height"]  # the header would hide its upper edge
        assert f"First visit, {step} of 5" in visitor.page.locator(".st-key-tour").inner_text()
        if place != "accuracy":
            visitor.tab_to(".st-key-tour-next")
            visitor.press("Enter")
    visitor.tab_to(".st-key-tour-leave")
    visitor.press("Enter")
    assert not visitor.page.locator(".st-key-tour").count()
    visitor.page.reload()  # the focus is at the top again, where the menu stands
    visitor.settle()
    visitor.tab_to('[data-testid="stSidebarNavLink"][href$="/calibrate"]')
    visitor.press("Enter")
    assert (visitor.place, visitor.model) == ("calibrate", Model(0.05, 2.0, 0.3, 64))
    visitor.tab_to(".st-key-calibrate-rho input")
    visitor.press("ArrowRight")
    assert visitor.model == Model(0.05, 2.1, 0.3, 64)
    visitor.tab_to('.st-key-result [data-testid="stBaseButton-primary"]')
    visitor.press("Enter")
    assert (app.folder / Model(0.05, 2.1, 0.3, 64).folder("clip-mini") / "model.safetensors").is_file()

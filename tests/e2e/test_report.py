"""A report opens from disk, in both themes and on any screen, and asks nobody for anything; its figures as SVG too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Literal
from xml.etree import ElementTree

import pytest
from playwright.sync_api import Browser, Page, Request, Route

from featcal import open_session
from featcal.figures.report import svg
from featcal.figures.report.write import write_report
from featcal.session.session import Session
from featcal.suite.schema import load_suite
from featcal.suite.views import EvaluationSamples

pytestmark = pytest.mark.e2e
MODELS = ("merged", "calibrated:samples=16")
TASKS = 4
FIGURES = 4 + TASKS
"""Of a report: scores, drift twice, attribution; a map of every task."""
MOST = 10 * 2**20
"""Bytes."""
Scheme = Literal["light", "dark"]
WIDTH = {"light": 1280, "dark": 390}
"""Of the window in which the report is opened in a theme, in pixels."""


@pytest.fixture(scope="module")
def session() -> Session:
    """That of clip-mini with half of its tasks and a tenth of its test samples, as nothing here is about scores."""
    suite, tasks = load_suite("clip-mini"), {}
    for name, task in islice(suite.tasks.items(), TASKS):
        assert task.test is not None
        tasks[name] = task.model_copy(update={"test": task.test.model_copy(update={"limit": 50})})
    return open_session(suite.model_copy(update={"tasks": tasks}))


@pytest.fixture(scope="module")
def report(session: Session, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("report") / "report.html"
    write_report(session, "clip-mini", out, models=MODELS, on=EvaluationSamples(16))
    return out


@contextmanager
def open_alone(report: Path, chromium: Browser, scheme: Scheme) -> Iterator[tuple[Page, list[str]]]:
    """The report in a browser that fails every request but for the file itself; and what it asked for or complained
    of."""
    context = chromium.new_context(color_scheme=scheme, viewport={"width": WIDTH[scheme], "height": 900})
    wrong: list[str] = []

    def refuse(route: Route) -> None:
        asked: Request = route.request
        if asked.url == report.as_uri():
            route.continue_()
        else:
            wrong.append(asked.url)
            route.abort()

    context.route("**/*", refuse)
    page = context.new_page()
    page.on("console", lambda said: wrong.append(said.text) if said.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.goto(report.as_uri())
    page.wait_for_selector("body[data-drawn]", timeout=60_000)
    yield page, wrong
    context.close()


@pytest.fixture(scope="module", params=["light", "dark"])
def opened(report: Path, chromium: Browser, request: pytest.FixtureRequest) -> Iterator[tuple[Page, list[str]]]:
    """The report as it was opened, once for all tests."""
    with open_alone(report, chromium, request.param) as found:
        yield found


def test_it_draws_every_figure_and_asks_nobody(opened: tuple[Page, list[str]], report: Path) -> None:
    page, wrong = opened
    assert report.stat().st_size < MOST
    assert page.locator(".chart .main-svg").first.is_visible()
    drawn = page.evaluate(
        "[...document.querySelectorAll('.chart')].filter(e => e.querySelector('.main-svg .trace')).length"
    )
    assert drawn == page.locator(".chart").count() == FIGURES
    pictures = page.locator(".samples img")
    assert 0 < pictures.count() <= TASKS * 12
    assert page.evaluate("[...document.images].every(one => one.complete && one.naturalWidth > 0)")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")  # wide tables scroll by themselves
    assert wrong == []


@pytest.mark.parametrize("opened", ["light"], indirect=True)
def test_the_policy_holds_even_for_what_would_be_put_in(opened: tuple[Page, list[str]]) -> None:
    page, wrong = opened
    page.evaluate("""() => {
        const script = document.createElement('script');
        script.textContent = 'window.ran = true';
        document.body.append(script);
        const picture = document.createElement('img');
        picture.src = 'http://127.0.0.1:9/x.png';
        document.body.append(picture);
        return fetch('http://127.0.0.1:9/').catch(() => null).finally(() => { script.remove(); picture.remove(); });
    }""")
    assert page.evaluate("window.ran") is None
    assert not [one for one in wrong if one.startswith("http")]  # stopped before it was asked
    assert any("Content Security Policy" in one for one in wrong)
    wrong.clear()  # the next test asks what the report itself has done


def test_words_of_figures_read_on_their_ground(opened: tuple[Page, list[str]]) -> None:
    page, _ = opened
    ground, ink = page.evaluate("""() => [
        getComputedStyle(document.body).backgroundColor,
        getComputedStyle(document.querySelector('#scores .xtick text')).fill,
    ]""")
    assert abs(_light(ground) - _light(ink)) > 150


def _light(colour: str) -> float:
    red, green, blue = (int(part) for part in colour.removeprefix("rgb(").removesuffix(")").split(","))
    return 0.299 * red + 0.587 * green + 0.114 * blue


@pytest.mark.parametrize("opened", ["light"], indirect=True)
def test_it_prints(opened: tuple[Page, list[str]]) -> None:
    page, wrong = opened
    page.emulate_media(media="print")
    assert not page.locator("nav").is_visible()
    printed = page.pdf()
    page.emulate_media(media="screen")
    assert printed.count(b"/Type /Page\n") + printed.count(b"/Type /Page ") > 4
    assert wrong == []


def test_figures_as_svg(session: Session, tmp_path: Path) -> None:
    if not svg.can_draw():
        pytest.skip(svg.NEEDS)
    said = write_report(session, "clip-mini", tmp_path / "report.md", models=MODELS, on=EvaluationSamples(16))
    assert said["notes"] == []
    assert len(said["figures"]) == FIGURES
    for name in said["figures"]:
        root = ElementTree.parse(tmp_path / name).getroot()
        assert root.tag.endswith("svg")
        assert len(list(root.iter())) > 50

"""Names that others wrote are shown as text: no page draws their markup, or fetches what they point to."""

from __future__ import annotations

import doctest
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import streamlit as st
import torch
from app_pages import button, opened
from streamlit.testing.v1 import AppTest

from app import catalogue, cloud, downloads, samples, selection
from featcal.figures import names, sample_tables, tables, theme
from featcal.tasks.sources import Samples

pytestmark = [pytest.mark.usefixtures("instant_maps"), pytest.mark.filterwarnings("ignore")]
MARKUP = "![x](http://127.0.0.2/a.png) <b>b</b> <a href='x'>l</a> **s** $q$ :smile: [l](http://e.x) `c` www.e.x a@b.cd"
MARKDOWN = ("![x](", "http://", "<b", "<a ", "**s", "$q", ":smile:", "[l](", "`c`", "www.e", "a@b")
HTML = ("<b>b", "<a href")


def hostile(what: str) -> str:
    return f"{what} {MARKUP}"


def drawn_as_markdown(app: AppTest) -> list[str]:
    """Every text of a page that the browser reads as Markdown."""
    kinds = ("markdown", "caption", "header", "subheader", "title", "error", "info", "warning", "success")
    texts = [str(one.value) for kind in kinds for one in app.get(kind)]
    texts += [
        one.label for kind in ("metric", "expander", "button", "toggle", "download_button") for one in app.get(kind)
    ]
    texts += [str(one.value) for one in app.metric]
    return texts + [image.caption for group in app.get("image") for image in group.proto.imgs]


def drawn_by_plotly(app: AppTest) -> list[str]:
    """Every string of every chart of a page."""

    def strings(value: Any) -> Iterator[str]:
        if isinstance(value, str):
            yield value
        for one in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            yield from strings(one)

    return [one for chart in app.get("plotly_chart") for one in strings(json.loads(chart.proto.spec))]


def assert_shown_as_text(app: AppTest) -> None:
    assert not app.exception
    for one in drawn_as_markdown(app):
        left = re.sub(r"\\.", "", one)  # without what a backslash protects
        assert not [fragment for fragment in MARKDOWN if fragment in left], one
    for one in drawn_by_plotly(app):
        assert not [fragment for fragment in HTML if fragment in one], one


@pytest.fixture
def hostile_suite(edit_suite: Callable[[Callable[[dict[str, Any]], None]], Path]) -> Path:
    def rename(content: dict[str, Any]) -> None:
        content["name"] = hostile("suite")
        content["description"] = hostile("description")
        content["tasks"] = {hostile(task): one for task, one in content["tasks"].items()}
        for one in content["tasks"].values():
            one["classes"] = [hostile(name) for name in one["classes"]]

    return edit_suite(rename)


@pytest.mark.parametrize("page", ["drift", "calibrate", "features", "cosines", "accuracy", "suite"])
def test_no_page_draws_the_markup_of_names(hostile_suite: Path, page: str) -> None:
    app = opened(hostile_suite, page, b="calibrated", over="one task", colour="class", every="true")
    if page == "accuracy":
        button(app, "test split").click().run()
    assert not app.error
    assert_shown_as_text(app)
    seen = [*drawn_as_markdown(app), *drawn_by_plotly(app)]
    assert any(names.plain(MARKUP) in one or names.label(MARKUP) in one for one in seen)  # it is there, as text


def test_captions_of_pictures_are_text(monkeypatch: pytest.MonkeyPatch) -> None:
    classes = (hostile("cat"), hostile("dog"))
    pictures = np.zeros((2, 4, 4, 3), np.uint8)
    data = Samples(hostile("t"), "test", {}, torch.tensor([0, 1]), (0, 1), classes, pictures)
    captions: list[str] = []
    monkeypatch.setattr(st, "image", lambda *_, caption=(), **__: captions.extend(caption))
    monkeypatch.setattr(st, "caption", captions.append)
    samples.gallery(data, sample_tables.sample_table(data, {}))
    catalogue._show_pictures({hostile("t"): data})
    assert len(captions) == 5
    assert all(names.plain(MARKUP) in one for one in captions)
    assert cloud._hover(data, [0, 1]) == [names.label(one) for one in classes]


def test_a_failure_is_drawn_as_text() -> None:
    app = opened(f"/nowhere/{MARKUP}.yaml")
    assert names.plain(MARKUP) in app.error[0].value
    assert_shown_as_text(app)


@pytest.mark.parametrize(
    "text", [MARKUP, "a -> b", ":red[x]", ":material/home:", "1. a", "# a", "- a", "~~a~~", "&amp;"]
)
def test_plain_text_differs_from_it_only_by_what_is_not_seen(text: str) -> None:
    shown = names.plain(text)
    assert shown != text
    assert shown.replace("\\", "").replace("\u2060", "") == text


@pytest.mark.parametrize("module", [names, downloads, selection, tables, theme], ids=lambda module: module.__name__)
def test_examples_in_the_app_are_right(module: ModuleType) -> None:
    assert doctest.testmod(module).failed == 0

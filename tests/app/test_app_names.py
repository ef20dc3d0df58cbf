"""Names that others wrote are shown as text: no page draws their markup, or fetches what they point to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import streamlit as st
import torch
from app_pages import (
    MARKUP,
    assert_shown_as_text,
    button,
    drawn_as_markdown,
    drawn_by_plotly,
    hostile,
    opened,
    read_markdown,
)
from lanes import rows
from suite_edits import Edit

from app import catalogue, samples
from featcal.figures import names, sample_charts, sample_tables
from featcal.figures.sample_tables import PerSample
from featcal.samples.sources import Samples

pytestmark = [pytest.mark.usefixtures("instant_maps"), pytest.mark.filterwarnings("ignore")]


DRAWN = ("verdict", "drift", "calibrate", "features", "cosines", "accuracy", "models")


@pytest.fixture
def hostile_suite(edit_suite: Edit) -> Path:
    def rename(content: dict[str, Any]) -> None:
        content["name"] = hostile("suite")
        content["description"] = hostile("description")
        content["tasks"] = {hostile(task): one for task, one in content["tasks"].items()}
        for one in content["tasks"].values():
            one["classes"] = [hostile(name) for name in one["classes"]]

    return edit_suite(rename)


@pytest.mark.parametrize("page", rows(DRAWN, quick=["accuracy"], slow=DRAWN))
def test_no_page_draws_the_markup_of_names(hostile_suite: Path, page: str) -> None:
    app = opened(hostile_suite, page, beside="calibrated", over="one task", colour="class", every="true", picked="0,1")
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
    said = {hostile("model"): PerSample(answers=classes[::-1], right=(False, True))}
    hovers = sample_charts.hover_texts(data, [0, 1], said)
    for hover, what, answer, mark in zip(hovers, classes, classes[::-1], "✗✓", strict=True):
        assert hover == f"<b>{names.label(what)}</b><br>{names.label(hostile('model'))}: {names.label(answer)} {mark}"


def test_a_failure_is_drawn_as_text() -> None:
    app = opened(f"/nowhere/{MARKUP}.yaml")
    assert MARKUP in read_markdown(app.error[0].value)
    assert_shown_as_text(app)


@pytest.mark.parametrize(
    "text", [MARKUP, "a -> b", ":red[x]", ":material/home:", "1. a", "# a", "- a", "~~a~~", "&amp;", "a `:b:`c``"]
)
def test_plain_text_differs_from_it_only_by_what_markdown_takes_away(text: str) -> None:
    shown = names.plain(text)
    assert shown != text
    assert read_markdown(shown) == text


@pytest.mark.parametrize(
    "name", ["ties:scale=1", "svc:alpha=0.1@ties", "calibrated:lam=1,rho=2@hub/a", "expert:a.b@c.d"]
)
def test_a_name_of_a_model_is_copied_as_it_is(name: str) -> None:
    assert read_markdown(names.plain(f"model '{name}': 0 >= 1")) == f"model '{name}': 0 >= 1"
    assert names.plain(name).isascii()

"""The page for one's own models: what it says of a form that is not filled in, and of a file that is none."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import streamlit as st
from app_pages import button, opened

from app import bring

pytestmark = [pytest.mark.usefixtures("instant_maps"), pytest.mark.filterwarnings("ignore")]


def test_an_empty_form_says_what_to_fill_in() -> None:
    app = opened("clip-mini", "bring")
    button(app, "Make the suite file").click().run()
    assert not app.exception
    (said,) = (one.value for one in app.error)
    assert "3 problems" in said
    assert "Base model is empty" in said
    assert "Merged checkpoint is empty" in said
    assert "No task has a name" in said
    assert not app.text_area  # nothing was begun
    app.text_input(key="draft-base").set_value("some/base")
    app.selectbox(key="draft-merge").set_value("ties").run()
    button(app, "Make the suite file").click().run()
    assert app.error[0].value.startswith("No task has a name")


def test_what_is_wrong_with_an_uploaded_file_is_said_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    given = SimpleNamespace(name="mine.yaml", getvalue=lambda: b"models: [")
    monkeypatch.setattr(st, "file_uploader", lambda *_, **__: given)
    monkeypatch.setattr(st, "button", lambda *_, **__: True)
    monkeypatch.setattr(st, "error", lambda text, **_: said.append(text))
    bring.upload()
    assert len(said) == 1
    assert said[0].startswith("mine.yaml: not valid YAML")

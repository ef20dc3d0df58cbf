"""The page for one's own models: what it says of a form that is not filled in, and of a file that is none."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import streamlit as st
from app_pages import button, go, healthy, opened

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


@pytest.mark.slow
def test_lines_of_tasks_outlive_a_visit_to_another_page() -> None:
    app = opened("clip-mini", "bring")
    line = {**dict.fromkeys(bring.FIELDS, ""), "task": "cars", "expert": "some/expert"}
    app.session_state[bring._LAST] = [line]  # as the editor had it, which no test can type into
    go(app, "cosines")
    go(app, "bring")
    (table,) = [one.value for one in app.dataframe if "expert" in one.value]
    assert (table["task"].tolist(), table["expert"].tolist()) == (["cars"], ["some/expert"])


def test_a_draft_is_called_by_the_file_that_it_was_made_of(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[object] = []
    content = b"merge_method: task_arithmetic\nbase_model: base\nmodels: [{model: cars, parameters: {weight: 0.3}}]\n"
    given = SimpleNamespace(name="mine.yaml", getvalue=lambda: content)
    monkeypatch.setattr(st, "file_uploader", lambda *_, **__: given)
    monkeypatch.setattr(st, "button", lambda *_, **__: True)
    monkeypatch.setattr(bring, "_put", lambda *given: taken.extend(given))
    bring.upload()
    assert "name: mine\n" in str(taken[0])
    assert "uploaded" not in str(taken[0])


def test_what_is_wrong_with_an_uploaded_file_is_said_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    given = SimpleNamespace(name="mine.yaml", getvalue=lambda: b"models: [")
    monkeypatch.setattr(st, "file_uploader", lambda *_, **__: given)
    monkeypatch.setattr(st, "button", lambda *_, **__: True)
    monkeypatch.setattr(st, "error", lambda text, **_: said.append(text))
    bring.upload()
    assert len(said) == 1
    assert said[0].startswith("mine.yaml: not valid YAML")


def test_an_uploaded_suite_is_read_from_the_folder_that_its_paths_start_from(
    tiny_suite_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = SimpleNamespace(name=tiny_suite_file.name, getvalue=tiny_suite_file.read_bytes)
    monkeypatch.setattr(st, "file_uploader", lambda *_, **__: given)
    app = opened("clip-mini", "bring")
    button(app, "Use this file").click().run()
    assert "no folder" in app.error[0].value  # they do not start from where the app was started
    app.text_input(key="draft-root").set_value(str(tiny_suite_file.parent)).run()
    button(app, "Use this file").click().run()
    assert healthy(app)
    assert button(app, "Write and open it")

"""A suite file out of a form or of another tool's file, and the page that makes one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from app_pages import button, healthy, opened

from featcal import load_suite
from featcal.authoring.from_form import DraftTask, draft, import_file, read_draft, write_draft
from featcal.system.errors import InputError

PETS = DraftTask("pets", "org/pets", "imagefolder", "/data/pets", "train", "val", "test")
WORDS = DraftTask("nli", "org/nli", "jsonl", "words", "a.jsonl", input="Is {text} so?", target="{answer}")
PLATES = DraftTask("plates", "org/plates", "hub", "org/set", "train", test="test")
KNOWN = DraftTask("svhn", "org/svhn", "catalogue", "svhn")


def test_lines_of_a_form_become_tasks() -> None:
    content = yaml.safe_load(
        draft("mine", "org/base", {"method": "ties", "scale": 1.0}, [PETS, PLATES, KNOWN, DraftTask("", "x")])
    )
    assert content == {
        "name": "mine",
        "base": "org/base",
        "merged": {"method": "ties", "scale": 1.0},
        "tasks": {
            "pets": {
                "expert": "org/pets",
                "calibration": {"imagefolder": "/data/pets/train"},
                "validation": {"imagefolder": "/data/pets/val"},
                "test": {"imagefolder": "/data/pets/test"},
            },
            "plates": {
                "expert": "org/plates",
                "calibration": {"hub": "org/set", "split": "train"},
                "test": {"hub": "org/set", "split": "test"},
            },
            "svhn": {"use": "svhn", "expert": "org/svhn"},
        },
    }


def test_a_conversation_stands_in_place_of_templates() -> None:
    chat = DraftTask("chat", "org/chat", "jsonl", "talk", "a.jsonl", conversation="messages")
    assert chat.content()["calibration"] == {"jsonl": "talk/a.jsonl", "conversation": "messages"}


def test_a_draft_is_the_suite_that_is_written(tmp_path: Path) -> None:
    text = draft("mine", "base", "merged", [WORDS])
    suite = write_draft(text, tmp_path / "mine.yaml")
    assert load_suite(tmp_path / "mine.yaml") == suite
    assert suite.model_dump() == read_draft(text, tmp_path / "mine.yaml").model_dump()
    assert suite.tasks["nli"].metric == "exact_match"
    with pytest.raises(InputError, match="already exists"):
        write_draft(text, tmp_path / "mine.yaml")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: [", "draft: not valid YAML"),
        ("a: 1\na: 2", "a key occurs twice"),
        ("- 1", "is a mapping of keys to values"),
        (
            "name: x\nbase: b\nmerged: m\ntasks: {a: {expert: e, calibration: {imagefoldr: d}}}",
            "Did you mean 'imagefolder'?",
        ),
    ],
)
def test_a_draft_that_is_no_suite_says_why(text: str, said: str) -> None:
    with pytest.raises(InputError) as error:
        read_draft(text, Path("mine.yaml"))
    assert said in str(error.value)


def test_files_of_others_are_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mergekit: dict[str, Any] = {
        "merge_method": "task_arithmetic",
        "base_model": "org/base",
        "models": [
            {"model": "org/a", "parameters": {"weight": 0.5}},
            {"model": "org/b", "parameters": {"weight": 0.5}},
        ],
        "dtype": "float32",
    }
    file = tmp_path / "x.yaml"
    file.write_text(yaml.safe_dump(mergekit))
    text, notes = import_file(file)
    assert yaml.safe_load(text)["base"] == "org/base"
    assert [one["expert"] for one in yaml.safe_load(text)["tasks"].values()] == ["org/a", "org/b"]
    assert any("calibration samples of a, b" in note for note in notes)
    for place in ("here", "there"):
        (tmp_path / place / "org" / "a").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    for start, place in ((None, "here"), (tmp_path / "there", "there")):
        tasks = yaml.safe_load(import_file(file, start)[0])["tasks"]
        assert [one["expert"] for one in tasks.values()] == [str(tmp_path / place / "org" / "a"), "org/b"]
    own = draft("mine", "base", "merged", [WORDS])
    file.write_text(own)
    assert import_file(file) == (own, [])


@pytest.mark.usefixtures("instant_maps")
def test_the_page_checks_writes_and_opens(tiny_suite_file: Path, tmp_path: Path) -> None:
    app = opened(tiny_suite_file, "bring")
    assert healthy(app)
    content = yaml.safe_load(tiny_suite_file.read_text())
    content["base"] = "nowhere"
    app.session_state["draft"] = app.session_state["draft-text"] = yaml.safe_dump(content)
    app.run()
    assert not app.exception
    assert any("nowhere" in one.value for one in app.error)
    here = tiny_suite_file.parent

    def absolute(one: Any) -> Any:
        if isinstance(one, dict):
            return {key: absolute(value) for key, value in one.items()}
        return str(here / one) if isinstance(one, str) and (here / one).exists() else one

    text = yaml.safe_dump(absolute({**content, "base": "base"}))
    app.text_area(key="draft-text").set_value(text).run()
    assert healthy(app)
    app.text_input[-1].set_value(str(tmp_path / "own.yaml")).run()
    button(app, "Write and open it").click().run()
    assert healthy(app)
    assert load_suite(tmp_path / "own.yaml").name == content["name"]
    app.run()
    assert app.query_params["suite"] == [str(tmp_path / "own.yaml")] or "own.yaml" in str(
        app.session_state["selection"].suite
    )


@pytest.mark.usefixtures("instant_maps")
def test_the_page_checks_paths_from_where_they_are_written_to(own_suite_file: Path) -> None:
    app = opened(own_suite_file, "bring")
    app.session_state["draft"] = app.session_state["draft-text"] = own_suite_file.read_text()
    app.run()
    assert app.error  # its models do not lie where the app was started
    app.text_input[-1].set_value(str(own_suite_file.with_name("own.yaml"))).run()
    assert healthy(app)
    button(app, "Write and open it").click().run()
    assert healthy(app)
    assert load_suite(own_suite_file.with_name("own.yaml")).root == own_suite_file.parent

"""Suite files: what is accepted, and how each mistake is said."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from featcal.errors import InputError
from featcal.resources import embedded_suites
from featcal.suite import MergeRecipe, load_suite

Edit = Callable[[Callable[[dict[str, Any]], None]], Path]


def refused(file: Path | str) -> str:
    with pytest.raises(InputError) as caught:
        load_suite(file)
    return str(caught.value)


def test_embedded_suites_load() -> None:
    for name in embedded_suites():
        suite = load_suite(name)
        assert suite.name == name
        assert suite.splits() == ("calibration", "validation", "test")


def test_a_folder_means_its_suite_file(tiny_suite_file: Path) -> None:
    assert load_suite(tiny_suite_file.parent) == load_suite(tiny_suite_file)


def test_unknown_suite_suggests() -> None:
    message = refused("clip-mni")
    assert "neither a file nor an embedded suite" in message
    assert "Did you mean 'clip-mini'?" in message


def test_unknown_keys_suggest(edit_suite: Edit) -> None:
    def change(content: dict[str, Any]) -> None:
        content["mergd"] = "x"
        content["tasks"]["pets"]["templtes"] = ["{}"]
        content["tasks"]["signs"]["calibration"]["lables"] = "y"

    message = refused(edit_suite(change))
    assert "mergd: unknown key. Did you mean 'merged'?" in message
    assert "tasks.pets.templtes: unknown key. Did you mean 'templates'?" in message
    assert "tasks.signs.calibration.lables: unknown key. Did you mean 'labels'?" in message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.pop("base"), "base: Field required"),
        (lambda c: c.update(tasks={}), "tasks: Dictionary should have at least 1 item"),
        (lambda c: c.update(merged={"method": "soup"}), "'simple-averaging' or 'task-arithmetic'"),
        (lambda c: c.update(merged={"method": "simple-averaging", "scale": 1}), "'scale' means nothing to"),
        (lambda c: c["tasks"]["pets"].update(templates=["no place"]), "need one {}"),
        (lambda c: c["tasks"]["pets"].update(calibration={}), "exactly one of embedded, tensors, arrays, imagefolder"),
        (
            lambda c: c["tasks"]["pets"].update(calibration={"arrays": "x.npz", "imagefolder": "y"}),
            r"found arrays, imagefolder",
        ),
        (lambda c: c["tasks"]["pets"].update(calibration={"tensors": "x"}), "needs 'key'"),
        (lambda c: c["tasks"]["pets"].update(calibration={"imagefolder": "x", "key": "k"}), "key means nothing"),
        (lambda c: c["tasks"]["pets"]["calibration"].update(limit=0), "greater than 0"),
    ],
)
def test_wrong_content_is_named(edit_suite: Edit, change: Any, message: str) -> None:
    assert message in refused(edit_suite(change))


def test_files_that_are_no_suites(tmp_path: Path) -> None:
    file = tmp_path / "suite.yaml"
    file.write_text("tasks: [unclosed")
    assert "not valid YAML" in refused(file)
    file.write_text("- a list")
    assert "is a mapping" in refused(file)
    file.write_bytes(b"\xff\xfe\x00")
    assert "not valid YAML" in refused(file)


def test_yaml_cannot_run_code(tmp_path: Path) -> None:
    file = tmp_path / "suite.yaml"
    file.write_text("name: !!python/object/apply:os.system ['true']")
    assert "not valid YAML" in refused(file)


def test_unknown_task_suggests(tiny_suite_file: Path) -> None:
    with pytest.raises(InputError, match=r"no task 'pest'. Did you mean 'pets'\?"):
        load_suite(tiny_suite_file).task("pest")


def test_recipe_or_reference(tiny_suite_file: Path, edit_suite: Edit) -> None:
    assert load_suite(tiny_suite_file).merged == MergeRecipe(method="task-arithmetic", scale=0.5)
    assert load_suite(edit_suite(lambda c: c.update(merged="somewhere"))).merged == "somewhere"

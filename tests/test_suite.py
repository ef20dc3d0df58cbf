"""Suite files: what is accepted, and how each mistake is said."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from conftest import clip_inputs
from featcal.calibration.config import CalibrationConfig
from featcal.errors import InputError
from featcal.resources import embedded_suites
from featcal.suite import CalibrationDefaults, MergeRecipe, load_suite, suite_file
from featcal.tasks.sources import draw

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
        (
            lambda c: c.update(merged={"method": "soup"}),
            "merged.method: Input should be 'simple-averaging', 'linear', 'task-arithmetic' or 'ties'",
        ),
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


TEXT = {"jsonl": "x.jsonl", "input": "{a}", "target": "{b}"}


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"jsonl": "x"}, "needs 'input'"),
        ({"hub": "x", "input": "{a}"}, "a 'hub' source needs 'split'"),
        ({"parquet": "x", "target": "{a}"}, "'target' and 'targets' belong to text; give 'input'"),
        ({"parquet": "x", "input": "{a}", "image": "b"}, "give one of them"),
        (TEXT | {"targets": ["no"]}, "not both"),
        ({"jsonl": "x", "input": "{a}", "label": "b"}, "the 'label' of text needs 'targets'"),
        (TEXT | {"config": "sst2"}, "config means nothing to a source of kind 'jsonl', which takes split, label"),
        (TEXT | {"input": "{a.__class__}"}, "is no field"),
        (TEXT | {"input": "no field"}, "names no field"),
        (TEXT | {"target": "{b!r}"}, "is no field"),
        ({"jsonl": "x", "input": "{a}", "targets": [False, True]}, "'yes' and 'no' in quotes"),
        ({"jsonl": "x", "input": "{a}", "targets": {0: False}}, "'yes' and 'no' in quotes"),
    ],
)
def test_wrong_sources_are_named(edit_suite: Edit, source: dict[str, Any], message: str) -> None:
    assert message in refused(edit_suite(lambda c: c["tasks"]["pets"].update(calibration=source)))


def test_text_tasks(edit_suite: Edit) -> None:
    def task(**change: Any) -> Any:
        def write(content: dict[str, Any]) -> None:
            content["tasks"]["pets"] = {"expert": "e", "test": TEXT, **change}

        return edit_suite(write)

    pets = load_suite(task()).task("pets")
    assert (pets.metric, pets.max_length, pets.max_target_length) == ("exact_match", 512, 32)
    assert load_suite(task(metric="spearman", max_length=9)).task("pets").metric == "spearman"
    assert load_suite(task()).task("signs").metric == "accuracy"
    assert "'accuracy' is for pictures" in refused(task(metric="accuracy"))
    assert "remove them from a text task" in refused(task(classes=["a"]))
    assert "'exact_match' or 'spearman'" in refused(task(metric="bleu"))
    assert "greater than 1" in refused(task(max_length=1))


def test_a_suite_without_calibration_samples(edit_suite: Edit) -> None:
    suite = load_suite(edit_suite(lambda c: c["tasks"]["pets"].pop("calibration")))
    assert suite.task("pets").source("calibration") is None
    assert suite.splits() == ("validation", "test")
    with pytest.raises(InputError, match="task 'pets', calibration samples: the suite file gives none; add 'calibr"):
        draw(suite, "pets", "calibration", 1, 0, clip_inputs(suite.root / "base"))


def test_defaults_for_calibration(edit_suite: Edit) -> None:
    suite = load_suite(edit_suite(lambda c: c.update(calibration={"lam": 1e-5, "samples": 64, "rmsnorms": True})))
    assert suite.calibration.given() == {"lam": 1e-5, "samples": 64, "rmsnorms": True}
    assert load_suite(edit_suite(lambda c: c.pop("calibration"))).calibration.given() == {}
    message = refused(edit_suite(lambda c: c.update(calibration={"lamda": 1, "alpha": "much", "precision": "exakt"})))
    assert "calibration.lamda: unknown key. Did you mean 'lam'?" in message
    assert "calibration.alpha: Input should be a valid number" in message
    assert "calibration.precision: Input should be 'exact' or 'fast'" in message


def test_defaults_for_calibration_are_options_of_its_config() -> None:
    """The schema imports nothing heavy, so it repeats the names; they may not drift apart."""
    assert set(CalibrationDefaults.model_fields) == {field.name for field in fields(CalibrationConfig)}


def test_vocabulary(edit_suite: Edit, tiny_suite_file: Path) -> None:
    assert load_suite(tiny_suite_file).vocabulary == "exact"
    assert load_suite(edit_suite(lambda c: c.update(vocabulary="base"))).vocabulary == "base"
    assert "'exact' or 'base'" in refused(edit_suite(lambda c: c.update(vocabulary="mine")))


def test_references_of_other_kinds(edit_suite: Edit) -> None:
    references = ["open_clip:ViT-B-32:file.pt", "open_clip:hf-hub:owner/name", "google/flan-t5-base+owner/lora@v1"]
    for reference in references:
        assert load_suite(edit_suite(lambda c, r=reference: c.update(base=r))).base == reference  # type: ignore[misc]


def test_suggestions_are_keys_of_the_place(edit_suite: Edit) -> None:
    """'templates' is a key of tasks, so it is no advice at the top level."""
    assert refused(edit_suite(lambda c: c.update(tempates=["{}"]))).endswith("tempates: unknown key.")


def test_files_that_are_no_suites(tmp_path: Path) -> None:
    file = tmp_path / "suite.yaml"
    file.write_text("tasks: [unclosed")
    assert "not valid YAML" in refused(file)
    file.write_text("- a list")
    assert "is a mapping" in refused(file)
    file.write_bytes(b"\xff\xfe\x00")
    assert "not valid YAML" in refused(file)


SECRET = "hunter2"
FOREIGN = {
    "a password file": f"root:$y${SECRET}:19000:0:99999:7:::\nbin:*:19000::::::\n",
    "a list": f"- {SECRET}\n",
    "another tool's mapping": f"password: {SECRET}\n{SECRET}: 1\nname: web\n",
    "JSON": f'{{"model_type": "{SECRET}", "{SECRET}": [1]}}',
    "a line that is no YAML": f"a: b: {SECRET}\n",
    "an alias": f"password: *{SECRET}\n",
    "a tag": f"password: !{SECRET} x\n",
    "an anchor twice": f"a: &{SECRET} 1\nb: &{SECRET} 2\nc: [unclosed",
    "an escape": f'password: "\\{SECRET}"\n',
    "a key twice": f"{SECRET}: 1\n{SECRET}: 2\n",
    "a number that is none": f"password: !!int {SECRET}\n",
    "a control character": f"password: {SECRET}\x01\n",
    "an unhashable key": f"? [{SECRET}]\n: 1\n",
    "two documents": f"password: {SECRET}\n---\n{SECRET}: 1\n",
    "a quote that stays open": f"password: '{SECRET}\n",
}


@pytest.mark.parametrize("content", FOREIGN.values(), ids=FOREIGN)
def test_nothing_of_a_file_that_is_no_suite_is_quoted(tmp_path: Path, content: str) -> None:
    """A suite may be named in a browser: the message must not read other files of the server to who asks."""
    file = tmp_path / "secrets.yaml"
    file.write_text(content)
    with pytest.raises(InputError) as caught:
        load_suite(file)
    said = str(caught.value)
    assert said.startswith(str(file))
    assert SECRET not in said
    assert "root" not in said.removeprefix(str(file))
    named = (
        "is not a suite file, which is a mapping with base, merged, name, tasks",
        "not valid YAML",
        "a second document",
    )
    assert any(reason in said for reason in named)
    assert caught.value.__cause__ is None  # nor does a traceback quote it


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("name: a\ntasks:\n  b: c: d\n", "mapping values are not allowed here, line 3, column 7"),
        ("tasks: [unclosed", "while parsing a flow sequence, expected"),
        ("a: 1\n---\nb: 2\n", "a second document begins in line 2"),
        ("name: a\x00", "a character at position 7 that YAML does not allow"),
        (b"name: a\xff", "byte 7 is not UTF-8"),
    ],
)
def test_what_is_no_yaml_is_placed(tmp_path: Path, content: str | bytes, message: str) -> None:
    file = tmp_path / "suite.yaml"
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    assert message in refused(file)


@pytest.mark.parametrize(
    "reference", ["~nobody-of-this-name/x", "x" * 5000, "a/" * 3000, "a\0b", "", "\ud800", "/dev/null"]
)
def test_whatever_is_typed_as_a_suite_is_answered(reference: str) -> None:
    with pytest.raises(InputError, match="no suite '") as caught:
        suite_file(reference)
    assert len(str(caught.value)) < 600
    assert refused(reference) == str(caught.value)


def test_names_that_are_quoted_are_short(edit_suite: Edit) -> None:
    message = refused(edit_suite(lambda c: c.update({"k" * 9000: 1})))
    assert f"{'k' * 60} … (8940 more characters): unknown key." in message
    assert len(message) < 400


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

"""Suite files: what is accepted, and how each mistake is said."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from lanes import cases_by_message
from suite_edits import Edit
from tiny_clip import clip_inputs

from featcal.samples.sources import draw_samples
from featcal.studies.history import suite_hash
from featcal.suite.calibration_options import CalibrationConfig
from featcal.suite.facts import suite_facts
from featcal.suite.methods import merger_names
from featcal.suite.schema import CalibrationDefaults, MergeRecipe, load_suite, suite_file
from featcal.system.errors import InputError
from featcal.system.resources import embedded_suites


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


def test_every_mistake_is_listed(edit_suite: Edit) -> None:
    def change(content: dict[str, Any]) -> None:
        content["mergd"] = "x"
        content["tasks"]["signs"]["calibration"]["lables"] = "y"

    message = refused(edit_suite(change))
    assert "mergd: unknown key. Did you mean 'merged'?" in message
    assert "tasks.signs.calibration.lables: unknown key. Did you mean 'labels'?" in message


def pets(**change: Any) -> Any:
    return lambda content: content["tasks"]["pets"].update(change)


def of_text(**change: Any) -> Any:
    return lambda content: content["tasks"].update(pets={"expert": "e", "test": TEXT} | change)


def of_classes(**change: Any) -> Any:
    return of_text(test={"jsonl": "x.jsonl", "input": "{a}", "pair": "{b}", "label": "c"}, **change)


def top(**change: Any) -> Any:
    return lambda content: content.update(change)


TEXT = {"jsonl": "x.jsonl", "input": "{a}", "target": "{b}"}
LISTED = ", ".join(f"'{name}'" for name in merger_names()[:-1]) + f" or '{merger_names()[-1]}'"
WRONG = {
    "a task cannot be called 'average'": lambda content: content["tasks"].update(average=content["tasks"]["pets"]),
    "base: Field required": lambda content: content.pop("base"),
    "base is null, but a merge by recipe needs a base": top(base=None),
    "tasks: Dictionary should have at least 1 item": top(tasks={}),
    f"merged.method: Input should be {LISTED}": top(merged={"method": "soup"}),
    "'scale' is not an option of": top(merged={"method": "simple-averaging", "scale": 1}),
    "mergd: unknown key. Did you mean 'merged'?": top(mergd="x"),
    f"{'k' * 60} … (8940 more characters): unknown key.": top(**{"k" * 9000: 1}),
    "vocabulary: Input should be 'exact' or 'base'": top(vocabulary="mine"),
    "calibration.lamda: unknown key. Did you mean 'lam'?": top(calibration={"lamda": 1}),
    "calibration.alpha: Input should be a valid number": top(calibration={"alpha": "much"}),
    "calibration.precision: Input should be 'exact' or 'fast'": top(calibration={"precision": "exakt"}),
    "tasks.pets.templtes: unknown key. Did you mean 'templates'?": pets(templtes=["{}"]),
    "need one {}": pets(templates=["no place"]),
    "greater than 0": pets(calibration={"imagefolder": "x", "limit": 0}),
    "tasks.pets.calibration.lables: unknown key. Did you mean 'labels'?": pets(calibration={"lables": "y"}),
    "exactly one of embedded, tensors, arrays, imagefolder": pets(calibration={}),
    "found arrays, imagefolder": pets(calibration={"arrays": "x.npz", "imagefolder": "y"}),
    "needs 'key'": pets(calibration={"tensors": "x"}),
    "key is not an option": pets(calibration={"imagefolder": "x", "key": "k"}),
    "needs 'input'": pets(calibration={"jsonl": "x"}),
    "a 'hub' source needs 'split'": pets(calibration={"hub": "x", "input": "{a}"}),
    "'target' and 'targets' belong to text; give 'input'": pets(calibration={"parquet": "x", "target": "{a}"}),
    "a text with a picture needs an answer in words": pets(
        calibration={"parquet": "x", "input": "{a}", "image": "b", "label": "c"}
    ),
    "not both": pets(calibration=TEXT | {"targets": ["no"]}),
    "give 'target' (the answer as text) or 'label' (its class, for a classifier)": pets(
        calibration={"jsonl": "x", "input": "{a}", "label": "b", "target": "{c}"}
    ),
    "'pair' is the second text for a classifier": [
        pets(calibration={"jsonl": "x", "input": "{a}", "pair": "{b}", "label": "c", "targets": ["d", "e"]}),
        pets(calibration={"parquet": "x", "pair": "{b}"}),
    ],
    "texts with classes ('label' without 'targets') are scored by accuracy": of_classes(metric="exact_match"),
    "'templates' make prompts for pictures": of_classes(templates=["a {}"]),
    "config is not an option of a source of kind 'jsonl', which takes split, image, label": pets(
        calibration=TEXT | {"config": "sst2"}
    ),
    "is not a field": [
        pets(calibration=TEXT | {"input": "{a.__class__}"}),
        pets(calibration=TEXT | {"target": "{b!r}"}),
    ],
    "names no field": pets(calibration=TEXT | {"input": "no field"}),
    "'yes' and 'no' in quotes": [
        pets(calibration={"jsonl": "x", "input": "{a}", "targets": targets}) for targets in ([False, True], {0: False})
    ],
    "'accuracy' is for classes": of_text(metric="accuracy"),
    "remove them from a text task": of_text(classes=["a"]),
    "'exact_match' or 'spearman'": of_text(metric="bleu"),
    "greater than 1": of_text(max_length=1),
}


@pytest.mark.parametrize(("change", "message"), cases_by_message(WRONG))
def test_wrong_content_is_named(edit_suite: Edit, change: Any, message: str) -> None:
    said = refused(edit_suite(change))
    assert message in said
    assert len(said) < 400


def test_text_tasks(edit_suite: Edit) -> None:
    task = load_suite(edit_suite(of_text())).task("pets")
    assert (task.metric, task.max_length, task.max_target_length) == ("exact_match", 512, 32)
    suite = load_suite(edit_suite(of_text(metric="spearman", max_length=9)))
    assert (suite.task("pets").metric, suite.task("signs").metric) == ("spearman", "accuracy")


def test_an_option_that_is_null_is_as_one_left_out(edit_suite: Edit) -> None:
    """Histories and studies are found by a suite's hash."""

    def nulls(content: dict[str, Any]) -> None:
        content["merged"] |= {"dtype": None, "scale": content["merged"].get("scale")}
        content["tasks"]["pets"]["test"] |= {"corruption": None, "pair": None}
        content["calibration"] = {"image_weight": None}

    plain, same = load_suite(edit_suite(lambda _: None)), load_suite(edit_suite(nulls))
    assert suite_hash(plain) == suite_hash(same)
    assert suite_facts(plain)["sha256"] == suite_facts(same)["sha256"]


def test_texts_with_classes(edit_suite: Edit) -> None:
    task = load_suite(edit_suite(of_classes(classes=["no", "yes"]))).task("pets")
    assert (task.metric, task.classes) == ("accuracy", ("no", "yes"))


def test_a_suite_without_calibration_samples(edit_suite: Edit) -> None:
    suite = load_suite(edit_suite(lambda c: c["tasks"]["pets"].pop("calibration")))
    assert suite.task("pets").source("calibration") is None
    assert suite.splits() == ("validation", "test")
    with pytest.raises(InputError, match="task 'pets', calibration samples: the suite gives none; add 'calibr"):
        draw_samples(suite, "pets", "calibration", 1, 0, clip_inputs(suite.root / "base"))


def test_defaults_for_calibration(edit_suite: Edit) -> None:
    suite = load_suite(edit_suite(lambda c: c.update(calibration={"lam": 1e-5, "samples": 64, "rmsnorms": True})))
    assert suite.calibration.explicit_options() == {"lam": 1e-5, "samples": 64, "rmsnorms": True}
    assert load_suite(edit_suite(lambda c: c.pop("calibration"))).calibration.explicit_options() == {}


def test_defaults_for_calibration_are_options_of_its_config() -> None:
    """The schema imports nothing heavy, so it repeats the names; they may not drift apart."""
    assert set(CalibrationDefaults.model_fields) == {field.name for field in fields(CalibrationConfig)}


def test_vocabulary(edit_suite: Edit, tiny_suite_file: Path) -> None:
    assert load_suite(tiny_suite_file).vocabulary == "exact"
    assert load_suite(edit_suite(lambda c: c.update(vocabulary="base"))).vocabulary == "base"


def test_references_of_other_kinds(edit_suite: Edit) -> None:
    references = ["open_clip:ViT-B-32:file.pt", "open_clip:hf-hub:owner/name", "google/flan-t5-base+owner/lora@v1"]
    for reference in references:
        assert load_suite(edit_suite(lambda c, r=reference: c.update(base=r))).base == reference  # type: ignore[misc]


def test_suggestions_are_keys_of_the_place(edit_suite: Edit) -> None:
    """'templates' is a key of tasks, so it is no advice at the top level."""
    assert refused(edit_suite(top(tempates=["{}"]))).endswith("tempates: unknown key.")


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


NO_YAML: dict[str, Any] = {
    "mapping values are not allowed here, line 3, column 7": b"name: a\ntasks:\n  b: c: d\n",
    "not valid YAML: while parsing a flow sequence, expected": b"tasks: [unclosed",
    "a second document begins in line 2": b"a: 1\n---\nb: 2\n",
    "a character at position 7 that YAML does not allow": b"name: a\x00",
    "not valid YAML": [b"\xff\xfe\x00", b"name: !!python/object/apply:os.system ['true']"],  # nor can it run code
    "byte 7 is not UTF-8": b"name: a\xff",
    "is a mapping": b"- a list",
    "a key occurs twice, first in line 1 and again, line 2, column 1": b"name: a\nname: b\n",
    "a value does not have the type of its tag or form": b"name: 2024-13-45",
}


@pytest.mark.parametrize(("content", "message"), cases_by_message(NO_YAML))
def test_what_is_no_suite_file_is_placed(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "suite.yaml"
    file.write_bytes(content)
    assert message in refused(file)


TYPED = {
    "a home of nobody": "~nobody-of-this-name/x",
    "a long name": "x" * 5000,
    "many folders": "a/" * 3000,
    "a null byte": "a\0b",
    "nothing": "",
    "half a character": "\ud800",
    "a device": "/dev/null",
    "a date": "2024-13-45",
}


@pytest.mark.parametrize("reference", TYPED.values(), ids=TYPED)
def test_whatever_is_typed_as_a_suite_is_answered(reference: str) -> None:
    with pytest.raises(InputError, match="no suite '") as caught:
        suite_file(reference)
    assert len(str(caught.value)) < 600
    assert refused(reference) == str(caught.value)


def test_unknown_task_suggests(tiny_suite_file: Path) -> None:
    with pytest.raises(InputError, match=r"no task 'pest'. Did you mean 'pets'\?"):
        load_suite(tiny_suite_file).task("pest")


def test_recipe_or_reference(tiny_suite_file: Path, edit_suite: Edit) -> None:
    assert load_suite(tiny_suite_file).merged == MergeRecipe(method="task-arithmetic", scale=0.5)
    assert load_suite(edit_suite(lambda c: c.update(merged="somewhere"))).merged == "somewhere"

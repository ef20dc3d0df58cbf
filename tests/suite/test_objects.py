"""A suite of Python objects is the same as its file: `Suite.of`, and what is measured and calibrated of it."""

from __future__ import annotations

import copy
import gc
import gzip
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from lanes import rows
from objects import TinyDataset, clip_objects, same_tensors, text_objects
from PIL import Image
from safetensors.torch import load_file
from tiny_clip import write_suite
from tiny_text import TASKS, text_suite, write_text_suite

import featcal
from featcal.preflight.check import check_suite
from featcal.studies.history import suite_hash
from featcal.studies.replay.again import replay_record
from featcal.suite import held_samples
from featcal.system.errors import InputError

FEW = featcal.CalibrationConfig(samples=8)


@pytest.fixture(scope="module")
def clip_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_suite(tmp_path_factory.mktemp("clip"))


@pytest.fixture(scope="module")
def t5_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_suite(tmp_path_factory.mktemp("t5"), "t5-tied")


@pytest.fixture(scope="module")
def clip(clip_file: Path) -> dict[str, Any]:
    return clip_objects(clip_file)


def test_a_merge_of_an_unknown_base_is_that_of_its_file(clip: dict[str, Any], clip_file: Path, tmp_path: Path) -> None:
    featcal.merge(featcal.load_suite(clip_file), "ties").save(tmp_path / "ties")
    given = _without(clip, "tokenizer", "processor") | {"base": None, "merged": str(tmp_path / "ties")}
    suite = featcal.Suite.of(**given)
    content = yaml.safe_load(clip_file.read_text()) | {"base": None, "merged": str(tmp_path / "ties")}
    of_file = clip_file.parent / "without.yaml"
    of_file.write_text(yaml.safe_dump(content))
    found, expected = (featcal.calibrate(one, replace(FEW, rho=1.0)) for one in (suite, featcal.load_suite(of_file)))
    names = found.family.adapter.tower
    assert same_tensors(found.weights.read(names), expected.weights.read(names))


@pytest.mark.parametrize("kind", rows(["clip", "t5-tied", "llama"], quick=["clip"], slow=["t5-tied", "llama"]))
def test_calibrated_tensors_are_those_of_the_file_to_the_bit(kind: str, tmp_path: Path) -> None:
    file = write_suite(tmp_path / "suite") if kind == "clip" else write_text_suite(tmp_path / "suite", kind)
    given = clip_objects(file) if kind == "clip" else text_objects(file)
    suite, of_file = featcal.Suite.of(**given), featcal.load_suite(file)
    found, expected = (featcal.calibrate(one, FEW) for one in (suite, of_file))
    names = found.family.adapter.tower
    assert same_tensors(found.weights.read(names), expected.weights.read(names))
    assert not same_tensors(found.weights.read(names), found.family.merged.read(names))
    drift = [featcal.measure_drift(*one).to_frame() for one in ((suite, found), (of_file, expected))]
    assert drift[0].equals(drift[1])
    if kind == "clip":  # samples of the others are tokens without answers in words
        found.save(tmp_path / "found")
        expected.save(tmp_path / "expected")
        written = [load_file(tmp_path / out / "model.safetensors") for out in ("found", "expected")]
        assert same_tensors(*written)
        scores = [featcal.evaluate(*one).to_json() for one in ((suite, found), (of_file, expected))]
        assert scores[0] == scores[1]


def test_calibrating_in_three_lines(clip: dict[str, Any], clip_file: Path) -> None:
    """A merged model in memory, a recipe, or what `merge` gives: each is what the suite file calls merged."""
    objects = {name: clip[name] for name in ("base", "experts", "samples", "processor")}
    expected = featcal.calibrate(featcal.load_suite(clip_file), FEW)
    names = expected.family.adapter.tower
    merged = featcal.merge(base=clip["base"], experts=clip["experts"], method="task-arithmetic:scale=0.5")
    for one in (merged, merged.to_model(), "task-arithmetic:scale=0.5", {"method": "task-arithmetic", "scale": 0.5}):
        found = featcal.calibrate(one, FEW, **objects)
        assert same_tensors(found.weights.read(names), expected.weights.read(names))


def test_the_record_says_what_was_in_memory(clip: dict[str, Any], tmp_path: Path) -> None:
    suite = featcal.Suite.of(**clip)
    featcal.calibrate_to_folder(suite, FEW, tmp_path / "out")
    text = (tmp_path / "out" / "featcal.json").read_text()
    record = json.loads(text)
    assert record["suite_file"]["in_memory"][:3] == ["base", "expert 'pets'", "expert 'signs'"]
    assert record["suite_file"]["in_memory"][3] == "task 'pets', calibration samples"
    assert {name: list(one) for name, one in record["inputs"].items()} == {
        "base": ["CLIPModel in memory"],
        "expert pets": ["CLIPVisionModel in memory"],
        "expert signs": ["CLIPVisionModel in memory"],
    }
    assert "/featcal-in-memory-" not in text + (tmp_path / "out" / "README.md").read_text()
    assert record["verified"] == "reloaded"
    with pytest.raises(
        InputError, match=r"featcal\.json: base, expert 'pets', .* are in no file, so the run cannot be rep"
    ):
        replay_record(tmp_path / "out")


def test_a_merged_model_in_memory_is_no_checkpoint_in_the_record(clip: dict[str, Any]) -> None:
    suite = featcal.Suite.of(**{**clip, "merged": clip["experts"]["pets"]})
    record = featcal.calibrate(suite, FEW).record
    assert record["merged"] == "a model in memory"
    assert "merged" in record["suite_file"]["in_memory"]


def test_a_model_that_changed_meanwhile_is_not_recorded(clip_file: Path, tmp_path: Path) -> None:
    given = clip_objects(clip_file)
    tensor = next(given["experts"]["pets"].parameters())
    with torch.no_grad():
        tensor.mul_(1.5)  # else a model of another test has the same content, and stands for it
    result = featcal.calibrate(featcal.Suite.of(**given), FEW)
    with torch.no_grad():
        tensor.add_(1)
    for use in (lambda: result.save(tmp_path / "out"), result.to_model):
        with pytest.raises(
            InputError, match="expert pets: the CLIPVisionModel in memory has other values than when its suite"
        ):
            use()


def test_what_changed_since_the_suite_was_made_is_refused(clip_file: Path) -> None:
    """Unless another suite holds the same content, which stands for it then."""
    given = clip_objects(clip_file)
    tensor, pixels = next(given["experts"]["pets"].parameters()), given["samples"]["pets"][0]
    with torch.no_grad():
        tensor.mul_(1.25)  # content of no other test
    pixels.mul_(0.75)
    suite, again = featcal.Suite.of(**given), featcal.Suite.of(**copy.deepcopy(given))
    found = featcal.calibrate(suite, FEW)
    names = found.family.adapter.tower
    expected = found.weights.read(names)
    before = tensor.detach().clone()
    with torch.no_grad():
        tensor.add_(1)
    pixels.add_(1)
    # Not to the bit: sums depend on how tensors are aligned in memory.
    torch.testing.assert_close(featcal.calibrate(suite, FEW).weights.read(names), expected, rtol=1e-4, atol=1e-5)
    del again, found
    gc.collect()
    with pytest.raises(InputError, match="expert 'pets': the CLIPVisionModel in memory has other values than when its"):
        featcal.open_family(suite, "cpu")
    with torch.no_grad():
        tensor.copy_(before)
    with pytest.raises(
        InputError, match="task 'pets', calibration samples: tensors: the tensors in memory has other values than when"
    ):
        featcal.calibrate(suite, FEW)


def test_samples_in_half_precision(clip: dict[str, Any]) -> None:
    values, labels = clip["samples"]["pets"]
    suite = featcal.Suite.of(**{**clip, "samples": {"pets": (values.bfloat16(), labels)}})
    drawn = featcal.open_family(suite, "cpu").samples("pets", "calibration", 4, 42)
    assert torch.equal(drawn.inputs["pixel_values"], values.bfloat16()[list(drawn.indices)].float())


def test_a_suite_and_objects_are_not_given_together(clip: dict[str, Any]) -> None:
    suite, objects = featcal.Suite.of(**clip), {"base": clip["base"], "experts": clip["experts"]}
    with pytest.raises(InputError, match="calibrate: give a suite, or samples with a merged model, not both"):
        featcal.calibrate(suite, samples=clip["samples"])
    with pytest.raises(InputError, match="calibrate: the merged model is the first argument; leave merged= out"):
        featcal.calibrate("ties", merged="ties", **objects)
    with pytest.raises(InputError, match="merge: both merged and method say how the experts are merged; leave one out"):
        featcal.merge(method="ties", merged="ties", **objects)
    options: Any = {"lam": 1.0}
    with pytest.raises(
        InputError, match=r"the options of a calibration as featcal\.CalibrationConfig\(.*not as a dict"
    ):
        featcal.calibrate(suite, options)


def test_pictures_of_the_same_indices_and_another_palette_are_others() -> None:
    picture = Image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8), "P")
    digests = set()
    for palette, see_through in (([1, 2, 3], None), ([3, 2, 1], None), ([3, 2, 1], 5)):
        picture.putpalette(palette * 256)
        picture.info = {} if see_through is None else {"transparency": see_through}
        digests.add(held_samples._digest([{"image": picture}]))
    assert len(digests) == 3


def test_suites_of_the_same_content_are_the_same(clip: dict[str, Any], clip_file: Path) -> None:
    """Of others they are others: what is kept of one is not taken for another's."""
    again = clip_objects(clip_file)
    first, second = featcal.Suite.of(**clip), featcal.Suite.of(**again)
    assert suite_hash(first) == suite_hash(second)
    session = featcal.open_session(first)
    assert featcal.open_session(second) is session
    values, labels = again["samples"]["pets"]
    moved = {**again["samples"], "pets": (values + 1, labels)}
    assert featcal.open_session(featcal.Suite.of(**{**again, "samples": moved})) is not session
    with torch.no_grad():
        next(again["base"].parameters()).add_(1)
    assert featcal.open_session(featcal.Suite.of(**again)) is not session


def test_check_looks_at_objects_too(clip: dict[str, Any]) -> None:
    assert check_suite(featcal.Suite.of(**clip)).problems == ()
    turned = {**clip, "experts": {**clip["experts"], "signs": _wider()}}
    assert any("expert 'signs'" in problem for problem in check_suite(featcal.Suite.of(**turned)).problems)


def _wider() -> Any:
    from transformers import CLIPVisionConfig, CLIPVisionModel

    sizes = {"hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    return CLIPVisionModel(CLIPVisionConfig(**sizes, image_size=12, patch_size=4))


def test_objects_and_references_stand_side_by_side(clip: dict[str, Any], clip_file: Path) -> None:
    root = clip_file.parent
    experts = {"pets": clip["experts"]["pets"], "signs": root / "experts" / "signs"}
    mixed = featcal.Suite.of(base=clip["base"], experts=experts, samples=clip["samples"], merged="ties")
    assert mixed.tasks["signs"].expert == str(root / "experts" / "signs")
    record = featcal.calibrate(mixed, FEW).record
    assert record["suite_file"]["in_memory"][:2] == ["base", "expert 'pets'"]


def _pictures(count: int = 6) -> tuple[list[Image.Image], np.ndarray[Any, Any]]:
    pixels = np.random.default_rng(0).integers(0, 255, (count, 12, 12, 3), dtype=np.uint8)
    return [Image.fromarray(one) for one in pixels], pixels


PICTURES, PIXELS = _pictures()
CLASSES = [0, 2, 1, 0, 1, 2]
NAMED = ["cat", "fish", "dog", "cat", "dog", "fish"]


@pytest.mark.parametrize(
    "given",
    [
        (PIXELS, CLASSES),
        (torch.from_numpy(PIXELS), torch.tensor(CLASSES)),
        (PICTURES, np.array(CLASSES)),
        list(zip(PICTURES, CLASSES, strict=True)),
        list(zip(PICTURES, NAMED, strict=True)),
        [{"image": one, "label": label} for one, label in zip(PIXELS, CLASSES, strict=True)],
        (PIXELS, pd.Series(CLASSES, index=range(5, 11))),
        (PICTURES, np.array(NAMED)),
        pd.DataFrame({"image": PICTURES, "label": CLASSES}, index=range(5, 11)),
        TinyDataset({"image": PICTURES, "label": CLASSES}, {"label": ["cat", "dog", "fish"]}),
    ],
    ids=["array", "tensor", "pillow", "pairs", "names", "rows", "pandas", "text array", "table", "dataset"],
)
def test_pictures_in_any_form(clip: dict[str, Any], given: Any) -> None:
    suite = featcal.Suite.of(**{**clip, "samples": {"pets": given}, "validation": None})
    drawn = featcal.open_family(suite, "cpu").samples("pets", "calibration", None, 42)
    pixels = clip["processor"](images=PICTURES, return_tensors="pt", input_data_format="channels_last")
    assert torch.equal(drawn.inputs["pixel_values"], pixels["pixel_values"].float())
    assert drawn.labels is not None
    assert drawn.labels.tolist() == CLASSES
    assert drawn.class_names == ("cat", "dog", "fish")


@pytest.mark.slow
def test_texts_in_any_form(tmp_path: Path) -> None:
    """Rows, pairs and a data set give what a file of the same rows gives."""
    file = text_suite(tmp_path / "suite", "t5-tied")
    lines = gzip.decompress((file.parent / "left.jsonl.gz").read_bytes()).decode().splitlines()
    rows = [row for line in lines if (row := json.loads(line))["split"] == "calibration"]
    texts, answers = [row["text"] for row in rows], [["no", "yes"][row["label"]] for row in rows]
    columns = {"input": "w0 {text} w1", "label": "label", "targets": ["no", "yes"]}
    pairs = [(f"w0 {text} w1", answer) for text, answer in zip(texts, answers, strict=True)]
    given = text_objects(file)
    expected = featcal.open_family(featcal.load_suite(file), "cpu").samples("left", "calibration", 5, 1)
    for samples, said in (
        (rows, columns),
        (rows, {"left": columns, "right": {}}),
        (TinyDataset({"text": texts, "label": [row["label"] for row in rows]}), columns),
        (pairs, {}),
        (([text for text, _ in pairs], answers), {}),
        ((np.array([text for text, _ in pairs]), np.array(answers)), {}),
        (tuple(pd.Series(one, index=range(1, 1 + len(pairs))) for one in zip(*pairs, strict=True)), {}),
        (pd.DataFrame(rows).set_index("split"), columns),
        ([{"input": text, "target": answer} for text, answer in pairs], {}),
        ([{"text": text, "target": answer} for text, answer in pairs], {}),
    ):
        limits = {"left": {"max_target_length": 4}}
        options = {**given, "samples": {"left": samples}, "test": None, "columns": said, "task_options": limits}
        drawn = featcal.open_family(featcal.Suite.of(**options), "cpu").samples("left", "calibration", 5, 1)
        assert same_tensors(dict(drawn.inputs), dict(expected.inputs))
        assert drawn.indices == expected.indices
    assert featcal.Suite.of(**options).tasks["left"].metric == "exact_match"


def test_texts_are_scored_alike(tmp_path: Path) -> None:
    file = text_suite(tmp_path / "suite", "t5-tied")
    rows: dict[str, list[Any]] = {}
    for task in TASKS:
        lines = gzip.decompress((file.parent / f"{task}.jsonl.gz").read_bytes()).decode().splitlines()
        rows[task] = [row for line in lines if (row := json.loads(line))["split"] == "test"]
    columns = {"input": "w0 {text} w1", "label": "label", "targets": ["no", "yes"]}
    limits = {task: {"max_target_length": 4} for task in TASKS}
    options = {**text_objects(file), "samples": None, "test": rows, "columns": columns, "task_options": limits}
    found = featcal.evaluate(featcal.Suite.of(**options), "expert:left")
    assert found.to_json() == featcal.evaluate(featcal.load_suite(file), "expert:left").to_json() | {
        "suite": "tiny-t5-tied"
    }


def test_paths_and_sources_as_samples(clip: dict[str, Any], tmp_path: Path) -> None:
    np.savez(tmp_path / "own.npz", train_x=PIXELS, train_y=CLASSES, test_x=PIXELS, test_y=CLASSES)
    for given in (tmp_path / "own.npz", {"arrays": str(tmp_path / "own.npz")}):
        suite = featcal.Suite.of(**{**clip, "samples": {"pets": given}})
        assert suite.tasks["pets"].calibration.arrays == str(tmp_path / "own.npz")  # type: ignore[union-attr]
        assert len(featcal.open_family(suite, "cpu").samples("pets", "calibration", None, 42)) == 5


def test_limit_of_tensors(clip: dict[str, Any]) -> None:
    suite = featcal.Suite.of(**{**clip, "columns": {"limit": 4}})
    assert len(featcal.open_family(suite, "cpu").samples("pets", "calibration", None, 42)) == 4


def _without(given: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in given.items() if name not in names}


def test_what_prepares_samples_is_asked_for(clip: dict[str, Any], t5_file: Path) -> None:
    bare = {**_without(clip, "tokenizer", "processor"), "samples": {"pets": PICTURES}}
    wanted = r"base: the CLIPModel in memory \(Suite.of takes tokenizer= and processor=\) has no preprocessor_config"
    with pytest.raises(InputError, match=wanted):
        featcal.calibrate(featcal.Suite.of(**bare), FEW)
    with pytest.raises(
        InputError, match=r"base: the CLIPModel in memory \(Suite.of takes .* has no tokenizer files, wh"
    ):
        featcal.evaluate(featcal.Suite.of(**bare))
    texts = {**_without(text_objects(t5_file), "tokenizer"), "samples": {"left": [("w1", "yes")]}}
    with pytest.raises(
        InputError, match=r"base: the T5ForConditionalGeneration in memory \(Suite.of .* has no tokenizer"
    ):
        featcal.calibrate(featcal.Suite.of(**texts), FEW)


class Streamed:
    """A data set with columns and no number of rows, like `datasets.IterableDataset`."""

    column_names, features = ["text"], None


WRONG: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], str]] = {
    "no base": (
        lambda o: {**o, "base": None, "merged": "ties"},
        "base is null, but a merge by recipe needs a base: name the base",
    ),
    "no expert": (lambda o: {**o, "experts": {"pets": None}}, "Suite.of: expert 'pets' is needed: a PreTrainedModel"),
    "base": (lambda o: {**o, "base": 3}, "base: a int; give a PreTrainedModel of transformers"),
    "expert": (
        lambda o: {**o, "experts": {"pets": o["base"].state_dict()}},
        "expert 'pets': a OrderedDict of tensors, which does not say its architecture",
    ),
    "experts": (lambda o: {**o, "experts": [o["base"]]}, "Suite.of: experts is a mapping from tasks to models"),
    "no experts": (lambda o: {**o, "experts": {}}, "Suite.of: experts is a mapping from tasks to models"),
    "recipe": (
        lambda o: {**o, "merged": "ties:scal=1"},
        r"Suite.of: not a valid suite\n  merged: 'scal' is not an option of ties.*Did you mean 'scale'",
    ),
    "merged": (lambda o: {**o, "merged": 3.0}, "merged: a float; give a PreTrainedModel"),
    "task": (
        lambda o: {**o, "samples": {"pet": PICTURES}},
        "calibration samples of 'pet', for which there is no expert; there are pets, signs. Did you mean 'pets'",
    ),
    "classes": (lambda o: {**o, "classes": ["a"]}, "Suite.of: classes is a list; give a mapping, such as"),
    "samples": (
        lambda o: {**o, "samples": PICTURES},
        "Suite.of: calibration samples is a list; give a mapping, such as {'pets': …}",
    ),
    "one sample": (lambda o: {**o, "samples": {"pets": [1, 2]}}, "task 'pets', calibration samples: a sample is a int"),
    "kind": (
        lambda o: {**o, "samples": {"pets": 3}},
        "task 'pets', calibration samples: a int is not a list of samples",
    ),
    "none": (lambda o: {**o, "samples": {"pets": []}}, "task 'pets', calibration samples: there are none"),
    "text": (
        lambda o: {**o, "samples": {"pets": "nowhere"}},
        "'nowhere' is not a folder of pictures and ends like none",
    ),
    "labels": (
        lambda o: {**o, "test": {"pets": (PIXELS, [1])}},
        "there are 1 labels, which is not one for each sample",
    ),
    "tuple": (lambda o: {**o, "test": {"pets": (1, 2, 3)}}, r"test samples: a tuple is \(samples, labels\)"),
    "columns": (
        lambda o: {**o, "samples": {"pets": [{"photo": PICTURES[0], "kind": 1}]}},
        r"it is not clear which column is what; there are 'photo', 'kind'. Give columns=",
    ),
    "option": (
        lambda o: {**o, "columns": {"inputs": "{a}"}},
        "there is no option of columns 'inputs', .* Did you mean 'input'",
    ),
    "tensors": (
        lambda o: {**o, "samples": {"pets": {"pixel_values": PIXELS, "token_type_ids": 1}}},
        "the mapping has 'token_type_ids', which no source of tensors holds",
    ),
    "ragged": (
        lambda o: {**o, "samples": {"pets": {"input_ids": [[1], [1, 2]]}}},
        "input_ids: these numbers do not make a t",
    ),
    "splits": (
        lambda o: {**o, "samples": {"pets": {"train": PICTURES, "dev": PICTURES}}},
        "a mapping with 'train', 'dev' is not a list of samples",
    ),
    "prepared": (
        lambda o: {**o, "columns": {"input": "{a}"}},
        r"columns \(input\) apply to rows, but these samples are t",
    ),
    "streamed": (
        lambda o: {**o, "samples": {"pets": Streamed()}},
        "task 'pets', calibration samples: a data set that streams has no number of rows; load it without streaming",
    ),
    "tools": (lambda o: {**o, "base": "here"}, "tokenizer and processor are for a base in memory; 'here' has its own"),
    "keyword": (
        lambda o: {**o, "sample": o["samples"]},
        "Suite.of: there is no keyword 'sample', only name, .*base, .*Did you mean 'samples'?",
    ),
    "near": (
        lambda o: {**o, "merged": "tie:scale=1"},
        "merged: 'tie:scale=1' is neither a folder nor a merge method. Did you mean 'ties'",
    ),
    "class names": (lambda o: {**o, "classes": {"pets": "cat"}}, "classes of 'pets' are 'cat'; give a list of names"),
    "columns list": (lambda o: {**o, "columns": ["text"]}, "columns is a list; give a mapping, such as {'input'"),
    "task options": (
        lambda o: {**o, "task_options": {"pets": ["metric"]}},
        "task_options of 'pets' is a list; give a mapping, such as {'max_length'",
    ),
    "expert twice": (
        lambda o: {**o, "task_options": {"pets": {"expert": "elsewhere"}}},
        "task_options of 'pets': expert is a separate keyword; leave it out here",
    ),
    "no pairs": (lambda o: {**o, "samples": {"pets": ([], [])}}, "task 'pets', calibration samples: there are none"),
    "one label": (
        lambda o: {**o, "samples": {"pets": (PIXELS, torch.tensor(1))}},
        r"calibration samples: a tuple is \(samples, labels\)",
    ),
}


def test_a_missing_value_of_pandas_is_no_word(tmp_path: Path) -> None:
    """As a number it would be the word 'nan'."""
    given = {**text_objects(text_suite(tmp_path / "suite", "t5-tied")), "test": None}
    table = pd.DataFrame({"input": ["w1", None], "target": ["yes", "no"]})
    family = featcal.open_family(featcal.Suite.of(**{**given, "samples": {"left": table}}), "cpu")
    with pytest.raises(InputError, match=r"sample 1: field 'input' holds nothing \(null\)"):
        family.samples("left", "calibration", None, 42)


@pytest.mark.parametrize("name", WRONG)
def test_wrong_objects_are_told(clip: dict[str, Any], name: str) -> None:
    change, message = WRONG[name]
    with pytest.raises(InputError, match=message):
        featcal.Suite.of(**change(clip))


def test_a_recipe_that_is_a_folder_too(clip: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name means the recipe, as everywhere; the folder is ./ties."""
    (tmp_path / "ties").mkdir()
    monkeypatch.chdir(tmp_path)
    assert getattr(featcal.Suite.of(**{**clip, "merged": "ties"}).merged, "method", "") == "ties"
    assert featcal.Suite.of(**{**clip, "merged": "./ties"}).merged == "./ties"


def test_a_model_object_is_no_name_of_a_model(clip: dict[str, Any]) -> None:
    with pytest.raises(
        InputError, match="model: a CLIPModel is not a model of this suite; give its name, a folder or what"
    ):
        featcal.evaluate(featcal.Suite.of(**clip), clip["base"])


def test_a_merge_of_other_experts_is_told(clip: dict[str, Any]) -> None:
    """Its recipe would make another model of these ones."""
    pets = {"pets": clip["experts"]["pets"]}
    merged = featcal.merge(base=clip["base"], experts=pets, method="ties")
    with pytest.raises(
        InputError, match=r"merged: it was merged from other experts \(pets\), .* give its to_model\(\)"
    ):
        featcal.Suite.of(**{**clip, "merged": merged})
    assert featcal.Suite.of(base=clip["base"], experts=pets, merged=merged).merged == merged.recipe
    swapped = {"pets": clip["experts"]["signs"]}
    with pytest.raises(InputError, match="it was merged from other experts"):
        featcal.Suite.of(base=clip["base"], experts=swapped, merged=merged)


def test_what_is_no_suite_is_told(clip: dict[str, Any], tmp_path: Path) -> None:
    functions: list[Callable[[Any], Any]] = [
        featcal.evaluate,
        featcal.measure_drift,
        featcal.select,
        featcal.open_family,
        lambda suite: featcal.compare(suite, "merged", "base"),
        lambda suite: featcal.run_sweep(suite, featcal.Grid((0.1,), (1.0,), (0.5,), featcal.CalibrationConfig())),
        lambda suite: featcal.calibrate_to_folder(suite, featcal.CalibrationConfig(), tmp_path / "out"),
    ]
    for function in functions:
        with pytest.raises(
            InputError, match=r"suite: a CLIPModel is not a suite; read one with featcal\.load_suite, or make one"
        ):
            function(clip["base"])
    assert not list(tmp_path.iterdir())
    with pytest.raises(InputError, match="merge: a CLIPModel is not a suite; give one, or base= and experts="):
        featcal.merge(clip["base"])


def test_a_picture_that_cannot_be_read(clip: dict[str, Any], tmp_path: Path) -> None:
    PICTURES[0].save(tmp_path / "cut.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "cut.png").read_bytes()[:60])
    with (
        Image.open(tmp_path / "cut.png") as broken,
        pytest.raises(InputError, match="samples: a picture cannot be read"),
    ):
        featcal.Suite.of(**{**clip, "samples": {"pets": [PICTURES[1], broken]}})


def test_a_merged_model_alone_is_no_suite(clip: dict[str, Any]) -> None:
    with pytest.raises(
        InputError, match=r"calibrate: 'clip-mini' is not a suite; read one with featcal\.load_suite, or give"
    ):
        featcal.calibrate("clip-mini")
    with pytest.raises(InputError, match="calibrate: a CLIPModel is not a suite"):
        featcal.calibrate(clip["base"], base=clip["base"])


def test_no_file_names_memory(tmp_path: Path, clip_file: Path) -> None:
    """Not even by the very text of a reference."""
    said = clip_file.read_text()
    (tmp_path / "a.yaml").write_text(said.replace("base: base", "base: memory:CLIPModel-0123456789abcdef"))
    with pytest.raises(
        InputError, match="base: 'memory:CLIPModel-0123456789abcdef' names an object of a Python process"
    ):
        featcal.open_family(featcal.load_suite(tmp_path / "a.yaml"), "cpu")
    rows = said.replace("tensors: samples.safetensors", "rows: here").replace("key:", "label:")
    (tmp_path / "b.yaml").write_text("\n".join(line for line in rows.splitlines() if "labels:" not in line))
    with pytest.raises(InputError, match="'rows' are samples in memory, which no file can name; give one of embedded"):
        featcal.load_suite(tmp_path / "b.yaml")

"""Inputs that would give a wrong result without a word, or a traceback: each is one clear message."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from clip_config import clip_config
from lanes import rows
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from suite_edits import Edit

from featcal.calibration.calibrate import calibrate_family, calibrate_to_folder, expert_passes
from featcal.export.merge import merge_to_folder
from featcal.export.write import carried_text
from featcal.family.opening import Family, open_family
from featcal.formats import checkpoint, output
from featcal.formats.located_model import Located
from featcal.formats.open_clip import located_folder
from featcal.formats.peft import read_adapter_config
from featcal.formats.processor import image_processor_settings
from featcal.formats.weights import InMemory
from featcal.preflight.check import check_suite
from featcal.session.api import evaluate, measure_drift
from featcal.session.model_names import recorded_calibration
from featcal.suite.schema import load_suite
from featcal.system.errors import InputError, NumericalError
from featcal.system.yaml_files import read_yaml

CONFIG = clip_config(samples=6)


def set_samples(root: Path, **tensors: torch.Tensor) -> None:
    """Put tensors of the task 'pets' in place of what the suite folder has."""
    file = root / "samples.safetensors"
    save_file(load_file(file) | {f"pets.{name}": tensor for name, tensor in tensors.items()}, file)


def set_config(file: Path, part: str = "", **options: Any) -> None:
    content = json.loads(file.read_text())
    (content[part] if part else content).update(options)
    file.write_text(json.dumps(content))


def make_integer(file: Path, name: str) -> None:
    tensors = load_file(file)
    save_file({**tensors, name: tensors[name].long()}, file)


QUERY = "vision_model.encoder.layers.0.self_attn.q_proj.weight"
ONE_EACH = "expected one integer for each of 12"
DEFECTS: dict[str, tuple[Any, ...]] = {
    "forward": (  # shapes agree, forwards do not: mixing CLIPs with and without QuickGELU
        lambda root: set_config(root / "experts/pets/config.json", hidden_act="gelu", num_attention_heads=4),
        "expert 'pets': hidden_act is 'gelu'",
        "num_attention_heads is 4",
        "the base has 'quick_gelu'",
    ),
    "integers": (
        lambda root: make_integer(root / "experts/pets/model.safetensors", QUERY),
        f"'{QUERY}' holds torch.int64, weights are floating-point",
    ),
    **{
        f"no model: {name}": (
            lambda root, name=name, value=value: set_config(
                root / "base/config.json", "vision_config", **{name: value}
            ),
            "base: ",
        )
        for name, value in {"num_attention_heads": 3, "hidden_size": "wide", "image_size": -1}.items()
    },
    **{
        f"inputs {shape}": (
            lambda root, shape=shape: set_samples(root, calibration=torch.zeros(12, *shape)),
            f"inputs have shape {list(shape)}, the model takes [3, 12, 12]",
        )
        for shape in ((3, 16, 16), (1, 12, 12))
    },
    **{
        f"labels {name}": (lambda root, labels=labels: set_samples(root, **{"test.y": labels}), message)
        for name, labels, message in (
            ("negative", torch.full((12,), -1), "label -1 is negative"),
            ("two-dimensional", torch.zeros(12, 1, dtype=torch.int64), ONE_EACH),
            ("too few", torch.zeros(5, dtype=torch.int64), ONE_EACH),
            ("fractions", torch.zeros(12), ONE_EACH),
        )
    },
}


@pytest.mark.parametrize("name", DEFECTS)
def test_defects_of_models_and_samples(own_suite_file: Path, name: str) -> None:
    plant, *messages = DEFECTS[name]
    plant(own_suite_file.parent)
    found = "\n".join(check_suite(load_suite(own_suite_file)).problems)
    assert [message for message in messages if message not in found] == []


def test_options_of_the_suite_that_others_stand_in_for(edit_suite: Edit, tmp_path: Path) -> None:
    """The card names them, so that a calibration with other ones failed when all its work was done."""
    family = open_family(load_suite(edit_suite(lambda suite: suite.update(calibration={"samples": -1}))), "cpu")
    refused = r"^calibration options of the suite: samples is -1; it is at least 1$"
    with pytest.raises(InputError, match=refused):
        calibrate_family(family, CONFIG)
    with pytest.raises(InputError, match=refused):
        calibrate_to_folder(family, CONFIG, tmp_path / "out")
    assert not (tmp_path / "out.partial").exists()


def test_unknown_split_from_python(tiny: Family) -> None:
    with pytest.raises(InputError, match=r"no split 'tset'.*Did you mean 'test'"):
        evaluate(tiny, split="tset")


def test_scale_that_is_no_number(edit_suite: Edit, tiny: Family, tmp_path: Path) -> None:
    file = edit_suite(lambda content: content["merged"].update(scale=float("nan")))
    with pytest.raises(InputError, match="scale is nan; it is finite"):
        load_suite(file)
    with pytest.raises(InputError, match="scale is inf; it is finite"):
        merge_to_folder(tiny, "task-arithmetic", float("inf"), tmp_path / "out")


def test_a_merge_that_overflows(edit_suite: Edit) -> None:
    suite = load_suite(edit_suite(lambda content: content["merged"].update(scale=1e300)))
    with pytest.raises(InputError, match=r"merged model \(task-arithmetic 1e\+300\).*NaN or infinite"):
        evaluate(suite, device="cpu")


def test_features_that_are_not_finite(tiny: Family) -> None:
    tensors = {name: 1e30 * t for name, t in tiny.merged.read(tiny.adapter.tower).items()}
    for action in (evaluate, measure_drift):
        with pytest.raises(NumericalError, match="final features are not finite"):
            action(tiny, InMemory("huge", tensors))


def test_no_drift_has_no_shares(tiny: Family) -> None:
    same = replace(tiny, experts=dict.fromkeys(tiny.experts, tiny.base))
    document = measure_drift(same, "base", samples=4, attribution=True).to_json()
    json.dumps(document, allow_nan=False)
    assert {layer["share"] for task in document["tasks"].values() for layer in task["layers"]} == {None}


def test_keys_that_a_merge_overrides_do_not_stand_twice(tmp_path: Path) -> None:
    """`z` is made before `x`, which lies deeper: PyYAML then merges into the mapping that it merges from."""
    file = tmp_path / "suite.yaml"
    file.write_text("d: {e: {f: &c {a: 1, split: t}, x: &t {<<: *c, split: v}}}\nz: {<<: *t, k: 2}\n")
    merged = {"a": 1, "split": "v"}
    assert read_yaml(file) == {"d": {"e": {"f": {"a": 1, "split": "t"}, "x": merged}}, "z": {**merged, "k": 2}}
    file.write_text("c: &c {a: 1}\nz: {<<: *c, k: 2, k: 3}\n")
    with pytest.raises(InputError, match="a key occurs twice, first in line 2 and again, line 2, column 19"):
        read_yaml(file)


BROKEN = {
    "no JSON": (b'{"secret": ', "is not valid JSON: Expecting value, line 1, column 12"),
    "bytes": (b'{"secret": "\xff"}', "is not valid JSON: byte 12 is not UTF-8"),
    "deep": (b"[" * 200_000, "is not valid JSON: it is nested too deeply"),
    "digits": (b'{"secret": ' + b"7" * 5000 + b"}", "is not valid JSON: a number has too many digits"),
    "list": (b'["secret"]', "must hold a mapping {...}"),
    "number": (b"7", "must hold a mapping {...}"),
}


READERS: dict[str, Callable[[Path], Any]] = {
    "config.json": lambda folder: checkpoint.read_config(folder, "base"),
    "model.safetensors.index.json": lambda folder: checkpoint.stored_names(folder, "base"),
    "open_clip_config.json": lambda folder: located_folder(folder, "base", "clip"),
    "adapter_config.json": lambda folder: read_adapter_config(folder, "base"),
    "preprocessor_config.json": image_processor_settings,
    "processor_config.json": image_processor_settings,
    "featcal.json": lambda folder: carried_text(Located("base", folder, {}, [], Mock()), "hf"),
    "featcal.json of a calibration": recorded_calibration,
}


@pytest.mark.parametrize("content", BROKEN)
@pytest.mark.parametrize("reader", READERS)
def test_every_json_file_is_refused_in_the_same_words(tmp_path: Path, reader: str, content: str) -> None:
    written, problem = BROKEN[content]
    file = tmp_path / reader.split()[0]
    file.write_bytes(written)
    with pytest.raises(InputError) as caught:
        READERS[reader](tmp_path)
    assert str(caught.value).endswith(f"{file} {problem}")
    assert "secret" not in "".join(traceback.format_exception(caught.value)).partition(str(file))[2]


def test_base_without_tokenizer(own_suite_file: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (own_suite_file.parent / "base" / name).unlink()
    with pytest.raises(InputError, match="no tokenizer files"):
        evaluate(load_suite(own_suite_file), device="cpu")


def test_one_class_has_no_margin(edit_suite: Edit) -> None:
    file = edit_suite(lambda content: content["tasks"]["pets"].update(classes=["cat"]))
    set_samples(file.parent, **{"validation.y": torch.zeros(12, dtype=torch.int64)})
    with pytest.raises(InputError, match="at least two classes"):
        measure_drift(load_suite(file), output=True, device="cpu")


def test_a_full_disk(tiny: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise SafetensorError("No space left on device")

    monkeypatch.setattr(output, "save_file", full)
    with pytest.raises(InputError, match="No space left"):
        calibrate_to_folder(tiny, CONFIG, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_resume_refuses_another_suite(own_suite_file: Path, edit_suite: Edit, tmp_path: Path) -> None:
    def stop(label: str, done: int, total: int) -> None:
        if done == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrate_to_folder(load_suite(own_suite_file), CONFIG, tmp_path / "out", device="cpu", progress=stop)

    def refused() -> None:
        with pytest.raises(InputError, match="comes from a run with other "):
            calibrate_to_folder(load_suite(own_suite_file), CONFIG, tmp_path / "out", resume=True, device="cpu")

    edit_suite(lambda c: c["merged"].update(scale=0.1))
    refused()
    edit_suite(lambda c: c["merged"].update(scale=0.5))
    set_samples(own_suite_file.parent, calibration=torch.ones(12, 3, 12, 12))
    refused()


def test_an_open_family_takes_the_precision_that_is_asked_for(tiny: Family) -> None:
    exact, fast = (
        calibrate_family(tiny, replace(CONFIG, precision=precision)).weights.read(tiny.adapter.tower)
        for precision in ("exact", "fast")
    )
    assert any(not exact[name].equal(fast[name]) for name in exact)
    with pytest.raises(InputError, match="another precision"):
        calibrate_family(tiny, replace(CONFIG, precision="fast"), experts=expert_passes(tiny, CONFIG))


def test_resident_families_keep_the_hashes_of_their_inputs(tiny: Family, tmp_path: Path) -> None:
    calibrate_family(tiny.resident(), CONFIG).save(tmp_path / "out")
    inputs = json.loads((tmp_path / "out" / "featcal.json").read_text())["inputs"]
    assert set(inputs) == {"base", "expert pets", "expert signs"}


def test_total_time_includes_writing(tiny: Family, tmp_path: Path) -> None:
    seconds = calibrate_to_folder(tiny, CONFIG, tmp_path / "out")["seconds"]
    assert seconds["total"] >= seconds["samples"] + seconds["calibration"] + seconds["writing"] - 1e-6
    assert seconds["writing"] > 0


def test_family_with_open_samples_of_the_wrong_size_is_refused(own_suite_file: Path) -> None:
    set_samples(own_suite_file.parent, validation=torch.zeros(12, 3, 8, 8))
    with pytest.raises(InputError, match=r"\[3, 8, 8\]"):
        measure_drift(open_family(load_suite(own_suite_file), device="cpu"))


KINDS = [
    ("llama", "LlamaForSequenceClassification", "a classifier", "give the LlamaForCausalLM it was made from"),
    ("llama", "LlamaModel", "a bare model, its head is missing", "save the whole LlamaForCausalLM"),
    ("t5", "T5EncoderModel", "a bare encoder, its decoder and", "give the T5ForConditionalGeneration it was made from"),
    ("t5", "T5ForSequenceClassification", "a classifier", "give the T5ForConditionalGeneration it was made from"),
    ("clip", "CLIPForImageClassification", "a classifier", r"CLIPVisionModel\.from_pretrained\(…\)\.save_pretrained"),
]


@pytest.mark.parametrize(("family", "name", "kind", "remedy"), KINDS)
@pytest.mark.parametrize("role", rows(["base", "expert"], quick=("expert",), slow=("base",)))
def test_a_model_of_another_kind_is_called_by_its_name(
    tmp_path: Path, own_suite_file: Path, family: str, name: str, kind: str, remedy: str, role: str
) -> None:
    """Right family, other head: `architectures` says what it is, whether it is the base or an expert."""
    import transformers
    from tiny_text import TASKS, write_text_suite

    file = own_suite_file if family == "clip" else write_text_suite(tmp_path / "s", family)
    task = "pets" if family == "clip" else TASKS[0]
    folder = file.parent / ("base" if role == "base" else f"experts/{task}")
    config = transformers.AutoConfig.from_pretrained(file.parent / "base")
    model = getattr(transformers, name)(config)
    for old in folder.glob("*.safetensors"):
        old.unlink()
    model.save_pretrained(folder)
    label = "base" if role == "base" else f"expert '{task}'"
    said = f"{label}: config.json calls it {name}: {kind}.*{remedy}"
    with pytest.raises(InputError, match=said):
        open_family(load_suite(file), "cpu")
    assert any(
        one.startswith(f"{label}: config.json calls it {name}") for one in check_suite(load_suite(file)).problems
    )


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (
            {"architecture": "resnet18", "num_classes": 10},
            "base: 'resnet18' is timm's ResNet; featcal reads only timm's Vis",
        ),
        ({"architecture": "vit_b_none", "num_classes": 10}, "base: timm cannot make a model 'vit_b_none'"),
        (
            {"architecture": "vit_base_patch16_siglip_224", "num_classes": 10},
            "its head does not read the class token alone",
        ),
        (
            {"architecture": "vit_tiny_patch16_224", "num_classes": 10},
            "none of the 150 tensors of a timm tower is there",
        ),
        ({"hidden_size": 4}, "names no model_type"),
    ],
)
def test_configs_without_a_model_type(own_suite_file: Path, config: dict[str, Any], says: str) -> None:
    (own_suite_file.parent / "base" / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=says):
        open_family(load_suite(own_suite_file), "cpu")


def test_an_expert_that_is_calibrated_is_not_taken_for_a_copy_of_itself(tiny: Family, tmp_path: Path) -> None:
    expert = tiny.experts["pets"]
    own = replace(tiny, merged=expert, merged_name="expert:pets")
    twins = replace(own, experts={**own.experts, "signs": expert})
    for family, said in ((own, False), (twins, True)):
        notes = calibrate_to_folder(family, CONFIG, tmp_path / str(said))["notes"]
        assert any("the same file twice" in note for note in notes) == said

"""`featcal check`: every planted defect is reported, all together, and nothing is fetched for it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml
from fake_hub import FakeHub
from safetensors.torch import load_file, save, save_file
from suite_edits import Edit
from tiny_text import CONFIGS, ROWS, text_suite, token_samples, write_text_suite
from torch import Tensor

import featcal
from featcal.family.opening import Family, open_family, open_model
from featcal.formats.locate import locate
from featcal.models.features import final_features
from featcal.preflight.check import check_suite
from featcal.suite.schema import load_suite
from featcal.system.errors import InputError
from featcal.system.versions import all_versions

State = dict[str, Tensor]


def plant(root: Path) -> Path:
    """A T5 suite in which every task has one defect, and two experts are swapped."""
    file = write_text_suite(root, "t5", distance=0.6, tasks=PLANTED)
    label_by_experts(root, ("left", "right"))
    experts = root / "experts"

    for task, (edit, _) in TENSORS.items():
        path = experts / task / "model.safetensors"
        save_file(edit(load_file(path)), path, {"format": "pt"})
    (experts / "left").rename(experts / "kept")
    (experts / "right").rename(experts / "left")
    (experts / "kept").rename(experts / "right")
    weights = experts / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-5])
    shard = experts / "shards" / "model.safetensors"
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    shard.rename(shard.with_name("one.safetensors"))
    shard.with_name("model.safetensors.index.json").write_text(json.dumps(index))
    pickled = experts / "pickle" / "model.safetensors"
    torch.save({**load_file(pickled), "args": Path()}, pickled.with_name("pytorch_model.bin"))
    pickled.unlink()
    (experts / "empty" / "model.safetensors").unlink()
    config = experts / "gptq" / "config.json"
    config.write_text(json.dumps(CONFIGS["t5"] | {"quantization_config": {"quant_method": "gptq"}}))
    tokenizer = json.loads((root / "base" / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["yes"], vocabulary["no"] = vocabulary["no"], vocabulary["yes"]
    (experts / "words" / "tokenizer.json").write_text(json.dumps(tokenizer))
    adapter = root / "dora"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 2, "use_dora": True})
    )
    rows = [{"text": "w1 w2 w3", "answer": "yes no yes"}, {"text": "w4", "answer": "no"}] * 4
    (root / "text.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    content = yaml.safe_load(file.read_text())
    tasks = content["tasks"]
    tasks["gated"]["expert"], tasks["gone"]["expert"] = "some/gated", "some/gone"
    tasks["dora"]["expert"] = "base+dora"
    text = {"jsonl": "text.jsonl", "input": "{text}", "target": "{answer}"}
    tasks["long"] |= {"calibration": text, "test": text, "max_target_length": 2}
    tasks["column"] |= {"calibration": {**text, "input": "{sentence}"}, "test": text}
    file.write_text(yaml.safe_dump(content))
    return file


K = "encoder.block.0.layer.0.SelfAttention.k.weight"


VOCABULARY = ("shared.weight", "lm_head.weight")


TENSORS: dict[str, tuple[Callable[[State], State], str]] = {
    "renamed": (lambda t: {f"module.{n}": t[n] for n in t}, "all 52 tensors look renamed, 'module' added"),
    "short": (lambda t: {n: t[n] for n in t if n != K}, f"missing tensors: '{K}'"),
    "extra": (
        lambda t: t | {"prefix_tuning": torch.zeros(2)},
        "one tensor that the base's architecture does not have, and no stage would run: 'prefix_tuning'",
    ),
    "misshapen": (
        lambda t: t | {K: torch.zeros(3, 4)},
        f"tensor '{K}' has shape [3, 4], expected [18, 16] as in the base",
    ),
    "rows": (
        lambda t: t | {n: torch.cat([t[n], t[n][:3]]) for n in VOCABULARY},
        f"vocabulary of {ROWS + 3} rows, the base has {ROWS} ('shared.weight', 'lm_head.weight'); 'vocabulary: ba",
    ),
    "mixed": (lambda t: t | {K: t[K].half()}, ""),
    "eight": (
        lambda t: t | {K: torch.zeros(18, 16, dtype=torch.int8)},
        "quantised weights (1 tensors in int8); give the checkpoint that it was quantised from",
    ),
    "foreign": (lambda t: {n: torch.randn_like(t[n]) for n in t}, "different base lineage in every layer"),
    "nan": (lambda t: t | {K: torch.full_like(t[K], torch.nan)}, "288 of 288 values are NaN or infinite"),
    "flipped": (
        lambda t: t | {K: t[K].index_put((torch.tensor(0), torch.tensor(0)), torch.tensor(3e38))},
        f"tensor '{K}' holds 3.0e+38, far beyond any trained weight; the file is damaged",
    ),
}
"""Experts of which tensors are changed, and what is said of them."""


FOUND = {task: message for task, (_, message) in TENSORS.items() if message} | {
    "cut": "is not a whole safetensors file",
    "shards": "names shards that are not there: two.safetensors",
    "pickle": "is damaged or not a plain state dict (it holds pathlib.PosixPath)",
    "empty": "no model.safetensors in",
    "gptq": "quantised weights (quantization_config in config.json, method gptq)",
    "words": "its tokenizer differs in 2 of the base's 32 tokens ('yes' is 3 in the base and 4 here, "
    "'no' is 4 in the base and 3 here)",
    "gated": "'some/gated' is gated; accept its licence on the Hub and set HF_TOKEN",
    "gone": "the Hub has no model 'some/gone'",
    "dora": "sets use_dora = true, which featcal cannot reproduce exactly",
}


PLANTED = ("left", "right", *FOUND, "mixed", "long", "column")


def label_by_experts(root: Path, tasks: tuple[str, ...]) -> None:
    """Make right on each task what its expert answers, on 64 samples."""
    family = open_family(load_suite(root / "suite.yaml"), device="cpu")
    samples = load_file(root / "samples.safetensors")
    for seed, task in enumerate(tasks):
        drawn = token_samples("t5", 100 + seed, 64)
        inputs = {"input_ids": drawn["ids"], "attention_mask": drawn["mask"], "labels": drawn["labels"][:, :1]}
        model = family.experts[task]
        features = final_features(family.adapter, model, {}, [inputs], family.compute)
        answers = family.adapter.output(model.read(family.adapter.scoring), features).argmax(1, keepdim=True)
        for name, tensor in {"ids": drawn["ids"], "mask": drawn["mask"], "labels": answers}.items():
            samples[f"{task}.calibration.{name}"] = tensor
    save_file(samples, root / "samples.safetensors")


def test_everything_that_is_wrong_in_one_run(tmp_path: Path, hub: Callable[..., FakeHub]) -> None:
    hub({}, gated=("some/gated",))
    found = check_suite(load_suite(plant(tmp_path / "suite")))
    for task, message in FOUND.items():
        assert [p for p in found.problems if p.startswith(f"expert '{task}'") and message in p], (task, message)
    one = "task 'column', calibration samples: 'input' needs the column 'sentence', which is not there"
    assert [p for p in found.problems if p.startswith(one)], found.problems
    swapped = "experts 'left' and 'right' are probably swapped: the expert of 'right' belongs to 'left'"
    assert [p for p in found.problems if p.startswith(swapped)], found.diagonal
    assert len(found.problems) == len(FOUND) + 2
    notes = "\n".join(found.notes)
    assert "expert 'mixed': a mix of dtypes: 51 tensors float32, 1 tensors float16" in notes
    assert "task 'long', calibration samples: 4 of 8 are longer than the task's limits (max_length 512, " in notes
    assert found.family is None
    json.dumps(found.to_json(), allow_nan=False)


def test_problems_come_by_model_and_then_by_task(tmp_path: Path, hub: Callable[..., FakeHub]) -> None:
    hub({}, gated=("some/gated",))
    problems = check_suite(load_suite(plant(tmp_path / "suite")), probe=False).problems
    experts = [problem.split("'")[1] for problem in problems if problem.startswith("expert '")]
    assert experts == [task for task in sorted(PLANTED) if task in FOUND]
    assert problems[-1].startswith("task 'column'")


def test_a_broken_base_does_not_hide_the_experts(own_suite_file: Path) -> None:
    for model in ("base", "experts/pets"):
        file = own_suite_file.parent / model / "model.safetensors"
        file.write_bytes(file.read_bytes()[:100])
    found = check_suite(load_suite(own_suite_file))
    assert [problem.split(":")[0] for problem in found.problems] == ["base", "expert 'pets'"]


def test_what_scores_would_refuse_is_found(tmp_path: Path) -> None:
    file = text_suite(tmp_path, "llama")
    content = yaml.safe_load(file.read_text())
    left, right = content["tasks"]
    rows = [{"text": "w1 w2", "label": 0}] * 200 + [{"text": " ", "label": 1}]
    (tmp_path / "blank.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    content["tasks"][left]["test"] = {
        "jsonl": "blank.jsonl",
        "input": "{text}",
        "label": "label",
        "targets": ["a", "b"],
    }
    del content["tasks"][right]["test"]["targets"], content["tasks"][right]["test"]["label"]
    file.write_text(yaml.safe_dump(content))
    found = check_suite(load_suite(file), probe=True)
    problem = f"task '{left}', test samples: {tmp_path / 'blank.jsonl'}, line 201: the input is empty"
    assert found.problems == (problem,)
    notes = "\n".join(found.notes)
    assert f"task '{right}', test samples: no targets; give 'target' in the source; it cannot be scored" in notes


def test_labels_of_every_sample_need_a_class(own_suite_file: Path, edit_suite: Edit) -> None:
    file = own_suite_file.parent / "samples.safetensors"
    content = load_file(file)
    labels = content["pets.test.y"]
    labels[len(labels) - 1] = 3
    save_file(content, file)
    assert check_suite(load_suite(own_suite_file)).problems == (
        "task 'pets', test samples: label 3 has no class, there are 3 ('cat', 'dog', 'fish')",
    )


def test_a_sound_suite(tiny_suite_file: Path) -> None:
    found = check_suite(load_suite(tiny_suite_file))
    assert found.problems == ()
    assert found.family is not None
    assert found.family.suite.base == "base"
    document = found.to_json()
    info, tower = found.family.merged.info, found.family.adapter.tower
    sizes: dict[str, Any] = {"family": "clip", "blocks": 3, "tasks": 2, "dtypes": ["float32"]}
    sizes["parameters"] = sum(torch.Size(info[name].shape).numel() for name in tower)
    assert {key: document[key] for key in sizes} == sizes
    assert document["bytes_written"] == 4 * sum(torch.Size(one.shape).numel() for one in info.values())
    assert (document["downloads"], document["estimates"]["samples"]) == ([], 12)
    assert list(document["lineage"]["models"]) == ["expert 'pets'", "expert 'signs'"]
    assert document["versions"] == all_versions()
    assert document["versions"]["featcal"] == featcal.__version__


def test_calibration_options_out_of_range(edit_suite: Edit) -> None:
    found = check_suite(load_suite(edit_suite(lambda content: content.update(calibration={"alpha": 2.0}))))
    assert found.problems == ("calibration options of the suite: alpha is 2; it lies in [0, 1]",)


def test_flipped_bits_of_a_header_are_never_a_traceback(own_suite_file: Path, tiny: Family) -> None:
    """Whatever a flip does to names, shapes and offsets: a problem that names the model, or one of the same shapes."""
    file = own_suite_file.parent / "experts" / "pets" / "model.safetensors"
    sound = file.read_bytes()
    length = int.from_bytes(sound[:8], "little")
    chooser = random.Random(0)
    refused: list[InputError] = []
    for _ in range(200):
        content = bytearray(sound)
        content[chooser.randrange(8 + length)] ^= 1 << chooser.randrange(8)
        file.write_bytes(content)
        try:
            open_model(locate("experts/pets", own_suite_file.parent, "pets"), tiny.adapter, torch.device("cpu"))
        except InputError as error:
            refused.append(error)
    assert len(refused) > 150
    assert all(problem.startswith("pets: ") for error in refused for problem in error.problems)


def test_every_damaged_shard_is_named(own_suite_file: Path) -> None:
    folder = own_suite_file.parent / "experts" / "pets"
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    index = {name: f"{i % 3}.safetensors" for i, name in enumerate(names)}
    for shard in sorted(set(index.values())):
        content = save({name: tensors[name] for name in names if index[name] == shard})
        (folder / shard).write_bytes(content if shard == "0.safetensors" else content[:-3])
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    problems = check_suite(load_suite(own_suite_file)).problems
    assert len(problems) == 2
    for shard, problem in zip(("1.safetensors", "2.safetensors"), problems, strict=True):
        assert f"{folder / shard} is not a whole safetensors file" in problem

"""`featcal check`: every planted defect is reported, all together, and nothing is fetched for it."""

from __future__ import annotations

import json
import math
import os
import random
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
import yaml
from click.testing import CliRunner
from clip_config import clip_config
from command_line import Run
from huggingface_hub import constants
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
from lanes import cases_by_message
from safetensors.torch import load_file, save, save_file
from tiny_clip import TASKS
from tiny_text import CONFIGS, ROWS, token_samples, write_text_base, write_text_expert, write_text_suite
from torch import Tensor

from featcal.cli import commands
from featcal.cli import suite as suites
from featcal.family import ancestry
from featcal.family.ancestry import UNRELATED, measure_lineage
from featcal.family.differences import differences
from featcal.family.opening import Family, open_checked, open_family
from featcal.formats.locate import locate
from featcal.formats.weights import InMemory
from featcal.models.features import final_features
from featcal.preflight import check as preflight
from featcal.preflight import estimates
from featcal.preflight.check import check
from featcal.preflight.places import Places
from featcal.preflight.probe import Diagonal
from featcal.preflight.samples import Drawn
from featcal.preflight.tokenizers import tokenizer_disagreement
from featcal.suite.calibration_options import CalibrationConfig
from featcal.suite.schema import load_suite
from featcal.system.errors import InputError
from featcal.system.formatting import some
from featcal.system.resources import data_path

Edit = Callable[[Callable[[dict[str, Any]], None]], Path]
State = dict[str, Tensor]


# ------------------------------------------------------------------------------------------- a Hub that is not there
class FakeHub:
    """Folders as repositories of a Hub, by id; counts what is asked for."""

    def __init__(self, models: Mapping[str, Path], gated: tuple[str, ...] = ()) -> None:
        self.models, self.gated, self.fetched = dict(models), gated, list[str]()

    def model_info(self, repo: str, *, revision: str | None = None, files_metadata: bool = False) -> Any:
        if repo not in self.models and repo not in self.gated:
            raise _http(RepositoryNotFoundError)
        root = self.models.get(repo, Path("nowhere"))
        files = sorted(file for file in root.rglob("*") if file.is_file())
        siblings = [SimpleNamespace(rfilename=str(one.relative_to(root)), size=one.stat().st_size) for one in files]
        return SimpleNamespace(gated="manual" if repo in self.gated else False, siblings=siblings)

    def auth_check(self, repo: str) -> None:
        raise _http(GatedRepoError)

    def parse_safetensors_file_metadata(self, repo: str, name: str, *, revision: str | None = None) -> Any:
        tensors = load_file(self.models[repo] / name)
        return SimpleNamespace(
            tensors={name: SimpleNamespace(shape=list(t.shape), dtype="F32") for name, t in tensors.items()}
        )

    def hf_hub_download(self, repo: str, name: str, *, revision: str | None = None, local_dir: str) -> str:
        self.fetched.append(name)
        return str(shutil.copy(self.models[repo] / name, local_dir))


def _http(error: type[Exception]) -> Exception:
    made = error.__new__(error)
    Exception.__init__(made, "no")
    return made


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., FakeHub]:
    """Put a Hub of local folders in place of the real one, with an empty cache."""

    def build(models: Mapping[str, Path], gated: tuple[str, ...] = ()) -> FakeHub:
        fake = FakeHub(models, gated)
        monkeypatch.setattr(huggingface_hub, "HfApi", lambda: fake)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "no-cache"))
        return fake

    return build


def referring(base: str = "base", **experts: str) -> Callable[[dict[str, Any]], None]:
    """A change of a suite file to other models."""

    def change(content: dict[str, Any]) -> None:
        content["base"] = base
        for task, reference in experts.items():
            content["tasks"][task]["expert"] = reference

    return change


def put_in_cache(cache: Path, repo: str, folder: Path) -> Path:
    """A model folder as the Hub's client leaves it behind."""
    home = cache / f"models--{repo.replace('/', '--')}"
    snapshot = home / "snapshots" / ("a" * 40)
    shutil.copytree(folder, snapshot)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text("a" * 40)
    return snapshot


# -------------------------------------------------------------------------------------------------- all at once
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
    torch.save(load_file(pickled), pickled.with_name("pytorch_model.bin"))
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
    "pickle": "only pickled weights (pytorch_model.bin), which can run code",
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
    found = check(load_suite(plant(tmp_path / "suite")))
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
    problems = check(load_suite(plant(tmp_path / "suite")), probe=False).problems
    experts = [problem.split("'")[1] for problem in problems if problem.startswith("expert '")]
    assert experts == [task for task in sorted(PLANTED) if task in FOUND]
    assert problems[-1].startswith("task 'column'")


def test_a_broken_base_does_not_hide_the_experts(own_suite_file: Path) -> None:
    for model in ("base", "experts/pets"):
        file = own_suite_file.parent / model / "model.safetensors"
        file.write_bytes(file.read_bytes()[:100])
    found = check(load_suite(own_suite_file))
    assert [problem.split(":")[0] for problem in found.problems] == ["base", "expert 'pets'"]


def test_a_sound_suite(tiny_suite_file: Path) -> None:
    found = check(load_suite(tiny_suite_file))
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


def test_calibration_options_out_of_range(edit_suite: Edit) -> None:
    found = check(load_suite(edit_suite(lambda content: content.update(calibration={"alpha": 2.0}))))
    assert found.problems == ("calibration options of the suite: alpha is 2; it lies in [0, 1]",)


# ------------------------------------------------------------------------------------------------------- damaged files
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
            open_checked(locate("experts/pets", own_suite_file.parent, "pets"), tiny.adapter, torch.device("cpu"))
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
    problems = check(load_suite(own_suite_file)).problems
    assert len(problems) == 2
    for shard, problem in zip(("1.safetensors", "2.safetensors"), problems, strict=True):
        assert f"{folder / shard} is not a whole safetensors file" in problem


@pytest.mark.slow
def test_the_conversion_command_of_a_pickle_works(own_suite_file: Path) -> None:
    file = own_suite_file.parent / "experts" / "pets" / "model.safetensors"
    before = load_file(file)
    torch.save(before, file.with_name("pytorch_model.bin"))
    torch.save({"step": 3}, file.with_name("optimizer.pt"))
    file.unlink()
    (problem,) = check(load_suite(own_suite_file)).problems
    command = next(line for line in problem.splitlines() if "python -c" in line)
    subprocess.run([sys.executable, *shlex.split(command)[1:]], check=True)
    assert check(load_suite(own_suite_file)).problems == ()
    assert all(tensor.equal(before[name]) for name, tensor in load_file(file).items())


# ------------------------------------------------------------------------------------------------------------ the Hub
def test_ids_in_the_local_cache_are_read_from_there(
    edit_suite: Edit, own_suite_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = own_suite_file.parent
    put_in_cache(tmp_path / "cache", "some/clip", root / "base")
    put_in_cache(tmp_path / "cache", "some/pets", root / "experts" / "pets")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: pytest.fail("nothing is asked of the Hub"))
    found = check(load_suite(edit_suite(referring("some/clip", pets="some/pets@main"))))
    assert (found.problems, found.downloads) == ((), ())
    assert found.family is not None
    assert found.family.suite.base == "some/clip"


def test_what_would_be_fetched_and_how_large(
    edit_suite: Edit, own_suite_file: Path, hub: Callable[..., FakeHub], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = own_suite_file.parent
    models = {"some/clip": root / "base", "some/pets": root / "experts" / "pets"}
    fake = hub(models)
    suite = load_suite(edit_suite(referring("some/clip", pets="some/pets")))
    monkeypatch.setattr(preflight, "cache_free_bytes", lambda: 1000)
    found = check(suite)
    assert (found.problems, found.family) == ((), None)
    sizes = {repo: sum(file.stat().st_size for file in folder.iterdir()) for repo, folder in models.items()}
    assert {one.ref: one.bytes for one in found.downloads} == sizes
    assert set(fake.fetched) == {"config.json"}
    assert any("1000 B are free on the disk of its local cache" in note for note in found.notes)
    assert found.to_json()["parameters"] > 0

    tensors = load_file(root / "experts" / "pets" / "model.safetensors")
    name = "vision_model.encoder.layers.0.self_attn.q_proj.weight"
    save_file(tensors | {name: torch.zeros(2, 2)}, root / "experts" / "pets" / "model.safetensors")
    (problem,) = check(suite).problems
    assert problem.startswith(f"expert 'pets': tensor '{name}' has shape [2, 2], expected [16, 16]")


def test_without_the_hub_there_is_one_message(edit_suite: Edit, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "no-cache"))
    suite = edit_suite(referring(pets="some/expert", signs="some/expert"))
    (problem,) = check(load_suite(suite)).problems
    assert "'some/expert' (expert 'pets' and 1 more)" in problem
    assert "the Hub cannot be reached" in problem


def test_data_sets_are_not_fetched_either(edit_suite: Edit, hub: Callable[..., FakeHub], monkeypatch: Any) -> None:
    fake = hub({})
    sizes = {"README.md": 7, "plain/train.parquet": 1000, "other/train.parquet": 5000}
    siblings = [SimpleNamespace(rfilename=name, size=size) for name, size in sizes.items()]
    answer = SimpleNamespace(gated=False, siblings=siblings)
    monkeypatch.setattr(fake, "dataset_info", lambda repo, **_: answer, raising=False)
    source = {"hub": "some/pictures", "config": "plain", "split": "train"}
    monkeypatch.setitem(sys.modules, "datasets", None)
    found = check(load_suite(edit_suite(lambda content: content["tasks"]["pets"].update(test=source))), probe=False)
    assert [(one.ref, one.kind, one.bytes) for one in found.downloads] == [("some/pictures (plain)", "data set", 1000)]
    package = "data sets 'some/pictures': datasets is not installed; install it with: pip install \"featcal[hub]\""
    assert found.problems == (package,)
    assert any("without a revision" in note and "some/pictures" in note for note in found.notes)


def test_a_half_fetched_model_counts_as_not_there(tmp_path: Path, hub: Callable[..., FakeHub]) -> None:
    write_text_base(tmp_path / "whole", "t5")
    hub({"some/t5": tmp_path / "whole"})
    snapshot = put_in_cache(tmp_path / "no-cache", "some/t5", tmp_path / "whole")
    (snapshot / "model.safetensors").unlink()
    places = Places(tmp_path)
    located = places.locate("some/t5", "base")
    assert located is not None
    assert list(places.downloads) == ["some/t5"]
    with pytest.raises(InputError, match="was not fetched from the Hub yet"):
        located.open(lambda name: name, {}).read(["shared.weight"])


@pytest.fixture
def several(own_suite_file: Path, tmp_path: Path) -> Path:
    """A repository with a folder for every model, and what else such folders hold; nothing lies at its top."""
    root = own_suite_file.parent
    shutil.copytree(root / "experts", tmp_path / "several" / "tuned")
    for task in TASKS:
        folder = tmp_path / "several" / "tuned" / task
        (folder / "classifier_head.pt").write_bytes(bytes(7))
        (folder / "training_args.bin").write_bytes(bytes(7))
        shutil.copytree(folder, folder / "checkpoint-5")
    return tmp_path / "several"


def test_a_model_in_a_folder_of_a_repository(edit_suite: Edit, several: Path, hub: Callable[..., FakeHub]) -> None:
    """Sizes, headers and config are those of its folder; pickles beside the weights, which are not fetched, and
    models in folders below do not count."""
    fake = hub({"some/several": several})
    ref = "some/several/tuned/pets@main"
    found = check(load_suite(edit_suite(referring(pets=ref))), probe=False)
    assert found.problems == ()
    files = {file.name: file.stat().st_size for file in (several / "tuned" / "pets").iterdir() if file.is_file()}
    pickles = {"classifier_head.pt", "training_args.bin"}
    below = sum(file.stat().st_size for file in (several / "tuned/pets/checkpoint-5").glob("*.json"))
    assert {one.ref: one.bytes for one in found.downloads} == {
        ref: sum(size for name, size in files.items() if name not in pickles) + below
    }
    assert fake.fetched == ["tuned/pets/config.json"]
    file = several / "tuned" / "pets" / "model.safetensors"
    name = "vision_model.encoder.layers.0.self_attn.q_proj.weight"
    save_file(load_file(file) | {name: torch.zeros(2, 2)}, file)
    (problem,) = check(load_suite(edit_suite(referring(pets=ref))), probe=False).problems
    assert problem.startswith(f"expert 'pets': tensor '{name}' has shape [2, 2], expected [16, 16]")


def test_shards_of_a_model_on_the_hub(several: Path, hub: Callable[..., FakeHub]) -> None:
    hub({"some/several": several})
    folder = several / "tuned" / "pets"
    whole = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    for number in range(2):
        save_file(dict(list(whole.items())[number::2]), folder / f"part-{number}.safetensors")
    places = {name: f"part-{i % 2}.safetensors" for i, name in enumerate(whole)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    located = Places(several).locate("some/several/tuned/pets", "m")
    assert located is not None
    assert set(located.names) == set(whole)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../x.safetensors"}}))
    with pytest.raises(InputError, match=r"index\.json is not a valid index of shards"):
        Places(several).locate("some/several/tuned/pets", "m")


@pytest.mark.parametrize(
    ("ref", "said"),
    [
        (
            "some/several/tuned/pats",
            r"'some/several' on the Hub has no folder 'tuned/pats'; .* Did you mean 'tuned/pets'",
        ),
        ("some/several/tuned", "'some/several/tuned' on the Hub has no safetensors; "),
        ("some/several", "'some/several' on the Hub has no safetensors; "),
    ],
)
def test_folders_of_a_repository_are_listed(several: Path, hub: Callable[..., FakeHub], ref: str, said: str) -> None:
    hub({"some/several": several})
    with pytest.raises(InputError, match=said) as caught:
        Places(several).locate(ref, "m")
    folders = [f"tuned/{task}{below}" for task in sorted(TASKS) for below in ("", "/checkpoint-5")]
    assert f"its folders with safetensors are {', '.join(map(repr, folders))}." in str(caught.value)


# ----------------------------------------------------------------------------------------------------------- lineage
def test_distance_is_that_of_the_noise(tiny_suite_file: Path) -> None:
    """The experts were made by noise of relative size 0.3: cosine 1 / sqrt(1.09)."""
    family = open_family(load_suite(tiny_suite_file), device="cpu")
    found, damaged = measure_lineage(family, dict(family.experts))
    assert damaged == {}
    for one in found.models.values():
        assert one.distance[1:] == pytest.approx([0.3] * 3, rel=1e-3)
        assert one.cosine[1:] == pytest.approx([1.09**-0.5] * 3, abs=0.02)


@pytest.mark.parametrize("suite", ["clip-mini", "t5-mini", "lm-mini"])
def test_the_threshold_lies_between_descendants_and_strangers(suite: str) -> None:
    family = open_family(load_suite(suite), device="cpu")
    generator = torch.Generator().manual_seed(0)
    tensors = family.base.read(family.adapter.tower)
    stranger = InMemory("stranger", {n: torch.randn(t.shape, generator=generator) for n, t in tensors.items()})
    found, _ = measure_lineage(family, {**family.experts, "stranger": stranger})
    cosines = {name: one.cosine for name, one in found.models.items()}
    assert max(map(abs, cosines.pop("stranger"))) < 0.1 * UNRELATED
    assert min(min(one) for one in cosines.values()) > 0.9 > UNRELATED


def test_copies_and_outliers_are_noted(own_suite_file: Path, edit_suite: Edit) -> None:
    root = own_suite_file.parent

    def change(content: dict[str, Any]) -> None:
        for name in ("near", "far", "twin", "still"):
            content["tasks"][name] = {**content["tasks"]["pets"], "expert": f"experts/{name}"}

    edit_suite(change)
    shutil.copytree(root / "experts" / "pets", root / "experts" / "twin")
    base = load_file(root / "base" / "model.safetensors")
    config = root / "experts" / "pets" / "config.json"
    for name, factor in {"near": 1.01, "far": 2.9, "still": 1.0}.items():
        (root / "experts" / name).mkdir()
        tower = {n: factor * t for n, t in base.items() if n.startswith("vision_model.") and t.is_floating_point()}
        save_file(tower, root / "experts" / name / "model.safetensors")
        shutil.copy(config, root / "experts" / name)
    found = check(load_suite(own_suite_file), probe=False)
    assert found.problems == ()
    notes = "\n".join(found.notes)
    assert "expert 'still': its weights are the base's own" in notes
    assert "expert 'far': 6 times as far from the base as the other experts (1.90 of its norm against 0.30)" in notes
    assert "expert 'twin': exactly as far from the base as expert 'pets': the same file twice?" in notes
    assert "expert 'near'" not in notes


# ------------------------------------------------------------------------------------------------------------- probe
def diagonal(rows: list[list[float]], samples: int = 64) -> tuple[list[str], list[str]]:
    names = "abc"[: len(rows)]
    accuracy = {expert: dict(zip(names, row, strict=True)) for expert, row in zip(names, rows, strict=True)}
    return Diagonal(accuracy, samples).findings()


def test_the_diagonal() -> None:
    assert diagonal([[0.9, 0.5], [0.5, 0.9]]) == ([], [])
    (problem,), notes = diagonal([[0.2, 0.9], [0.9, 0.2]])
    assert (problem.count("swapped"), notes) == (1, [])
    assert diagonal([[0.2, 0.9], [0.9, 0.2]], samples=4) == ([], [])
    (problem,), _ = diagonal([[0.2, 0.9, 0.1], [0.1, 0.2, 0.9], [0.9, 0.1, 0.2]])
    assert "experts 'a' and 'c' and 'b' are probably mixed up: the expert of 'c' belongs to 'a'" in problem
    problems, (note,) = diagonal([[0.3, 0.9], [0.8, 0.95]])
    assert problems == []
    assert "expert 'a': the expert of 'b' does its task better (80% against its own expert's 30%" in note


@pytest.mark.parametrize(("split", "looks"), [("validation", 0), ("calibration", 0), ("test", len(TASKS))])
def test_a_look_at_the_test_split_is_avoided_said_and_counted(
    edit_suite: Edit, split: str, looks: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """`split` is the first that has labels."""

    def change(content: dict[str, Any]) -> None:
        for task in content["tasks"].values():
            if split != "validation":
                del task["validation"]
            if split == "test":
                del task["calibration"]["labels"]

    found = check(load_suite(edit_suite(change)), probe=True)
    samples = 12
    assert found.to_json()["probe"] == {
        "samples": samples,
        "scored_on": dict.fromkeys(TASKS, split),
        "test_looks": looks,
    }
    assert [note for note in found.notes if "a look at the test split" in note] == [
        f"experts were scored on {samples} test samples of {some(TASKS)}, for want of labels in validation and "
        "calibration samples: that is a look at the test split; --no-probe leaves it out"
    ][:looks]
    suites.show_check(found)
    assert f"{samples} samples of each, split {split}\n" in capsys.readouterr().out


def test_splits_are_named_by_task_where_they_differ() -> None:
    assert (
        Diagonal({}, 4, {"a": "validation", "b": "test", "c": "test"}).split_words == "validation (a) and test (b, c)"
    )


# ------------------------------------------------------------------------------------------- tokenizers, names, bases
def test_tokenizers_that_disagree(tmp_path: Path) -> None:
    def write(name: str, vocabulary: Any, **rest: Any) -> Path:
        (tmp_path / name).mkdir()
        content = {"model": {"vocab": vocabulary}, "added_tokens": [], **rest}
        (tmp_path / name / "tokenizer.json").write_text(json.dumps(content))
        return tmp_path / name

    base = write("base", {"a": 0, "b": 1})
    same = write("list", [["a", -1.0], ["b", -2.0]])
    more = write("more", {"a": 0, "b": 1}, added_tokens=[{"content": "<x>", "id": 2}])
    other = write("other", {"a": 1, "b": 0})
    assert tokenizer_disagreement(base, base) is None
    assert tokenizer_disagreement(base, tmp_path) is None
    found = [tokenizer_disagreement(base, folder) for folder in (same, more, other)]
    assert [one and one.changed for one in found] == [False, False, True]
    assert found[1] is not None
    assert found[1].sentence == "its tokenizer has one token that the base's does not have ('<x>' is 2)"
    older = tmp_path / "older"
    older.mkdir()
    (older / "vocab.json").write_text(json.dumps({"a": 0, "b": 1}))
    (older / "added_tokens.json").write_text(json.dumps({f"<{n}>": 9 - n for n in range(5)}))
    said = tokenizer_disagreement(base, older)
    assert said is not None
    assert not said.changed
    assert (
        said.sentence == "its tokenizer has 5 tokens that the base's does not have ('<4>' is 5, '<3>' is 6, '<2>' is 7)"
    )


@pytest.mark.parametrize("content", [{"model": [1]}, {"model": {"vocab": [1]}}, {"added_tokens": [{"id": 1}]}])
def test_a_tokenizer_that_is_none_is_a_problem(tmp_path: Path, content: dict[str, Any]) -> None:
    for name, written in (("base", {"model": {"vocab": {"a": 0}}}), ("damaged", content)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer.json").write_text(json.dumps(written))
    found = tokenizer_disagreement(tmp_path / "base", tmp_path / "damaged")
    assert found is not None
    assert found.changed
    assert found.sentence.startswith("the vocabulary in its tokenizer.json cannot be read")
    with pytest.raises(InputError, match="cannot be read"):
        tokenizer_disagreement(tmp_path / "damaged", tmp_path / "base")


def test_files_of_sentencepiece_are_compared_as_they_are(tmp_path: Path) -> None:
    for name, content in (("base", b"pieces"), ("same", b"pieces"), ("other", b"more pieces")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer.model").write_bytes(content)
    assert tokenizer_disagreement(tmp_path / "base", tmp_path / "same") is None
    said = tokenizer_disagreement(tmp_path / "base", tmp_path / "other")
    assert said is not None
    assert not said.changed
    assert said.sentence.startswith("its 'tokenizer.model' is another file than the base's; which tokens differ")


RENAMES = {
    "'base_model.model' added": lambda n: f"base_model.model.{n}",
    "'visual.trunk' in place of 'vision_model'": lambda n: n.replace("vision_model.", "visual.trunk."),
    "24 tensors look renamed, 'attn' in place of 'self_attn'": lambda n: n.replace(".self_attn.", ".attn."),
    "a tensor looks renamed, 'fc_1'": lambda n: n.replace("layers.1.mlp.fc1.weight", "layers.1.mlp.fc_1.weight"),
}


@pytest.mark.parametrize(("rename", "message"), cases_by_message(RENAMES))
def test_likely_renames(tiny: Family, rename: Callable[[str], str], message: str) -> None:
    tensors = {rename(name): t for name, t in tiny.experts["pets"].read(tiny.adapter.tower).items()}
    (problem,) = differences(tiny.adapter, InMemory("x", tensors))
    assert message in problem


def test_a_name_that_is_no_rename(tiny: Family) -> None:
    tensors = tiny.experts["pets"].read(tiny.adapter.tower)
    name = "vision_model.post_layernorm.bias"
    moved = {n: t for n, t in tensors.items() if n != name} | {"something.else": tensors[name]}
    assert [p.split(":")[1].strip() for p in differences(tiny.adapter, InMemory("x", moved))] == [
        "missing tensors",
        "one tensor that the base's architecture does not have, and no stage would run",
    ]


def test_another_declared_base_is_noted(tmp_path: Path, hub: Callable[..., FakeHub]) -> None:
    base = write_text_base(tmp_path / "base", "t5")
    write_text_expert(tmp_path / "expert", base, "t5", 1)
    config = tmp_path / "expert" / "config.json"
    config.write_text(json.dumps(CONFIGS["t5"] | {"_name_or_path": "google/t5-other"}))
    hub({"some/t5": tmp_path / "base"})
    content = {"name": "x", "base": "some/t5", "merged": {"method": "simple-averaging"}}
    (tmp_path / "suite.yaml").write_text(yaml.safe_dump(content | {"tasks": {"a": {"expert": "expert"}}}))
    notes = "\n".join(check(load_suite(tmp_path / "suite.yaml")).notes)
    assert "expert 'a': its config.json names 'google/t5-other' as its base, the suite's is 'some/t5'" in notes


@pytest.mark.slow
# --------------------------------------------------------------------------------------------------------- estimates
def test_memory_and_disk_are_near_what_a_run_takes(tmp_path: Path) -> None:
    content = yaml.safe_load(data_path("clip-mini", "suite.yaml").read_text())
    content["calibration"] = {"samples": 8}
    for entry in (content, *content["tasks"].values()):
        for key in {"base", "expert"} & entry.keys():
            entry[key] = str(data_path("clip-mini", entry[key]))
    (tmp_path / "suite.yaml").write_text(yaml.safe_dump(content))
    found = check(load_suite(tmp_path / "suite.yaml"), probe=False).estimates
    assert found is not None
    run = ["calibrate", str(tmp_path / "suite.yaml"), "--samples", "8", "--out", str(tmp_path / "out"), "--json"]
    alone = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "featcal", *run], check=True, capture_output=True, text=True, env=alone
    )
    assert 0.5 < found.memory_bytes / json.loads(done.stdout)["peak_rss_bytes"] < 2
    assert found.disk_bytes == pytest.approx((tmp_path / "out" / "model.safetensors").stat().st_size, rel=0.1)
    assert found.samples == 8


def test_the_start_of_a_process_is_told_apart(tiny_suite_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A running app is spared it: it promised 10 s for what took 1.7."""
    monkeypatch.setattr(estimates, "gemm_rate", lambda dtype: 1e30)
    monkeypatch.setattr(estimates, "CALL", 0.0)
    monkeypatch.setattr(estimates, "DISK_SPEED", 1e30)
    found = check(load_suite(tiny_suite_file), probe=False).estimates
    assert found is not None
    assert found.seconds == pytest.approx(found.start_seconds)
    assert found.start_seconds == estimates.START


def test_every_part_is_estimated_at_the_speed_of_its_dtype(tiny: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimates, "CALL", 0.0)
    drawn, seconds = {task: Drawn(64, 5.0, 100.0) for task in tiny.suite.tasks}, {}
    for precision in ("exact", "fast"):
        config = CalibrationConfig(lam=0.05, precision=precision)
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            monkeypatch.setattr(estimates, "gemm_rate", lambda asked, one=dtype: 1e9 if asked is one else math.inf)
            seconds[precision, dtype] = estimates.calibration_seconds(tiny.adapter, drawn, config)
    assert min(seconds["exact", torch.float64], seconds["exact", torch.float32]) > 0
    assert seconds["exact", torch.bfloat16] == seconds["fast", torch.float64] == 0
    # fast: features and products in bfloat16, the solve in float32.
    assert seconds["fast", torch.bfloat16] == seconds["exact", torch.float32]
    assert seconds["fast", torch.float32] == seconds["exact", torch.float64]


def test_tasks_that_take_no_part_cost_nothing(tiny: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimates, "gemm_rate", lambda dtype: 1e9)
    info, (first, second) = tiny.merged.info, tiny.suite.tasks
    drawn = {first: Drawn(8, 5.0, 100.0), second: Drawn(10**6, 500.0, 1e6)}
    alone, chosen = (
        estimates.estimate(tiny.adapter, info, of, clip_config(tasks=tasks), 4, Path())
        for of, tasks in (({first: drawn[first]}, None), (drawn, (first,)))
    )
    assert chosen.memory_bytes == alone.memory_bytes
    assert (chosen.seconds, chosen.samples) == (alone.seconds, 8)


@pytest.mark.parametrize(("rate", "noted"), [(1e9, True), (1.4e11, False), (2e11, False)])
def test_slow_bfloat16_is_said_before_anyone_waits_for_it(
    rate: float, noted: bool, run: Run, edit_suite: Edit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(estimates, "gemm_rate", lambda dtype: rate if dtype is torch.bfloat16 else 1.5e11)
    said = "multiplies bfloat16 150 times as slowly as float32; precision exact is faster"
    suite = edit_suite(lambda content: content.update(calibration={"precision": "fast", "samples": 4}))
    assert any(said in note for note in check(load_suite(suite), probe=False).notes) == noted
    for command in (["sweep", "--eval-samples", 4], ["select"]):
        assert (said in run(command[0], suite, "--device", "cpu", *command[1:])[2]) == noted
    calibrate = ("calibrate", suite, "--device", "cpu", "--out")
    assert (said in run(*calibrate, tmp_path / "fast")[2]) == noted
    assert "slow" not in run(*calibrate, tmp_path / "exact", "--precision", "exact")[2]


def test_operations_of_a_block_counted_by_hand(tiny: Family) -> None:
    (stage,) = tiny.adapter.stages
    forward, products, solve = estimates._operations(stage, 0, [100, 10], CalibrationConfig())
    assert forward == 2 * (4 * 16 * 16 + 2 * 16 * 32) * 110
    gram = 110 * (3 * 16**2 + 32**2)
    targets = {  # of the task with 100 tokens and the one with 10, by the cheapest of the three routes
        "q, k, v": 16 * (100 + 48) * 16 + 16 * (10 + 48) * 16,
        "out": 16 * (100 + 16) * 16 + 2 * 10 * 16 * 16,
        "fc1": 16 * (100 + 32) * 16 + 2 * 10 * 32 * 16,
        "fc2": 16 * (100 + 32) * 32 + 2 * 10 * 16 * 32,
    }
    assert products == gram + 2 * sum(targets.values())
    assert solve == pytest.approx(3 * 16**3 / 3 + 32**3 / 3 + 2 * (48 + 16 + 32) * 16**2 + 2 * 16 * 32**2)
    last = estimates._operations(stage, len(stage.blocks) - 1, [100, 10], CalibrationConfig())
    assert last[0] == forward
    assert last[1] > products  # the query has a matrix of its own


@pytest.mark.parametrize(
    ("limit", "read"),
    [
        (2**26, "of weights, only the matrices of blocks and embeddings were read"),
        (1, "of weights, only one matrix of each layer was read"),
    ],
)
def test_what_was_not_read_of_weights_is_said(
    own_suite_file: Path, monkeypatch: pytest.MonkeyPatch, limit: int, read: str
) -> None:
    """The norm of an expert is NaN, which shows where experts are scored."""
    file = own_suite_file.parent / "experts" / "pets" / "model.safetensors"
    tensors = load_file(file)
    tensors["vision_model.post_layernorm.weight"][3] = torch.nan
    save_file(tensors, file, {"format": "pt"})
    monkeypatch.setattr(ancestry, "READ_WHOLE", limit)
    suite = load_suite(own_suite_file)
    unread = f"{read}; values elsewhere that are NaN or infinite do not show here"
    found = check(suite, probe=False)
    assert (found.problems, found.lineage is not None) == ((), True)
    assert f"{unread} (--probe runs every expert)" in found.notes
    said = CliRunner().invoke(commands, ["check", str(own_suite_file), "--no-probe"])
    assert unread in said.output
    probed = check(suite, probe=True)
    assert any("post_layernorm.weight" in note and "NaN or infinite" in note for note in probed.notes)
    assert unread in probed.notes


def test_without_weights_here_it_is_said_that_none_were_read(edit_suite: Edit) -> None:
    found = check(load_suite(edit_suite(lambda content: content.update(base="nowhere"))), probe=False)
    assert found.problems
    assert "no weights were read; values that are NaN or infinite do not show here" in "; ".join(found.notes)


def test_experts_that_were_scored_need_no_word(tiny_suite_file: Path) -> None:
    assert not any("were read" in note for note in check(load_suite(tiny_suite_file), probe=True).notes)

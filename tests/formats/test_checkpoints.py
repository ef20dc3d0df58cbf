"""Checkpoints and families: what is read, what is refused and how it is said."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file
from torch import Tensor

from featcal.family.opening import Family, open_family
from featcal.formats.checkpoint import Checkpoint, local_folder
from featcal.formats.hub import hub_model
from featcal.formats.open_clip_config import read_open_clip_config
from featcal.formats.weights import InMemory, Overlay
from featcal.models.compute import compute_for
from featcal.suite.schema import load_suite
from featcal.system.errors import InputError

Q = "vision_model.encoder.layers.1.self_attn.q_proj.weight"


def change_expert(suite_file: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
    """Rewrite the tensors of the expert 'pets'."""
    file = suite_file.parent / "experts" / "pets" / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})
    return suite_file


def open_error(suite_file: Path) -> str:
    with pytest.raises(InputError) as caught:
        open_family(load_suite(suite_file), device="cpu")
    return str(caught.value)


def another_architecture(tensors: dict[str, Tensor]) -> None:
    tensors.clear()
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.ones(2, 2)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda t: t.pop(Q), ("expert 'pets'", f"missing tensors: '{Q}'")),
        (lambda t: t.update(adapter=torch.ones(1)), ("expert 'pets'", "'adapter'")),
        (
            lambda t: t.update({Q: torch.ones(3, 4)}),
            ("expert 'pets'", f"tensor '{Q}' has shape [3, 4], expected [16, 16]"),
        ),
        (another_architecture, ("expert 'pets'", "none of the")),
    ],
    ids=["missing", "extra", "misshapen", "another architecture"],
)
def test_an_expert_that_does_not_fit(
    own_suite_file: Path, change: Callable[[dict[str, Tensor]], None], expected: tuple[str, ...]
) -> None:
    message = open_error(change_expert(own_suite_file, change))
    assert all(part in message for part in expected)


def test_all_problems_at_once(own_suite_file: Path) -> None:
    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors.pop(Q)
        tensors["adapter"] = torch.ones(1)

    import shutil

    shutil.rmtree(own_suite_file.parent / "experts" / "signs")
    message = open_error(change_expert(own_suite_file, spoil))
    assert "3 problems" in message
    assert all(part in message for part in (Q, "'adapter'", "expert 'signs'", "no folder"))


def test_nan_in_an_expert_names_file_and_tensor(own_suite_file: Path) -> None:
    from featcal.calibration.calibrate import calibrate_family
    from featcal.suite.calibration_options import CalibrationConfig

    def poison(tensors: dict[str, Tensor]) -> None:
        tensors[Q][0, 0] = torch.nan

    suite = load_suite(change_expert(own_suite_file, poison))
    with pytest.raises(InputError, match=r"expert 'pets'.*q_proj\.weight.*model\.safetensors.*1 of 256.*NaN"):
        calibrate_family(suite, CalibrationConfig(samples=4), device="cpu")


def test_base_of_an_unknown_architecture(own_suite_file: Path) -> None:
    config = own_suite_file.parent / "base" / "config.json"
    config.write_text(json.dumps({"model_type": "mamba"}))
    assert "base: architecture 'mamba' is not supported" in open_error(own_suite_file)


@pytest.mark.parametrize(
    "bad", [b"", b"\x08\x00\x00\x00\x00\x00\x00\x00{broken", None], ids=["empty", "broken header", "cut"]
)
def test_damaged_files_are_named(own_suite_file: Path, bad: bytes | None) -> None:
    file = own_suite_file.parent / "experts" / "pets" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100] if bad is None else bad)
    assert f"{file} is not a whole safetensors file" in open_error(own_suite_file)


def test_missing_shard_is_named(tmp_path: Path) -> None:
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({"a": torch.ones(1)}, tmp_path / "model-00001-of-00002.safetensors")
    with pytest.raises(InputError, match=r"shards that are not there: model-00002-of-00002"):
        Checkpoint(tmp_path, "m", lambda name: name)


def test_shards_are_read_as_one(tmp_path: Path) -> None:
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({"a": torch.ones(1)}, tmp_path / "one.safetensors")
    save_file({"b": torch.zeros(2)}, tmp_path / "two.safetensors")
    checkpoint = Checkpoint(tmp_path, "m", lambda name: name)
    assert {name: info.shape for name, info in checkpoint.info.items()} == {"a": (1,), "b": (2,)}
    assert checkpoint.read(["b", "a"])["a"].tolist() == [1.0]


def test_two_tensors_of_one_canonical_name(tmp_path: Path) -> None:
    from featcal.models.families.clip import ClipVision

    twice = {"pre_layrnorm.weight": torch.ones(1), "vision_model.pre_layrnorm.weight": torch.ones(1)}
    save_file(twice, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=r"both .* mean 'vision_model.pre_layrnorm.weight'"):
        Checkpoint(tmp_path, "m", ClipVision.canonical)


@pytest.mark.parametrize("vision", [{}, {"hidden_act": "gelu"}])
def test_old_files_of_clip_are_read_as_transformers_reads_them(vision: dict[str, Any]) -> None:
    """Its `vision_config_dict` is taken in the place of `vision_config`, which they need not have."""
    from transformers import CLIPConfig

    from featcal.models.families.clip import ClipVision

    config = {"vision_config_dict": {"hidden_size": 32, "num_attention_heads": 4, **vision}, "projection_dim": 16}
    for both in (config, {**config, "vision_config": {"hidden_size": 32, "num_attention_heads": 2}}):
        adapter, theirs = ClipVision(both, [], torch.device("cpu")), CLIPConfig(**both).vision_config
        assert adapter.settings["hidden_act"] == theirs.hidden_act == vision.get("hidden_act", "quick_gelu")
        assert adapter.settings["num_attention_heads"] == theirs.num_attention_heads == 4
        assert adapter.shapes()["visual_projection.weight"] == (16, 32)


def test_a_model_and_an_adapter_in_one_folder_are_not_guessed_at(own_suite_file: Path) -> None:
    """transformers would load both, whether the weights have the adapter in them or not."""
    place = own_suite_file.parent / "experts" / "pets"
    (place / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 1, "lora_alpha": 1}))
    assert "experts/pets has a whole model and an adapter (adapter_config.json); give " in open_error(own_suite_file)


def test_tower_saved_without_prefix_is_the_same_model(tiny: Family, own_suite_file: Path) -> None:
    def strip(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("vision_model.")] = tensors.pop(name)

    stripped = open_family(load_suite(change_expert(own_suite_file, strip)), device="cpu")
    ours, theirs = (f.experts["pets"].read(tiny.adapter.tower) for f in (stripped, tiny))
    assert all(ours[name].equal(theirs[name]) for name in theirs)


@pytest.mark.parametrize(
    ("reference", "said"),
    [
        ("./nowhere/at/all", "expert 'x': no folder"),
        ("someone/model@main", r"expert 'x': no folder .*someone/model.*Hub"),  # both readings, without a network
    ],
    ids=["folder", "id"],
)
def test_references_that_lead_nowhere(tmp_path: Path, reference: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        local_folder(reference, tmp_path, "expert 'x'")


def test_hub_cache_is_read_in_the_hubs_own_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that was downloaded before is found offline, by id, folder and revision."""
    snapshot = tmp_path / "models--someone--model" / "snapshots" / ("a" * 40)
    (snapshot / "tuned" / "a").mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    refs = tmp_path / "models--someone--model" / "refs"
    refs.mkdir()
    (refs / "main").write_text("a" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert local_folder("someone/model", Path("/"), "base") == snapshot
    assert local_folder("someone/model/tuned/a@main", Path("/"), "base") == snapshot / "tuned" / "a"
    with pytest.raises(InputError, match="the Hub is not asked, since HF_HUB_OFFLINE is set"):
        local_folder("someone/model/tuned/b", Path("/"), "base")


@pytest.mark.parametrize(
    ("ref", "parts"),
    [
        ("owner/name", ("owner/name", "", None)),
        ("owner/name@refs/pr/1", ("owner/name", "", "refs/pr/1")),
        ("owner/name/a-1.0/b_2@v1", ("owner/name", "a-1.0/b_2", "v1")),
        ("name", None),
        ("/owner/name", None),
        ("./owner/name", None),
        ("owner/..", None),
        ("owner/name/../other", None),
        ("owner/name/a/..@v1", None),
        ("owner/name/./a", None),
        ("owner/name//a", None),
        ("owner/name/a/", None),
        ("owner/name/*", None),
        ("gpt2", ("openai-community/gpt2", "", None)),
        ("roberta-base@v1", ("FacebookAI/roberta-base", "", "v1")),
        ("gpt2/sub", ("gpt2/sub", "", None)),
        ("unknown", None),
    ],
)
def test_what_an_id_of_the_hub_names(ref: str, parts: tuple[str, str, str | None] | None) -> None:
    model = hub_model(ref)
    assert (None if model is None else (model.repo, model.folder, model.revision)) == parts


OF_TASKS = ("featcal.json", "heads/cars.safetensors", "heads/pets/model.safetensors", "heads/pets/config.json",
            "adapters/cars/adapter_model.safetensors")  # fmt: skip
"""A record, and files of single tasks beside it."""


@pytest.fixture
def one_of_several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In place of the Hub's client, one that fetches as it does: a repository of several models, into an
    empty cache, which is returned."""
    kept = ("config.json", "vocab.txt", "chat_template.jinja", "model.safetensors")
    kinds = (*kept, "classifier_head.pt", "training_args.bin")
    folders = ("tuned/a", "tuned/a/checkpoint-5", "tuned/b", "lora")
    names = [f"{folder}/{file}" for folder in folders for file in kinds]
    names += [f"tuned/b/{name}" for name in OF_TASKS]

    def download(repo: str, **options: Any) -> str:
        assert (repo, options["revision"]) == ("some/several", "v1")
        patterns = {key: options.get(key) for key in ("allow_patterns", "ignore_patterns")}
        for name in filter_repo_objects(names, **patterns):
            (tmp_path / "cache" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "cache" / name).write_text('{"heads": {"cars": null}}')
        return str(tmp_path / "cache")

    answer = SimpleNamespace(list_repo_files=lambda repo, revision: names)
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: answer)
    return tmp_path / "cache"


def test_of_a_folder_on_the_hub_only_its_own_files_are_fetched(one_of_several: Path) -> None:
    """No pickles, no weights of models below, nothing of its neighbours."""
    assert local_folder("some/several/tuned/a@v1", Path("/"), "m") == one_of_several / "tuned" / "a"
    found = {str(file.relative_to(one_of_several)) for file in one_of_several.rglob("*") if file.is_file()}
    beside = ("config.json", "vocab.txt", "chat_template.jinja")
    own = {f"tuned/a/{name}" for name in (*beside, "model.safetensors")}
    assert found == own | {f"tuned/a/checkpoint-5/{name}" for name in beside}


def test_what_belongs_to_single_tasks_is_fetched_beside_a_record(one_of_several: Path) -> None:
    """It was pushed with the model, and nothing else would say that it is not there."""
    folder = local_folder("some/several/tuned/b@v1", Path("/"), "m")
    found = {file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()}
    assert found == {"config.json", "vocab.txt", "chat_template.jinja", "model.safetensors", *OF_TASKS}


def test_an_id_that_the_hub_refuses_is_said_to_be_none() -> None:
    with pytest.raises(InputError, match=r"base: no folder .*, and 'models--some--clip/snapshots/abc' is no id that"):
        local_folder("models--some--clip/snapshots/abc", Path("/"), "base")


def test_a_folder_that_the_hub_does_not_have(one_of_several: Path) -> None:
    with pytest.raises(InputError) as caught:
        local_folder("some/several/tuned/aa@v1", Path("/"), "expert 'x'")
    assert str(caught.value) == (
        "expert 'x': no folder 'some/several/tuned/aa@v1', and 'some/several' on the Hub has no folder 'tuned/aa'; "
        "its folders with safetensors are 'lora', 'tuned/a', 'tuned/a/checkpoint-5', 'tuned/b', "
        "'tuned/b/adapters/cars', 'tuned/b/heads', 'tuned/b/heads/pets'. Did you mean 'tuned/a'?"
    )


def test_a_suite_that_comes_with_featcal_names_ids_alone(one_of_several: Path) -> None:
    with pytest.raises(InputError, match=r"^base: 'some/several' on the Hub has no folder 'none'"):
        local_folder("some/several/none@v1", load_suite("flan-t5-base-glue").root, "base")


def test_a_folder_here_comes_before_one_on_the_hub(one_of_several: Path, tmp_path: Path) -> None:
    """And a path into a folder that is here is never an id."""
    (tmp_path / "some" / "several" / "tuned").mkdir(parents=True)
    assert local_folder("some/several/tuned", tmp_path, "m") == (tmp_path / "some/several/tuned").resolve()
    with pytest.raises(InputError, match=rf"not asked of the Hub, since the folder {tmp_path}/some is there; give an"):
        local_folder("some/several/tuned/a@v1", tmp_path, "m")
    assert not one_of_several.exists()


def test_recipe_is_task_arithmetic_tensor_by_tensor(tiny: Family) -> None:
    base, merged = tiny.base.read(tiny.adapter.tower), tiny.merged.read(tiny.adapter.tower)
    experts = [expert.read(tiny.adapter.tower) for expert in tiny.experts.values()]
    for name in tiny.adapter.tower:
        expected = base[name] + 0.5 * sum(expert[name] - base[name] for expert in experts)
        torch.testing.assert_close(merged[name], expected)


def test_overlay_reads_replaced_and_kept() -> None:
    under = InMemory("m", {"a": torch.zeros(1), "b": torch.zeros(1)})
    over = Overlay("o", under, {"a": torch.ones(1)})
    assert {name: float(t) for name, t in over.read(["b", "a"]).items()} == {"b": 0.0, "a": 1.0}
    with pytest.raises(InputError, match="m: tensor 'c' is missing"):
        over.read(["c"])


def test_unknown_device_and_precision() -> None:
    with pytest.raises(InputError, match="device 'abacus'"):
        compute_for("abacus")
    with pytest.raises(InputError, match="precision is one of exact, fast"):
        compute_for("cpu", "sloppy")


def test_resident_family_reads_the_same(tiny: Family) -> None:
    held: Any = tiny.resident()
    for role in ("base", "merged"):
        ours, theirs = (getattr(f, role).read(tiny.adapter.tower) for f in (held, tiny))
        assert all(ours[name].equal(theirs[name]) for name in theirs)
    assert held.head().keys() == tiny.head().keys() == {"visual_projection.weight"}


def test_the_configuration_of_an_open_clip_architecture_alone_is_read(tmp_path: Path) -> None:
    """It is what open_clip's own training takes, and has no preprocessing in it."""
    own = {"embed_dim": 8, "vision_cfg": {"layers": 1}, "text_cfg": {"layers": 1}}
    (tmp_path / "tiny.json").write_text(json.dumps(own))
    assert read_open_clip_config(tmp_path / "tiny.json", "base") == {"model_cfg": own, "preprocess_cfg": {}}
    (tmp_path / "tiny.json").write_text(json.dumps({"embed_dim": 8}))
    with pytest.raises(InputError, match="has no 'model_cfg' with 'vision_cfg' and 'text_cfg'"):
        read_open_clip_config(tmp_path / "tiny.json", "base")

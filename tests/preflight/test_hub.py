"""Ids of the Hub: what lies in the local cache, what would be fetched, and what is wrong with it."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
from fake_hub import FakeHub, put_in_cache, referring
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from suite_edits import Edit
from tiny_clip import TASKS
from tiny_text import write_text_base

from featcal.cli.suite import show_check
from featcal.formats.model_files import unpinned_models
from featcal.preflight import places, remote
from featcal.preflight.check import check_suite
from featcal.preflight.places import Places
from featcal.suite.schema import load_suite, references
from featcal.system.errors import InputError
from featcal.system.resources import embedded_suites


def test_ids_in_the_local_cache_are_read_from_there(
    edit_suite: Edit, own_suite_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = own_suite_file.parent
    put_in_cache(tmp_path / "cache", "some/clip", root / "base")
    put_in_cache(tmp_path / "cache", "some/pets", root / "experts" / "pets")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: pytest.fail("nothing is asked of the Hub"))
    found = check_suite(load_suite(edit_suite(referring("some/clip", pets="some/pets@main"))))
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
    monkeypatch.setattr(remote, "free_bytes", lambda folder: 1000)
    found = check_suite(suite)
    assert (found.problems, found.family) == ((), None)
    sizes = {repo: sum(file.stat().st_size for file in folder.iterdir()) for repo, folder in models.items()}
    assert {one.ref: one.bytes for one in found.downloads} == sizes
    assert set(fake.fetched) == {"config.json"}
    assert any("1000 B are free on the disk of the Hub's local cache" in note for note in found.notes)
    assert found.to_json()["parameters"] > 0

    tensors = load_file(root / "experts" / "pets" / "model.safetensors")
    name = "vision_model.encoder.layers.0.self_attn.q_proj.weight"
    save_file(tensors | {name: torch.zeros(2, 2)}, root / "experts" / "pets" / "model.safetensors")
    (problem,) = check_suite(suite).problems
    assert problem.startswith(f"expert 'pets': tensor '{name}' has shape [2, 2], expected [16, 16]")


def test_answers_stand_in_the_order_of_the_questions(tmp_path: Path, monkeypatch: Any) -> None:
    asked = Places(tmp_path)

    def answer(model: Any) -> SimpleNamespace:
        while model.repo == "some/first" and "some/second" not in asked.downloads:
            time.sleep(0.01)
        return SimpleNamespace(download=model.repo)

    monkeypatch.setattr(places, "remote_model", answer)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "no-cache"))
    asked.ask_ahead(["some/first", "some/second"], ())
    assert [*asked.downloads] == ["some/first", "some/second"]


def test_without_the_hub_there_is_one_message(edit_suite: Edit, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "no-cache"))
    suite = edit_suite(referring(pets="some/expert", signs="some/expert"))
    found = check_suite(load_suite(suite))
    (problem,) = found.problems
    assert "'some/expert' (expert 'pets' and 1 more)" in problem
    assert "the Hub is not asked, since HF_HUB_OFFLINE is set" in problem
    show_check(found)
    assert "weights in memory" not in capsys.readouterr().out  # of models that nobody has seen


def test_models_without_a_revision_are_noted_together(edit_suite: Edit, tmp_path: Path, monkeypatch: Any) -> None:
    """A base with an adapter is two; what names a commit or a tag, and what is here, is not noted."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "no-cache"))
    change = referring("hf-hub:some/base", pets="some/base@v1+some/adapter", signs="some/expert/inside")
    notes = [note for note in check_suite(load_suite(edit_suite(change))).notes if "without a revision" in note]
    ids = "some/base, some/adapter, some/expert/inside"
    assert notes == [f"models without a revision may change under the suite: {ids}; write OWNER/NAME@COMMIT"]
    commit = "0123456789" * 4
    reference = tmp_path / "no-cache" / "models--some--base" / "refs" / "main"
    reference.parent.mkdir(parents=True)
    reference.write_text(commit)
    (note,) = [one for one in check_suite(load_suite(edit_suite(change))).notes if "without a revision" in one]
    assert f": some/base (here {commit}), some/adapter, " in note
    for suite in map(load_suite, embedded_suites()):
        assert unpinned_models(references(suite).values(), suite.root) == []


def test_data_sets_are_not_fetched_either(edit_suite: Edit, hub: Callable[..., FakeHub], monkeypatch: Any) -> None:
    fake = hub({})
    sizes = {"README.md": 7, "plain/train.parquet": 1000, "other/train.parquet": 5000}
    siblings = [SimpleNamespace(rfilename=name, size=size) for name, size in sizes.items()]
    answer = SimpleNamespace(gated=False, siblings=siblings, sha="a" * 40, card_data=None)
    monkeypatch.setattr(fake, "dataset_info", lambda repo, **_: answer, raising=False)
    source = {"hub": "some/pictures", "config": "plain", "split": "train"}
    monkeypatch.setitem(sys.modules, "datasets", None)
    found = check_suite(
        load_suite(edit_suite(lambda content: content["tasks"]["pets"].update(test=source))), probe=False
    )
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
    found = check_suite(load_suite(edit_suite(referring(pets=ref))), probe=False)
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
    (problem,) = check_suite(load_suite(edit_suite(referring(pets=ref))), probe=False).problems
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


def test_an_adapter_without_its_base_is_no_expert(
    edit_suite: Edit, hub: Callable[..., FakeHub], tmp_path: Path
) -> None:
    own = tmp_path / "adapter"
    own.mkdir()
    save_file({"base_model.model.q_proj.lora_A.weight": torch.zeros(1, 2)}, own / "adapter_model.safetensors")
    (own / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": "some/base"}))
    hub({"some/lora": own})
    for ref in ("some/lora", str(own)):
        (problem,) = check_suite(load_suite(edit_suite(referring(pets=ref)))).problems
        assert problem.startswith(f"expert 'pets': {ref} is a LoRA adapter")
        assert problem.endswith(f"give some/base+{ref}")


def test_what_a_training_run_left_on_the_hub_is_named(several: Path, hub: Callable[..., FakeHub]) -> None:
    folder = several / "tuned" / "pets"
    (folder / "model.safetensors").unlink()
    (folder / "global_step5").mkdir()
    (folder / "global_step5" / "mp_rank_00_model_states.pt").write_bytes(bytes(7))
    hub({"some/several": several})
    with pytest.raises(InputError, match="no safetensors; fetch it to a folder FOLDER: it holds a checkpoint of Deep"):
        Places(several).locate("some/several/tuned/pets", "m")


@pytest.mark.parametrize(
    ("ref", "said"),
    [
        (
            "some/several/tuned/pats",
            r"'some/several' on the Hub has no folder 'tuned/pats'; .* Did you mean 'tuned/pets'",
        ),
        ("some/several/tuned", "'some/several/tuned' on the Hub has no weights that featcal reads; "),
        ("some/several", "'some/several' on the Hub has no weights that featcal reads; "),
    ],
)
def test_folders_of_a_repository_are_listed(several: Path, hub: Callable[..., FakeHub], ref: str, said: str) -> None:
    hub({"some/several": several})
    with pytest.raises(InputError, match=said) as caught:
        Places(several).locate(ref, "m")
    folders = [f"tuned/{task}{below}" for task in sorted(TASKS) for below in ("", "/checkpoint-5")]
    assert f"its folders with safetensors are {', '.join(map(repr, folders))}." in str(caught.value)

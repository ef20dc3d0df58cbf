"""Exported folders: complete or absent, the same model after reloading, readable by transformers alone."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from featcal.calibration.calibrate import CalibrationResult, calibrate
from featcal.calibration.config import CalibrationConfig
from featcal.errors import InputError, NumericalError
from featcal.evaluation.evaluate import evaluate
from featcal.family import Family, open_family
from featcal.merging import merge_to_folder
from featcal.models import export
from featcal.models.export import convert, verify_reload
from featcal.models.features import final_features
from featcal.models.output import OutputFolder
from featcal.suite import load_suite

CONFIG = CalibrationConfig(samples=8)


@pytest.fixture(scope="module")
def result(tiny: Family) -> CalibrationResult:
    return calibrate(tiny, CONFIG)


def test_saved_folder_is_the_calibrated_model(tiny: Family, result: CalibrationResult, tmp_path: Path) -> None:
    from transformers import AutoTokenizer, CLIPModel, CLIPVisionModel

    written = result.save(tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == written
    assert {"config.json", "model.safetensors", "tokenizer.json", "preprocessor_config.json"} <= set(written)
    stored, base = load_file(tmp_path / "out" / "model.safetensors"), tiny.base
    ours = result.weights.read(tiny.adapter.tower)
    assert all(stored[name].equal(ours[name]) for name in ours)
    rest = [name for name in base.info if name not in ours]
    assert rest
    assert all(stored[name].equal(base.read([name])[name]) for name in rest)
    assert sum(t.numel() for t in stored.values()) == sum(torch.Size(i.shape).numel() for i in base.info.values())
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as handle:
        assert handle.metadata() == {"format": "pt"}
    for loader in (CLIPModel, CLIPVisionModel):
        _, info = loader.from_pretrained(tmp_path / "out", output_loading_info=True)
        assert not info["missing_keys"]
        assert not info["mismatched_keys"]
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("a photo of a cat.")["input_ids"]


def test_saved_folder_scores_like_the_result(tiny: Family, result: CalibrationResult, tmp_path: Path) -> None:
    result.save(tmp_path / "out")
    ours, theirs = evaluate(tiny, result.weights), evaluate(tiny, str(tmp_path / "out"))
    for task, score in ours.tasks.items():
        assert score.predictions.equal(theirs.tasks[task].predictions)


def test_record_and_card(result: CalibrationResult, tmp_path: Path) -> None:
    import yaml

    result.save(tmp_path / "out")
    record = json.loads((tmp_path / "out" / "featcal.json").read_text())
    assert record["config"]["lam"] == CONFIG.lam
    assert record["tasks"]["pets"]["samples"] == len(record["tasks"]["pets"]["indices"]) == 8
    assert record["tasks"]["pets"]["tokens"] == 8 * 10
    assert set(record["inputs"]) == {"base", "expert pets", "expert signs"}
    assert len(record["inputs"]["expert pets"]["model.safetensors"]) == 64
    assert {"torch", "transformers", "featcal", "python"} <= set(record["versions"])
    assert set(record["seconds"]) == {"total", "samples", "calibration"}
    assert set(record["relative_drift"]) == {f"vision_model.encoder.layers.{i}" for i in range(3)}
    card = (tmp_path / "out" / "README.md").read_text()
    front = yaml.safe_load(card.split("---")[1])
    assert front == {"library_name": "transformers", "tags": ["merge", "featcal"]}
    assert str(tmp_path) not in card + json.dumps(record)


def test_existing_output_is_never_touched(result: CalibrationResult, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("keep")
    with pytest.raises(InputError, match="exists already"):
        result.save(tmp_path / "out")
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "mine"]


@pytest.mark.skipif(os.name == "nt", reason="folders cannot be made read-only there")
def test_output_that_cannot_be_written(result: CalibrationResult, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("a file is no folder, also for the root user")
    with pytest.raises(InputError, match="cannot write to"):
        result.save(blocked / "out")


def test_failure_leaves_nothing(result: CalibrationResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise NumericalError("features differ")

    monkeypatch.setattr(export, "verify_reload", fail)
    with pytest.raises(NumericalError):
        result.save(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_partial_folder_of_another_run_is_not_continued(tmp_path: Path) -> None:
    OutputFolder(tmp_path / "out", {"lam": 1.0})
    with pytest.raises(InputError, match="--resume or remove it"):
        OutputFolder(tmp_path / "out", {"lam": 1.0})
    with pytest.raises(InputError, match="other inputs or options"):
        OutputFolder(tmp_path / "out", {"lam": 2.0}, resume=True)
    OutputFolder(tmp_path / "out", {"lam": 1.0}, resume=True)


def test_verification_sees_a_changed_tensor(tiny: Family, result: CalibrationResult, tmp_path: Path) -> None:
    result.save(tmp_path / "out")
    verify_reload(tmp_path / "out", tiny.adapter, result.weights)
    with pytest.raises(NumericalError, match="reloaded outputs differ"):
        verify_reload(tmp_path / "out", tiny.adapter, tiny.merged)


def test_verification_sees_a_reinitialised_tensor(result: CalibrationResult, tmp_path: Path) -> None:
    result.save(tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    tensors.pop("vision_model.encoder.layers.0.mlp.fc1.weight")
    save_file(tensors, tmp_path / "out" / "model.safetensors", {"format": "pt"})
    with pytest.raises(NumericalError, match="would re-initialise"):
        verify_reload(tmp_path / "out", tiny.adapter, result.weights)


def test_large_models_are_sharded_with_an_index(
    tiny: Family, result: CalibrationResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "SHARD_BYTES", 8000)
    written = result.save(tmp_path / "out")
    shards = [name for name in written if name.endswith(".safetensors")]
    assert len(shards) > 3
    assert shards[0] == f"model-00001-of-{len(shards):05}.safetensors"
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(tiny.base.info)
    reread = tiny.model(str(tmp_path / "out")).read(tiny.adapter.tower)
    assert all(t.equal(reread[n]) for n, t in result.weights.read(tiny.adapter.tower).items())


def test_storage_dtype_is_the_merged_models(own_suite_file: Path, tmp_path: Path) -> None:
    file = own_suite_file.parent / "base" / "model.safetensors"
    save_file({name: t.half() for name, t in load_file(file).items()}, file, {"format": "pt"})
    family = open_family(load_suite(own_suite_file), device="cpu")
    calibrate(family, CONFIG).save(tmp_path / "out")
    assert {t.dtype for t in load_file(tmp_path / "out" / "model.safetensors").values()} == {torch.float16}


def test_merged_checkpoint_as_container(tiny: Family, own_suite_file: Path, tmp_path: Path) -> None:
    """A suite whose merged model is a folder gives the same calibration as the recipe that made the folder."""
    import yaml

    merge_to_folder(tiny, "task-arithmetic", 0.5, own_suite_file.parent / "merged")
    content = yaml.safe_load(own_suite_file.read_text()) | {"merged": "merged"}
    own_suite_file.write_text(yaml.safe_dump(content))
    family = open_family(load_suite(own_suite_file), device="cpu")
    assert family.container == own_suite_file.parent / "merged"
    ours = calibrate(family, CONFIG).weights.read(tiny.adapter.tower)
    theirs = calibrate(tiny, CONFIG).weights.read(tiny.adapter.tower)
    assert all(ours[name].equal(theirs[name]) for name in theirs)


def test_tower_without_prefix_is_rewritten(tiny: Family, tmp_path: Path) -> None:
    """What transformers 5 saves from scratch loses its prefix; `export` gives it back."""
    import shutil

    from transformers import CLIPVisionModel

    expert = tiny.suite.root / "experts" / "pets"
    bare = tmp_path / "bare"
    shutil.copytree(expert, bare)
    tensors = load_file(expert / "model.safetensors")
    save_file({n.removeprefix("vision_model."): t for n, t in tensors.items()}, bare / "model.safetensors")
    convert(bare, tmp_path / "out")
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == tensors.keys()
    _, info = CLIPVisionModel.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"]


def test_hub_ids_become_base_models(tiny: Family) -> None:
    from featcal.card import model_card

    tasks = {
        name: task.model_copy(update={"expert": f"someone/{name}@main"}) for name, task in tiny.suite.tasks.items()
    }
    suite = tiny.suite.model_copy(update={"tasks": tasks, "base": "owner/base"})
    card = model_card(suite, "t", "w", {"lam": 1})
    assert "- owner/base\n- someone/pets\n- someone/signs\n" in card
    assert "base_model_relation: merge" in card


def test_fast_precision_is_close(tiny_suite_file: Path, tiny: Family) -> None:
    """bfloat16 features, but weights, moments and solve as exact: the calibrated features differ by rounding."""
    fast = calibrate(load_suite(tiny_suite_file), replace(CONFIG, precision="fast"), device="cpu")
    batches = [tiny.samples("pets", "test", 8, 0).inputs]
    ours, exact = (
        final_features(tiny.adapter, weights, tiny.head(), batches, tiny.compute)
        for weights in (fast.weights, calibrate(tiny, CONFIG).weights)
    )
    assert 0 < float((ours - exact).norm() / exact.norm()) < 0.1

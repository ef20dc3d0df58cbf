"""Exported folders: complete or absent, the same model after reloading, readable by transformers alone."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from clip_config import clip_config
from lora_files import write_adapter
from open_clip_models import model_cfg, near, random_state, write_folder
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_decoders import ROWS, tiny_decoder
from torch import Tensor

from featcal.calibration.calibrate import CalibrationResult, calibrate_family, calibrate_to_folder
from featcal.export.change_layout import convert
from featcal.export.merge import merge_to_folder, recipe_for
from featcal.export.write import rewrite, verify_reload, verify_streamed, write_model
from featcal.family.opening import Family, open_family
from featcal.formats.checkpoint import Checkpoint
from featcal.formats.locate import locate
from featcal.formats.located_model import Located
from featcal.formats.open_clip import locate_open_clip
from featcal.formats.output import OutputFolder, stream_tensors
from featcal.formats.weights import Overlay, TensorInfo, Weights
from featcal.models.compute import Compute
from featcal.models.families.open_clip import OpenClip
from featcal.models.features import final_features
from featcal.session.api import evaluate
from featcal.suite.schema import load_suite
from featcal.system.errors import InputError, NumericalError
from featcal.system.locks import try_lock

CONFIG = clip_config(samples=8)


@pytest.fixture(scope="module")
def result(tiny: Family) -> CalibrationResult:
    return calibrate_family(tiny, CONFIG)


@pytest.mark.parametrize("how", ["calibrate_to_folder", "save"])
def test_recorded_peak_memory_counts_writing_and_verifying(
    tiny: Family, result: CalibrationResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """The library that verifies loads the whole model: the peak is read after that, not before."""
    peak = [1]

    def verified(*args: Any) -> None:
        peak[0] = 2
        verify_reload(*args)

    monkeypatch.setattr("featcal.export.write.verify_reload", verified)
    monkeypatch.setattr("featcal.calibration.calibrate.peak_rss_bytes", lambda: peak[0])
    if how == "save":
        result.save(tmp_path / "out")
    else:
        assert calibrate_to_folder(tiny, CONFIG, tmp_path / "out")["peak_rss_bytes"] == 2
    assert json.loads((tmp_path / "out" / "featcal.json").read_text())["peak_rss_bytes"] == 2


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
    stages = {"first calls", "load", "student forward", "expert forward", "moments", "solve", "merged forward"}
    assert set(record["seconds"]) == {"total", "processor", "samples", "calibration"} | stages
    assert sum(record["seconds"][stage] for stage in stages) <= record["seconds"]["calibration"]
    assert list(record["relative_drift"]) == ["block 0", "block 1", "block 2"]  # as in tables
    card = (tmp_path / "out" / "README.md").read_text()
    front = yaml.safe_load(card.split("---")[1])
    tags = {"pipeline_tag": "zero-shot-image-classification", "tags": ["merge", "featcal"]}
    assert front == {"library_name": "transformers", **tags}
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

    monkeypatch.setattr("featcal.export.write.verify_reload", fail)
    with pytest.raises(NumericalError):
        result.save(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def begun(tiny: Family, out: Path, run: object) -> OutputFolder:
    """A folder with one finished block, as an interrupted run leaves it."""
    folder = OutputFolder(out, run)  # type: ignore[arg-type]
    block = tiny.adapter.blocks()[0]
    folder.put(block, tiny.base.read(block.names))
    return folder


@pytest.mark.parametrize("target", ["loop", "nowhere"])
def test_a_link_that_leads_nowhere_is_something_there(tmp_path: Path, target: str) -> None:
    """Nothing can be renamed to a link; it is said before the work, not after it."""
    (tmp_path / "loop").symlink_to(target)
    with pytest.raises(InputError, match="loop exists already"):
        OutputFolder(tmp_path / "loop")
    assert [path.name for path in tmp_path.iterdir()] == ["loop"]


@pytest.mark.parametrize("target", ["tokenizer.json", "nowhere"])
def test_a_file_that_leads_nowhere_is_not_left_out(own_suite_file: Path, tmp_path: Path, target: str) -> None:
    base = own_suite_file.parent / "base"
    (base / "tokenizer.json").unlink()
    (base / "tokenizer.json").symlink_to(target)
    with pytest.raises(InputError, match=r"cannot copy .*tokenizer\.json"):
        rewrite(base, tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("length", [900, 4080, 9000], ids=["lock", "model", "folder"])
def test_a_path_that_is_too_long_leaves_nothing_and_a_short_message(tmp_path: Path, length: int) -> None:
    """Too long for the file of the lock, for what lies within, or for the folder itself."""
    below, out = tmp_path / "below", tmp_path / "below"
    while len(str(out)) < length:
        out /= "x" * min(200, max(1, length - len(str(out)) - 1))
    made = out.parent
    if length < os.pathconf(tmp_path, "PC_PATH_MAX"):
        made.mkdir(parents=True)
    with pytest.raises(InputError, match=r"cannot write to .*; choose another folder") as refused, OutputFolder(out):
        pass
    assert len(str(refused.value)) < 500
    assert list(below.rglob("*.partial")) == []


def test_partial_folder_of_another_run_is_not_continued(tiny: Family, tmp_path: Path) -> None:
    begun(tiny, tmp_path / "out", {"lam": 1.0})
    with pytest.raises(InputError, match="--resume or remove it"):
        OutputFolder(tmp_path / "out", {"lam": 1.0})
    with pytest.raises(InputError, match="comes from a run with other "):
        OutputFolder(tmp_path / "out", {"lam": 2.0}, resume=True)
    again = OutputFolder(tmp_path / "out", {"lam": 1.0}, resume=True)
    assert again.read_finished(tiny.adapter.blocks()[0]) is not None


def test_what_was_left_without_a_finished_block_is_cleared_away(tiny: Family, tmp_path: Path) -> None:
    folder = OutputFolder(tmp_path / "out", {"lam": 1.0})
    (folder.model / "config.json").write_text("{}")
    block = tiny.adapter.blocks()[0]
    save_file(tiny.base.read(block.names), folder.partial / "blocks" / f"{block.name}.safetensors")  # without its hash
    del folder
    for run in ({"lam": 2.0}, None):
        again = OutputFolder(tmp_path / "out", run)
        assert not list(again.model.iterdir())
        assert again.read_finished(block) is None
        del again


def test_facts_of_a_block_are_kept_beside_it(tiny: Family, tmp_path: Path) -> None:
    folder, (first, second, *_) = begun(tiny, tmp_path / "out", None), tiny.adapter.blocks()
    facts = {"bfloat16": [0.1 + 0.2, 1e-300]}
    folder.put(second, tiny.base.read(second.names), facts)
    assert (folder.facts(first), folder.facts(second)) == ({}, facts)
    mark = folder.partial / "blocks" / f"{second.name}.json"
    for damaged in ("", "[]", mark.read_text()[:-1], "{}"):
        mark.write_text(damaged)
        assert folder.read_finished(second) is None
        assert folder.facts(second) == {}


@pytest.mark.parametrize("how", ["cut short", "emptied", "another block's", "one bit"])
def test_a_damaged_block_counts_as_unfinished(tiny: Family, tmp_path: Path, how: str) -> None:
    folder = begun(tiny, tmp_path / "out", None)
    first, second = tiny.adapter.blocks()[:2]
    folder.put(second, tiny.base.read(second.names))
    file = tmp_path / "out.partial" / "blocks" / f"{first.name}.safetensors"
    content = file.read_bytes()
    other = file.with_name(f"{second.name}.safetensors").read_bytes()
    flipped = content[:-1] + bytes([content[-1] ^ 1])
    file.write_bytes({"cut short": content[:-1], "emptied": b"", "another block's": other, "one bit": flipped}[how])
    assert folder.read_finished(first) is None
    found = folder.read_finished(second)
    assert found is not None
    assert all(found[name].equal(tensor) for name, tensor in tiny.base.read(second.names).items())


def test_a_folder_that_another_process_finished_while_the_lock_was_awaited_is_in_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def finish(*place: Any, **options: Any) -> AbstractContextManager[bool]:
        (tmp_path / "out").mkdir()
        return try_lock(*place, **options)

    monkeypatch.setattr("featcal.formats.output.try_lock", finish)
    with pytest.raises(InputError, match="out exists already"):
        OutputFolder(tmp_path / "out")


@pytest.mark.slow
def test_two_processes_on_one_output(tmp_path: Path) -> None:
    with OutputFolder(tmp_path / "out"):
        code = f"from featcal.formats.output import OutputFolder; OutputFolder({str(tmp_path / 'out')!r})"
        second = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert f"process {os.getpid()} on {platform.node()} is writing to {tmp_path / 'out.partial'}" in second.stderr
    OutputFolder(tmp_path / "out")


def test_whoever_begins_while_another_tidies_up_keeps_what_it_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, begun, remove = tmp_path / "out", list[OutputFolder](), shutil.rmtree

    def begin_first(place: Path) -> None:
        if not begun:
            with suppress(InputError):  # as long as the other holds it
                begun.append(OutputFolder(out))
                (begun[0].model / "config.json").write_text("{}")
        remove(place)

    folder = OutputFolder(out)
    (folder.model / "config.json").write_text("mine")
    monkeypatch.setattr(shutil, "rmtree", begin_first)
    folder.__exit__(RuntimeError, RuntimeError(), None)
    (other,) = begun
    assert (other.model / "config.json").read_text() == "{}"
    assert [path.name for path in tmp_path.iterdir()] == ["out.partial"]


@pytest.mark.parametrize("named", ["/", "..", "new/..", "."])
def test_what_names_no_new_folder_is_refused_and_nothing_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(InputError, match="exists already" if named == "." else "is no name for a new folder"):
        OutputFolder(named)
    assert [path.name for path in tmp_path.rglob("*")] == ["here"]


def test_a_finished_model_outlives_whatever_came_to_be_in_its_place(tmp_path: Path) -> None:
    folder = OutputFolder(tmp_path / "out")
    (folder.model / "config.json").write_text("{}")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "theirs").touch()
    with pytest.raises(InputError, match="the model is finished: move it"), folder:
        folder.commit()
    assert (tmp_path / "out.partial" / "model" / "config.json").read_text() == "{}"


def test_an_expert_that_changes_during_the_run(own_suite_file: Path, tmp_path: Path) -> None:
    suite = load_suite(own_suite_file)
    (file, *_) = sorted((own_suite_file.parent / "experts").rglob("model.safetensors"))

    def change(label: str, done: int, total: int) -> None:
        if done == 2:
            content = file.read_bytes()
            file.unlink()
            file.write_bytes(content)

    with pytest.raises(InputError, match="changed while it was read") as refused:
        calibrate_to_folder(suite, CONFIG, tmp_path / "out", device="cpu", progress=change)
    assert str(file.name) in str(refused.value)
    assert list(tmp_path.glob("out*")) == []


def test_verification_sees_a_changed_tensor(tiny: Family, result: CalibrationResult, tmp_path: Path) -> None:
    result.save(tmp_path / "out")
    verify_reload(tmp_path / "out", tiny.adapter, result.weights)
    with pytest.raises(NumericalError, match="reloaded outputs differ"):
        verify_reload(tmp_path / "out", tiny.adapter, tiny.merged)


def test_verification_sees_a_reinitialised_tensor(tiny: Family, result: CalibrationResult, tmp_path: Path) -> None:
    result.save(tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    tensors.pop("vision_model.encoder.layers.0.mlp.fc1.weight")
    save_file(tensors, tmp_path / "out" / "model.safetensors", {"format": "pt"})
    with pytest.raises(NumericalError, match="would re-initialise"):
        verify_reload(tmp_path / "out", tiny.adapter, result.weights)


def test_large_models_are_sharded_with_an_index(
    tiny: Family, result: CalibrationResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("featcal.export.write.SHARD_BYTES", 8000)
    written = result.save(tmp_path / "out")
    shards = [name for name in written if name.endswith(".safetensors")]
    assert len(shards) > 3
    assert shards[0] == f"model-00001-of-{len(shards):05}.safetensors"
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(tiny.base.info)
    reread = tiny.model(str(tmp_path / "out")).read(tiny.adapter.tower)
    assert all(t.equal(reread[n]) for n, t in result.weights.read(tiny.adapter.tower).items())


def test_a_large_model_has_one_file_per_block_and_is_written_once(
    tiny: Family, tiny_suite_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A finished block becomes a weight file as it lies on disk, and stays there for a resumed run."""
    from transformers import CLIPModel

    monkeypatch.setattr("featcal.export.write.SHARD_BYTES", 20000)
    seen: dict[str, int] = {}
    verify = verify_reload

    def remember(folder: Path, *rest: Any) -> None:
        for file in (folder.parent / "blocks").glob("*.safetensors"):
            seen[file.name] = file.stat().st_nlink
        verify(folder, *rest)

    monkeypatch.setattr("featcal.export.write.verify_reload", remember)
    document = calibrate_to_folder(load_suite(tiny_suite_file), CONFIG, tmp_path / "out", device="cpu")
    blocks = tiny.adapter.blocks()
    assert seen == {f"{block.name}.safetensors": 2 for block in blocks}
    places = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["weight_map"]
    for block in blocks:
        (file,) = {places[name] for name in block.names}
        assert {name for name, place in places.items() if place == file} == set(block.names)
        assert (tmp_path / "out" / file).stat().st_nlink == 1
    assert set(places.values()) == {name for name in document["written"] if name.endswith(".safetensors")}
    _, info = CLIPModel.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"]
    whole = calibrate_family(tiny, CONFIG).weights.read(tiny.adapter.tower)
    written = tiny.model(str(tmp_path / "out")).read(tiny.adapter.tower)
    assert all(written[name].equal(whole[name]) for name in whole)


def test_a_failure_after_the_blocks_can_be_resumed(
    tiny_suite_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("featcal.export.write.SHARD_BYTES", 20000)
    suite = load_suite(tiny_suite_file)
    verify = verify_reload

    def fail(*_: object) -> None:
        raise NumericalError("no memory")

    monkeypatch.setattr("featcal.export.write.verify_reload", fail)
    with pytest.raises(NumericalError):
        calibrate_to_folder(suite, CONFIG, tmp_path / "out", device="cpu")
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr("featcal.export.write.verify_reload", verify)
    calibrate_to_folder(suite, CONFIG, tmp_path / "out", device="cpu", resume=True)
    assert not (tmp_path / "out.partial").exists()
    assert not list((tmp_path / "out").rglob("*.writing"))


def test_a_disk_without_links_gets_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny: Family) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no links here")

    monkeypatch.setattr(os, "link", refuse)
    block = tiny.adapter.blocks()[0]
    folder = OutputFolder(tmp_path / "out")
    assert not folder.adopt(block, "a.safetensors")
    folder.put(block, tiny.base.read(block.names))
    assert folder.adopt(block, "a.safetensors")
    assert load_file(folder.model / "a.safetensors").keys() == set(block.names)
    assert folder.read_finished(block) is not None


@pytest.mark.parametrize("shard_bytes", [2**31, 20000])
def test_verification_without_the_whole_model(
    tiny: Family, result: CalibrationResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shard_bytes: int
) -> None:
    monkeypatch.setattr("featcal.export.write.SHARD_BYTES", shard_bytes)
    monkeypatch.setattr("featcal.export.write.verify_reload", None)
    container = locate(str(tiny.base_folder), Path("/"), "container")
    with OutputFolder(tmp_path / "out") as folder:
        content = write_model(folder, tiny.adapter, container, result.weights, dict, "card", whole=False)
    assert content["verified"] == "streamed"
    assert json.loads((tmp_path / "out" / "featcal.json").read_text()) == content
    verify_reload(tmp_path / "out", tiny.adapter, result.weights)


def test_streamed_verification_sees_what_is_wrong(tiny: Family, result: CalibrationResult, tmp_path: Path) -> None:
    result.save(tmp_path / "out")
    file = tmp_path / "out" / "model.safetensors"
    whole = load_file(file)
    expected = Checkpoint(tmp_path / "out", "m", tiny.adapter.canonical).info
    name = "vision_model.encoder.layers.0.mlp.fc1.weight"

    def error(tensors: dict[str, Tensor], model: Weights = result.weights) -> str:
        save_file(tensors, file, {"format": "pt"})
        with pytest.raises(NumericalError) as caught:
            verify_streamed(Checkpoint(tmp_path / "out", "m", tiny.adapter.canonical), tiny.adapter, expected, model)
        return str(caught.value)

    without = {n: t for n, t in whole.items() if n != name}
    assert name in error(without)
    assert name in error(without | {name: whole[name].half()})
    assert name in error(without | {name: whole[name][:3].contiguous()})
    assert "logit_scale" in error({n: t for n, t in whole.items() if n != "logit_scale"})
    assert "extra" in error(whole | {"extra": torch.ones(1)})
    assert "outputs differ" in error(without | {name: whole[name] + 1})
    save_file(without | {name: whole[name][:3].contiguous()}, file, {"format": "pt"})
    misshapen = Checkpoint(tmp_path / "out", "m", tiny.adapter.canonical)
    with pytest.raises(NumericalError, match=name):  # a container that the library's own class does not take
        verify_streamed(misshapen, tiny.adapter, misshapen.info, result.weights)
    assert "outputs differ" in error(whole, tiny.merged)


# --- open_clip ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def open_clip_container(tmp_path_factory: pytest.TempPathFactory) -> Located:
    config = model_cfg(True)
    folder = write_folder(tmp_path_factory.mktemp("oc") / "base", config, random_state(config), mean=[0.5] * 3)
    for name in ("tokenizer.json", "notes.txt"):
        (folder / name).write_text("{}")
    return locate_open_clip(f"local-dir:{folder}", Path("/"), "base")


def moved(container: Located) -> tuple[OpenClip, Overlay]:
    """The container's adapter, and its model with another image tower."""
    adapter = OpenClip(container.config, container.names, torch.device("cpu"))
    base = container.open(adapter.canonical, adapter.aliases)
    return adapter, Overlay("moved", base, near(base.read(adapter.tower), 1))


def test_a_streamed_file_is_the_same_within_its_limit(
    open_clip_container: Located, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a model may not be in memory whole, neither is what is written of it."""
    adapter, model = moved(open_clip_container)
    read = Overlay.read
    most = [0]

    def counted(self: Overlay, names: Any) -> dict[str, Tensor]:
        tensors = read(self, names)
        most[0] = max(most[0], sum(t.numel() * t.element_size() for t in tensors.values()))
        return tensors

    monkeypatch.setattr(Overlay, "read", counted)
    monkeypatch.setattr("featcal.formats.output.STREAMED", 4096)
    monkeypatch.setattr("featcal.export.write.verify_streamed", lambda *_: None)
    with OutputFolder(tmp_path / "streamed") as folder:
        write_model(folder, adapter, open_clip_container, model, dict, "card", whole=False)
    largest = max(info.dtype.itemsize * torch.Size(info.shape).numel() for info in model.info.values())
    assert most[0] <= max(4096, largest)
    monkeypatch.undo()
    with OutputFolder(tmp_path / "whole") as folder:
        write_model(folder, adapter, open_clip_container, model, dict, "card")
    streamed, whole = (tmp_path / name / "open_clip_model.safetensors" for name in ("streamed", "whole"))
    one, other = load_file(streamed), load_file(whole)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) and one[name].dtype == other[name].dtype for name in other)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool]
)
def test_a_streamed_tensor_is_read_back_as_it_was(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {
        "matrix": torch.arange(12).reshape(3, 4).to(dtype),
        "transposed": torch.arange(12).reshape(3, 4).to(dtype).T,
        "scalar": torch.ones((), dtype=dtype),
        "empty": torch.ones(0, 3, dtype=dtype),
        'a "name" in ünïcode': torch.ones(1, dtype=torch.uint8),  # the first by its name, the last by its alignment
    }
    info = {name: TensorInfo(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    stream_tensors(info, lambda names: {name: tensors[name] for name in names}, tmp_path / "a.safetensors")
    content = (tmp_path / "a.safetensors").read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    assert all(header[name]["data_offsets"][0] % tensors[name].dtype.itemsize == 0 for name in tensors)
    back = load_file(tmp_path / "a.safetensors")
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[name], tensors[name]) and back[name].dtype == tensors[name].dtype for name in tensors)
    with pytest.raises(InputError, match="cannot write"):
        stream_tensors(info, lambda names: tensors, tmp_path / "nowhere" / "a.safetensors")


@pytest.mark.parametrize("whole", [True, False])
def test_an_open_clip_folder_loads_in_open_clip_with_equal_outputs(
    open_clip_container: Located, tmp_path: Path, whole: bool
) -> None:
    import open_clip

    adapter, model = moved(open_clip_container)
    with OutputFolder(tmp_path / "out") as folder:
        content = write_model(folder, adapter, open_clip_container, model, dict, "card", whole=whole)
    assert content["verified"] == ("reloaded" if whole else "streamed")
    files = {"open_clip_config.json", "open_clip_model.safetensors", "tokenizer.json", "featcal.json", "README.md"}
    assert set(content["written"]) == {path.name for path in (tmp_path / "out").iterdir()} == files
    with safe_open(tmp_path / "out" / "open_clip_model.safetensors", "pt") as handle:
        assert handle.metadata() == {"format": "pt"}
    config = json.loads((tmp_path / "out" / "open_clip_config.json").read_text())
    assert config["model_cfg"] == open_clip_container.config["model_cfg"]
    assert config["preprocess_cfg"]["mean"] == [0.5] * 3
    loaded, _, _ = open_clip.create_model_and_transforms(f"local-dir:{tmp_path / 'out'}")
    state, base = loaded.state_dict(), model.under
    assert all(tensor.equal(state[name]) for name, tensor in model.read(adapter.tower).items())
    rest = [name for name in base.info if name not in adapter.tower]
    assert all(tensor.equal(state[name]) for name, tensor in base.read(rest).items())
    inputs = adapter.probe()
    own = final_features(adapter, model, base.read(adapter.head), [inputs], Compute(torch.device("cpu"), torch.float32))
    with torch.no_grad():
        torch.testing.assert_close(loaded.eval().encode_image(inputs["pixel_values"]), own, rtol=1e-5, atol=1e-5)


def test_the_activation_is_written_in_words(tmp_path: Path) -> None:
    """A single file among others gives a folder of its own, which says GELU although its config did not."""
    config = model_cfg(None)
    source = write_folder(tmp_path / "source", config, random_state(config))
    (tmp_path / "files").mkdir()
    (source / "open_clip_model.safetensors").rename(tmp_path / "files" / "cars.safetensors")
    (tmp_path / "files" / "tokenizer.json").write_text("not this model's")
    (tmp_path / "files" / "README.md").write_text("---\nlicense: mit\n---\nNot this model's either.\n")
    (tmp_path / "files" / "featcal.json").write_text('{"heads": {"cars": null}, "written": ["heads/cars.safetensors"]}')
    reference = f"open_clip:{source / 'open_clip_config.json'}:{tmp_path / 'files' / 'cars.safetensors'}"
    document = rewrite(reference, tmp_path / "out")
    assert document["format"] == "open_clip"
    written = json.loads((tmp_path / "out" / "open_clip_config.json").read_text())
    assert written["model_cfg"] == config | {"quick_gelu": False}
    assert set(written["preprocess_cfg"]) == {"mean", "std", "interpolation", "resize_mode", "fill_color"}
    assert "tokenizer.json" not in document["written"]
    card = (tmp_path / "out" / "README.md").read_text()
    assert "library_name: open_clip" in card
    assert "license" not in card
    assert "heads" not in json.loads((tmp_path / "out" / "featcal.json").read_text())


@pytest.mark.parametrize("layout", ["hf", "open_clip"])
def test_the_lines_that_are_said_to_load_a_model_load_it(
    tiny: Family, open_clip_container: Located, tmp_path: Path, layout: str
) -> None:
    container, adapter = (tiny.container, tiny.adapter) if layout == "hf" else (open_clip_container, None)
    adapter = adapter or moved(container)[0]
    said: dict[str, Any] = {}
    exec(adapter.loading(container.folder, container.config), said)
    loaded = said["model"].state_dict()
    stored = container.open(adapter.canonical, adapter.aliases)
    for name, tensor in stored.read(adapter.tower).items():
        assert tensor.equal(loaded[name]), name


def test_open_clip_verification_sees_a_changed_tensor(open_clip_container: Located, tmp_path: Path) -> None:
    adapter, model = moved(open_clip_container)
    with OutputFolder(tmp_path / "out") as folder:
        write_model(folder, adapter, open_clip_container, model, dict, "card")
    with pytest.raises(NumericalError, match="reloaded outputs differ"):
        verify_reload(tmp_path / "out", adapter, model.under)


def test_storage_dtype_is_the_merged_models(own_suite_file: Path, tmp_path: Path) -> None:
    file = own_suite_file.parent / "base" / "model.safetensors"
    save_file({name: t.half() for name, t in load_file(file).items()}, file, {"format": "pt"})
    family = open_family(load_suite(own_suite_file), device="cpu")
    calibrate_family(family, CONFIG).save(tmp_path / "out")
    assert {t.dtype for t in load_file(tmp_path / "out" / "model.safetensors").values()} == {torch.float16}


def test_merged_checkpoint_as_container(tiny: Family, own_suite_file: Path, tmp_path: Path) -> None:
    """A suite whose merged model is a folder gives the same calibration as the recipe that made the folder."""
    import yaml

    merge_to_folder(tiny, "task-arithmetic", 0.5, own_suite_file.parent / "merged")
    content = yaml.safe_load(own_suite_file.read_text()) | {"merged": "merged"}
    own_suite_file.write_text(yaml.safe_dump(content))
    family = open_family(load_suite(own_suite_file), device="cpu")
    assert family.container.folder == own_suite_file.parent / "merged"
    ours = calibrate_family(family, CONFIG).weights.read(tiny.adapter.tower)
    theirs = calibrate_family(tiny, CONFIG).weights.read(tiny.adapter.tower)
    assert all(ours[name].equal(theirs[name]) for name in theirs)


def test_tower_without_prefix_is_rewritten(tiny: Family, tmp_path: Path) -> None:
    """What transformers 5 saves from scratch loses its prefix; `export` gives it back."""
    from transformers import CLIPVisionModel

    expert = tiny.suite.root / "experts" / "pets"
    bare = tmp_path / "bare"
    shutil.copytree(expert, bare)
    tensors = load_file(expert / "model.safetensors")
    save_file({n.removeprefix("vision_model."): t for n, t in tensors.items()}, bare / "model.safetensors")
    rewrite(bare, tmp_path / "out")
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == tensors.keys()
    _, info = CLIPVisionModel.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"]


CLASS_TOKEN = "vision_model.embeddings.class_embedding"
FOREIGN = {
    "misses": (lambda tensors: tensors.pop("vision_model.post_layernorm.weight"), "vision_model.post_layernorm.weight"),
    "shape": (lambda tensors: tensors.update({CLASS_TOKEN: torch.zeros(3)}), "class_embedding"),
}
"""Changes to a model's tensors, each with the tensor that the message names."""


@pytest.mark.parametrize(("change", "named"), FOREIGN.values(), ids=FOREIGN)
def test_a_model_that_is_not_of_its_architecture_is_not_exported(
    change: Any, named: str, tiny: Family, tmp_path: Path
) -> None:
    shutil.copytree(tiny.suite.root / "experts" / "pets", tmp_path / "broken")
    tensors = load_file(tmp_path / "broken" / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "broken" / "model.safetensors")
    with pytest.raises(InputError, match=named):
        rewrite(tmp_path / "broken", tmp_path / "out")
    assert [one.name for one in tmp_path.iterdir()] == ["broken"]


@pytest.mark.slow
def test_a_head_that_is_not_the_embeddings_is_not_dropped(tmp_path: Path) -> None:
    """The configuration says that both are one, the file holds two: written as one, the answers would be others."""
    model = tmp_path / "model"
    tiny_decoder(ROWS["llama"], tie_word_embeddings=True).save_pretrained(model)
    tensors = load_file(model / "model.safetensors")
    save_file(tensors | {"lm_head.weight": 2 * tensors["model.embed_tokens.weight"]}, model / "model.safetensors")
    with pytest.raises(InputError, match=r"'lm_head.weight' must repeat 'model.embed_tokens.weight'"):
        rewrite(model, tmp_path / "out")


@pytest.mark.slow
def test_files_of_other_formats_and_cards_that_cannot_be_read_stay_behind(tiny: Family, tmp_path: Path) -> None:
    own = tmp_path / "own"
    shutil.copytree(tiny.suite.root / "experts" / "pets", own)
    stale = ("on.gguf", "Modelfile", "rust_model.ot", "model.ckpt", "pytorch_model.bin.index.json")
    for name in (*stale, "notes.md"):
        (own / name).write_text("FROM ./on.gguf")
    (own / "README.md").write_bytes(b"caf\xe9")
    written = rewrite(own, tmp_path / "out")["written"]
    assert "notes.md" in written
    assert not {*stale} & {*written}
    assert (tmp_path / "out" / "README.md").read_text().startswith("---\nlibrary_name: transformers")


@pytest.mark.slow
def test_the_sum_of_base_and_adapter_has_no_record_of_the_base(tiny: Family, tmp_path: Path) -> None:
    base = tmp_path / "base"
    merge_to_folder(tiny, "task-arithmetic", 0.5, base)
    layer = "vision_model.encoder.layers.0.self_attn.q_proj"
    rows, columns = load_file(base / "model.safetensors")[f"{layer}.weight"].shape
    factors = {f"{layer}.lora_A.weight": torch.ones(2, columns), f"{layer}.lora_B.weight": torch.ones(rows, 2)}
    write_adapter(tmp_path / "adapter", factors, r=2, lora_alpha=2)
    source = f"{base}+{tmp_path / 'adapter'}"
    rewrite(source, tmp_path / "out")
    assert "command" in json.loads((base / "featcal.json").read_text())
    assert "command" not in json.loads((tmp_path / "out" / "featcal.json").read_text())
    assert "featcal merge" not in (tmp_path / "out" / "README.md").read_text()
    with pytest.raises(InputError, match="is a base with an adapter; write the sum first"):
        convert(source, tmp_path / "other", "open_clip")


def test_the_text_of_a_method_names_its_dtype(tiny: Family) -> None:
    recipe = recipe_for(tiny.suite, "ties:density=0.3,dtype=bfloat16")
    assert recipe.method_text.endswith("density=0.3,dtype=bfloat16")
    again = recipe_for(tiny.suite, recipe.method_text)
    assert (again.options(), again.dtype) == (recipe.options(), "bfloat16")
    assert recipe_for(tiny.suite, "simple-averaging", dtype="float16").method_text == "simple-averaging:dtype=float16"


def test_hub_ids_become_base_models(tiny: Family) -> None:
    from featcal.export.card import CardProvenance, model_card

    tasks = {
        name: task.model_copy(update={"expert": f"someone/{name}@main"}) for name, task in tiny.suite.tasks.items()
    }
    suite = tiny.suite.model_copy(update={"tasks": tasks, "base": "owner/base"})
    record = {"suite": "tiny", "suite_file": {"shipped": None}, "licences": {"base": None}}
    card = model_card(replace(tiny, suite=suite), record, CardProvenance("t", "w", {"lam": 1}, "featcal {}".format))
    assert "- owner/base\n- someone/pets\n- someone/signs\n" in card
    assert "base_model_relation: merge" in card
    for task, ref in zip(tasks, ("owner/base+some/lora", "hf-hub:another/clip"), strict=True):
        tasks[task] = tasks[task].model_copy(update={"expert": ref})
    suite = suite.model_copy(update={"tasks": tasks})
    card = model_card(replace(tiny, suite=suite), record, CardProvenance("t", "w", {"lam": 1}, "featcal {}".format))
    assert "- owner/base\n- some/lora\n- another/clip\n" in card
    assert "owner/base, some/lora, another/clip" in card


@pytest.mark.slow
def test_fast_precision_is_close(tiny_suite_file: Path, tiny: Family) -> None:
    """bfloat16 features, but weights, moments and solve as exact: the calibrated features differ by rounding."""
    fast = calibrate_family(load_suite(tiny_suite_file), replace(CONFIG, precision="fast"), device="cpu")
    batches = [tiny.samples("pets", "test", 8, 0).inputs]
    ours, exact = (
        final_features(tiny.adapter, weights, tiny.head(), batches, tiny.compute)
        for weights in (fast.weights, calibrate_family(tiny, CONFIG).weights)
    )
    assert 0 < float((ours - exact).norm() / exact.norm()) < 0.1


def test_hashes_and_resume_know_every_kind_of_reference(tmp_path: Path) -> None:
    """A changed adapter is another run: its finished blocks must not be gone on from."""
    from safetensors.torch import load_file, save_file
    from tiny_text import write_text_suite

    from featcal import InputError, calibrate_to_folder, load_suite, open_family
    from featcal.calibration.calibrate import config_for
    from featcal.export.record_facts import input_hashes

    suite = load_suite(write_text_suite(tmp_path / "s", "t5-lora"))
    family = open_family(suite, "cpu")
    assert set(input_hashes(family)) == {"base", "expert left", "expert right"}
    assert "adapter_model.safetensors" in input_hashes(family)["expert left"]

    def stop(_: str, done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrate_to_folder(family, config_for(family), tmp_path / "out", progress=stop)
    file = tmp_path / "s" / "adapters" / "left" / "adapter_model.safetensors"
    save_file({name: 3 * tensor for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    changed = open_family(suite, "cpu")
    with pytest.raises(InputError, match="comes from a run with other "):
        calibrate_to_folder(changed, config_for(changed), tmp_path / "out", resume=True)


@pytest.mark.parametrize("whole", [True, False])
def test_a_cut_vocabulary_is_written_with_the_bases_config(whole: bool, tmp_path: Path, monkeypatch: Any) -> None:
    import json as json_

    import yaml
    from safetensors.torch import load_file, save_file
    from tiny_text import ROWS, write_text_suite

    from featcal import calibrate_to_folder, load_suite, open_family
    from featcal.calibration.calibrate import config_for
    from featcal.export.merge import merge_to_folder

    file = write_text_suite(tmp_path / "s", "llama")
    merge_to_folder(load_suite(file), None, None, tmp_path / "s" / "merged")
    weights = tmp_path / "s" / "merged" / "model.safetensors"
    tensors = load_file(weights)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = torch.cat([tensors[name], torch.ones(3, 16)])
    save_file(tensors, weights, {"format": "pt"})
    config = tmp_path / "s" / "merged" / "config.json"
    config.write_text(json_.dumps({**json_.loads(config.read_text()), "vocab_size": ROWS + 3}))
    content = yaml.safe_load(file.read_text())
    file.write_text(yaml.safe_dump({**content, "merged": "merged", "vocabulary": "base"}))
    monkeypatch.setattr("featcal.calibration.calibrate.can_reload", lambda *_: whole)
    family = open_family(load_suite(file), "cpu")
    document = calibrate_to_folder(family, config_for(family), tmp_path / "out")
    assert document["verified"] == ("reloaded" if whole else "streamed")
    assert json_.loads((tmp_path / "out" / "config.json").read_text())["vocab_size"] == ROWS

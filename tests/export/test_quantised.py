"""Models that are rounded while they are calibrated, and written packed: the same for us and for transformers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from command_line import Run
from tiny_decoders import ROWS, fresh
from tiny_encoders import VARIANTS, tiny_encoder
from tiny_text import write_text_suite
from torch import Tensor

from featcal.calibration import closed_form
from featcal.calibration.block_statistics import BlockStatistics
from featcal.calibration.calibrate import calibrate_family, calibrate_to_folder, config_for
from featcal.calibration.column_rounding import round_to_nearest
from featcal.calibration.streams import Streams
from featcal.export.write import rewrite
from featcal.family.opening import Family, open_family
from featcal.formats.grid import SETTINGS, PackedCheckpoint, QuantizationGrid
from featcal.formats.weights import Weights
from featcal.models.compute import Compute
from featcal.models.features import final_features
from featcal.session.api import evaluate, measure_drift
from featcal.studies.replay.again import replay_record
from featcal.suite.calibration_options import CalibrationConfig
from featcal.suite.schema import load_suite
from featcal.system.errors import InputError
from featcal.testing.trial import write_trial

pytest.importorskip(
    "compressed_tensors", reason="packed weights need compressed-tensors: pip install featcal[quantize]"
)

KINDS = {"int4": 8, "int8": 0}
"""Quantisation, and the columns that share a scale."""


def options(family: Family, kind: str, **more: Any) -> Any:
    return config_for(family, quantize=kind, group_size=KINDS[kind], samples=4, **more)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return fresh("llama", tmp_path_factory.mktemp("llama")).family


@pytest.fixture(scope="module")
def written(llama: Family, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("written")
    for kind in KINDS:
        calibrate_to_folder(llama, options(llama, kind), root / kind)
    return {kind: root / kind for kind in KINDS}


def open_tiny(kind: str, root: Path) -> Family:
    """Write a suite of tiny models of an architecture, and open it."""
    if kind == "t5":
        return open_family(load_suite(write_text_suite(root, kind)), "cpu")
    if kind in ROWS:
        return fresh(kind, root).family
    facts, own = VARIANTS[kind]
    return write_trial(tiny_encoder(facts, **own), facts, root).family


def tensors(family: Family, model: Any) -> dict[str, Tensor]:
    return family.model(model).read(family.adapter.tower)


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_reads_what_we_read(llama: Family, written: dict[str, Path], kind: str) -> None:
    """Logits of its own integration, packed until the first call, against ours; float32."""
    folder, own = written[kind], llama.adapter
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.quantization_config.quant_method == "compressed-tensors"
    inputs = own.probe()
    with torch.no_grad():
        theirs = model(**inputs).logits[:, -1]
    dense, cpu = llama.model(str(folder)), Compute(torch.device("cpu"), torch.float32)
    ours = own.output(cpu.place(dense.read(own.scoring)), final_features(own, dense, {}, [inputs], cpu))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    packed = [name for name, module in model.named_modules() if hasattr(module, "quantization_scheme")]
    assert len(packed) == 7 * len(own.blocks())
    assert not any("head" in name or "embed" in name for name in packed)


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_holds_what_was_calibrated(llama: Family, written: dict[str, Path], kind: str) -> None:
    """Bit for bit, on a grid of few values, and in as many bytes as its record says."""
    folder, config = written[kind], options(llama, kind)
    made, read = tensors(llama, calibrate_family(llama, config)), tensors(llama, str(folder))
    assert all(read[name].equal(made[name]) for name in made)
    weight = read["model.layers.1.mlp.down_proj.weight"]
    groups = weight.split(KINDS[kind] or weight.shape[1], dim=1)
    assert max(len(row.unique()) for part in groups for row in part) <= 2 ** int(kind[3:])
    record = json.loads((folder / "featcal.json").read_text())
    size = (folder / "model.safetensors").stat().st_size
    assert 0 < size - record["bytes"]["packed"] < 10_000  # its header
    assert record["bytes"]["dense"] == sum(one.nbytes for one in llama.model(str(folder)).info.values())
    assert record["storing"]["dtype"] == kind
    assert f"rounding to {kind} moves the weights by" in record["notes"][-1]


def test_biases_are_fitted_to_rounded_weights(tiny: Family) -> None:
    """Eq. (55) for the weights as stored, of the first group of the first block: its queries, keys and values."""
    config, kept = config_for(tiny, quantize="int4", group_size=8, samples=4, lam=0.1), list[BlockStatistics]()
    weights = calibrate_family(tiny, config, watch=lambda one: kept.append(one.with_config(one.config))).weights
    group, prefix = kept[0].linears[0], tiny.adapter.blocks()[0].name
    names = {kind: [f"{prefix}.{name}.{kind}" for name in group.names] for kind in ("weight", "bias")}

    def stack(model: Weights, kind: str) -> Tensor:
        return torch.cat([*model.read(names[kind]).values()]).double()

    anchor = closed_form.anchor(stack(tiny.merged, "bias"), stack(tiny.base, "bias"), config.rho)
    sums, weight = group.sums, stack(weights, "weight")
    expected = closed_form.linear_bias(sums.target_mean, sums.mean, weight, anchor, sums.omega, config.lam)
    torch.testing.assert_close(stack(weights, "bias"), expected, rtol=1e-5, atol=1e-6)


def test_an_interrupted_run_is_resumed_to_the_same_bytes(
    llama: Family, written: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed after its first block; then written block by block and verified without the whole in memory."""
    config, out, deploy, count = options(llama, "int4"), tmp_path / "out", Streams.deploy, [0]

    def stop(*args: Any) -> Any:
        count[0] += 1
        if count[0] == 2:
            raise KeyboardInterrupt
        return deploy(*args)

    with monkeypatch.context() as patched:
        patched.setattr(Streams, "deploy", stop)
        with pytest.raises(KeyboardInterrupt):
            calibrate_to_folder(llama, config, out)
    monkeypatch.setattr("featcal.calibration.calibrate.can_reload", lambda *_: False)
    again = calibrate_to_folder(llama, config, out, resume=True)
    assert again["verified"] == "streamed"
    assert len([name for name in again["written"] if name.endswith(".safetensors")]) == 3
    assert again["tensors"] == json.loads((written["int4"] / "featcal.json").read_text())["tensors"]
    assert transformers.AutoModelForCausalLM.from_pretrained(out) is not None


@pytest.mark.slow
def test_a_record_is_replayed(llama: Family, written: dict[str, Path]) -> None:
    found = replay_record(written["int4"], llama.suite.root / "suite.yaml")
    assert found.same
    assert found.different == []


def test_a_packed_folder_is_a_model_and_not_a_part_of_a_suite(llama: Family, written: dict[str, Path]) -> None:
    folder = str(written["int8"])
    packed = llama.model(folder)
    assert isinstance(packed, PackedCheckpoint)
    name = packed.scales[0]
    both = packed.read([name.removesuffix("_scale"), name])
    assert both[name].equal(packed.read([name])[name])
    drift = measure_drift(llama, folder, samples=4).to_json()["tasks"]
    made = measure_drift(llama, calibrate_family(llama, options(llama, "int8")), samples=4).to_json()["tasks"]
    assert {task: one["final"] for task, one in drift.items()} == {task: one["final"] for task, one in made.items()}
    with pytest.raises(InputError, match=r"base: quantised weights.*give the checkpoint that it was quantised from"):
        open_family(llama.suite.model_copy(update={"base": folder}), "cpu")
    with pytest.raises(InputError, match="its weights are quantised; give the model that it was quantised from"):
        rewrite(folder, "elsewhere")


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"format": "naive-quantized"}, "pack-quantized with one group"),
        ({"weights": {"symmetric": False}}, "symmetric, nothing else"),
        ({"weights": {"type": "float"}}, "whole numbers"),
        ({"weights": {"num_bits": 3}}, "4 or 8 bits"),
        ({"input_activations": {"num_bits": 8}}, "nothing else quantised"),
        ({"config_groups": {}}, "does not read"),
        ({"transform_config": {"config_groups": {"R1": {"type": "hadamard"}}}}, "nothing else quantised"),
    ],
)
def test_other_ways_to_quantise_are_refused(changed: dict[str, Any], why: str) -> None:
    said = QuantizationGrid(4, 32).settings(["lm_head"])
    group = said["config_groups"]["group_0"]
    group["weights"] |= changed.pop("weights", {})
    group |= {"input_activations": changed.pop("input_activations", None)}
    with pytest.raises(InputError, match=why):
        QuantizationGrid.read(said | changed, "model")
    assert QuantizationGrid.read(QuantizationGrid(8, 0).settings([]), "model") == QuantizationGrid(8, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("grid", [QuantizationGrid(4, 8), QuantizationGrid(8, 8), QuantizationGrid(8, 0)], ids=str)
def test_packing_loses_nothing(grid: QuantizationGrid, dtype: torch.dtype) -> None:
    weight = torch.randn(64, 24, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rounded, scale = round_to_nearest(weight, grid, dtype)
    stored = rounded.to(dtype)
    assert stored.double().equal(rounded)
    packed = grid.pack(stored, scale)
    assert grid.unpack(packed).equal(stored)
    info = grid.packed_info(type("Dense", (), {"shape": (64, 24), "dtype": dtype})())
    assert {end: (tuple(t.shape), t.dtype) for end, t in packed.items()} == {
        end: (one.shape, one.dtype) for end, one in info.items()
    }


@pytest.mark.parametrize(
    ("kind", "group", "why"),
    [
        ("llama", 7, r"group_size 7 does not divide the inputs of all maps \(16, 24\).*4 does"),
        ("gpt2", 8, "does not store a matrix"),
        ("olmoe", 8, "experts of a mixture"),
        ("dinov2", 8, "with packed weights cannot be loaded by transformers"),
    ],
)
def test_what_cannot_be_packed_is_refused_before_the_work(kind: str, group: int, why: str, tmp_path: Path) -> None:
    family = open_tiny(kind, tmp_path / "suite")
    with pytest.raises(InputError, match=why):
        calibrate_to_folder(family, CalibrationConfig(quantize="int4", group_size=group), tmp_path / "out")
    assert not (tmp_path / "out.partial").exists()


def test_without_the_library_nothing_is_calibrated(llama: Family, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "compressed_tensors", None)
    with pytest.raises(InputError, match=r'pip install "featcal\[quantize\]"'):
        calibrate_to_folder(llama, options(llama, "int8"), tmp_path / "out")


def test_the_command_says_how_large_the_weights_are(run: Run, tiny_suite_file: Path, tmp_path: Path) -> None:
    """CLIP: its text tower and projections stay as they are."""
    out = tmp_path / "out"
    code, said, _ = run("calibrate", tiny_suite_file, "--samples", 2, "--quantize", "int8", "--group-size", 8,
                        "--out", out)  # fmt: skip
    assert code == 0
    assert "packed weights:" in said
    settings = json.loads((out / "config.json").read_text())[SETTINGS]
    assert {name.split(".")[0] for name in settings["ignore"]} == {"text_model", "visual_projection", "text_projection"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["qwen3", "gemma2", "phi3", "glm", "bert", "roberta", "vit", "siglip_vision_model", "t5"]
)
def test_other_architectures(kind: str, tmp_path: Path) -> None:
    family = open_tiny(kind, tmp_path / "suite")
    config = options(family, "int8", recipe="refined")
    record = calibrate_to_folder(family, config, tmp_path / "out")
    assert record["verified"] == "reloaded"
    made, read = tensors(family, calibrate_family(family, config)), tensors(family, str(tmp_path / "out"))
    assert all(read[name].equal(made[name]) for name in made)


@pytest.mark.slow
def test_scores_of_lm_mini() -> None:
    """int8 scores as not rounded, int4 nearly so, and int4 drifts less than every weight rounded for itself."""
    family = open_family(load_suite("lm-mini"), "cpu")
    more: dict[str, Any] = {"recipe": "informed", "samples": 64}
    plain = calibrate_family(family, config_for(family, **more))
    made = {k: calibrate_family(family, config_for(family, quantize=k, group_size=32, **more))
            for k in ("int8", "int4", "int4-nearest")}  # fmt: skip
    scores = {kind: 100 * evaluate(family, one).average for kind, one in {"off": plain, **made}.items()}
    assert scores["int8"] == pytest.approx(scores["off"], abs=0.5)
    assert scores["int4"] > scores["off"] - 1.5
    ledgers = {kind: measure_drift(family, one).to_json()["tasks"] for kind, one in made.items()}
    drift = {kind: sum(one["final"]["drift"] for one in tasks.values()) for kind, tasks in ledgers.items()}
    assert drift["int8"] < drift["int4"] < drift["int4-nearest"]

"""What must hold for every architecture: replay, completeness, fixed point, identity, less drift, reload."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lanes import rows
from safetensors.torch import load_file, save_file
from tiny_clip import in_float64
from tiny_text import KINDS, TASKS, write_text_suite
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from featcal import calibrate_to_folder, load_suite, measure_drift, open_family
from featcal.calibration.calibrate import CalibrationResult, calibrate_family, config_for, expert_passes
from featcal.drift.decomposition import decompose, measure_total_drift
from featcal.drift.ledger import DriftLedger
from featcal.family.opening import Family
from featcal.models.adapter import Call
from featcal.models.capture import capture_inputs
from featcal.models.compute import computing
from featcal.models.features import final_features
from featcal.models.lane import WalkCache


@pytest.fixture(scope="module", params=rows(KINDS, quick=("t5",), slow=("llama-tied", "t5-tied", "t5-lora")))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    return open_family(load_suite(write_text_suite(tmp_path_factory.mktemp(request.param), request.param)), "cpu")


@pytest.fixture(scope="module")
def exact(family: Family) -> Family:
    """The same in float64."""
    return in_float64(family)


@pytest.fixture(scope="module")
def drifted(exact: Family) -> DriftLedger:
    """The merged model's drift on the test samples, in float64."""
    return measure_drift(exact, split="test")


@pytest.fixture(scope="module")
def repaired(family: Family) -> CalibrationResult:
    """A calibration with the defaults of the architecture."""
    return calibrate_family(family)


@pytest.fixture(scope="module")
def plain(family: Family) -> CalibrationResult:
    """A calibration of linear maps alone, with a ridge that is not tiny."""
    return calibrate_family(family, config_for(family, lam=0.05))


def adapted(family: Family) -> bool:
    """Whether the experts are adapters on the base."""
    return "+" in family.suite.tasks[TASKS[0]].expert


def library_output(family: Family, inputs: Any) -> Tensor:
    """Scores at the position of the answer, by the library alone with the kernels that featcal takes."""
    model: Any = family.adapter
    loaded = model.whole(family.base.read(family.adapter.tower), family.base_folder)
    with torch.no_grad(), computing, sdpa_kernel(SDPBackend.MATH):
        logits = loaded(**inputs, use_cache=False).logits
    if family.adapter.family == "t5":
        return logits[:, 0]
    return logits[torch.arange(len(logits)), inputs["attention_mask"].sum(1) - 1]


def test_replay_is_the_models_own_forward(family: Family) -> None:
    inputs = family.samples(TASKS[0], "calibration", None, 0).inputs
    features = final_features(family.adapter, family.base, {}, [inputs], family.compute)
    scores = family.adapter.output(family.base.read(family.adapter.scoring), features)
    torch.testing.assert_close(scores, library_output(family, inputs), rtol=1e-6, atol=1e-6)


class SeesLinears(TorchFunctionMode):
    """Remembers the weight of every call of F.linear."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.linear:
            self.weights.append(args[1])
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def test_every_linear_map_is_seen_exactly_once(family: Family) -> None:
    batch = family.samples(TASKS[0], "calibration", 2, 0).inputs
    upstream: Call | None = None
    for stage in family.adapter.stages:
        call = stage.first_call(family.base.read(stage.outer), batch, upstream)
        for block in stage.blocks:
            tensors = block.local(family.base.read(block.names))
            with SeesLinears() as oracle, capture_inputs({**block.linears, **block.layernorms}) as inputs:
                output = block.run(tensors, call)
            names = block.linears
            assert set(inputs) >= set(names)
            assert {id(w) for w in oracle.weights} == {id(tensors[f"{name}.weight"]) for name in names}
            assert len(oracle.weights) == len(names)
            upstream = call = stage.advance(call, output)


def test_number_of_linear_maps(family: Family) -> None:
    expected = {"t5": [7, 7, 11, 11], "llama": [7, 7, 7]}[family.adapter.family]
    assert [len(block.linears) for block in family.adapter.blocks()] == expected


@pytest.mark.parametrize("rmsnorms", [False, True])
def test_identical_models_are_a_fixed_point(exact: Family, rmsnorms: bool) -> None:
    same = Family(**{**vars(exact), "merged": exact.base, "experts": dict.fromkeys(exact.experts, exact.base)})
    config = config_for(same, lam=0.05, eps=0.0, rmsnorms=rmsnorms)
    done = calibrate_family(same, config).weights
    for name, tensor in same.base.read(same.adapter.tower).items():
        torch.testing.assert_close(done.read([name])[name], tensor, rtol=1e-9, atol=1e-10)


def test_drift_identity_and_shares(family: Family, exact: Family) -> None:
    ledger = measure_drift(exact, split="test", attribution=True, output=True) if family.adapter.family == "t5" else (
        measure_drift(exact, split="test", attribution=True)
    )  # fmt: skip
    names = [layer.layer for layer in ledger.tasks[TASKS[0]].layers]
    blocks = family.adapter.block_layers()
    lead = {"t5": ["encoder embeddings", *blocks[:2], "decoder embeddings", *blocks[2:], "head"]}
    assert names == lead.get(family.adapter.family, ["embeddings", *blocks, "head"])
    for task in ledger.tasks.values():
        assert task.identity_residual < 1e-12
        assert float(task.layers[0].propagation.abs().max()) == 0
        assert task.attribution is not None
        assert float(task.attribution.shares.sum()) == pytest.approx(1, abs=1e-9)
        if task.output is not None:
            assert float(task.output.tightness.max()) <= 1 + 1e-9
            shared = adapted(family)  # adapters leave the head alone; otherwise every model has its own
            assert bool((task.output.head_mismatch == 0).all() if shared else (task.output.head_mismatch > 0).all())
            assert not bool((task.output.is_certified & ~task.output.agrees).any())


def test_sublayers_together_are_the_block(exact: Family, drifted: DriftLedger) -> None:
    parts = measure_drift(exact, split="test", sublayers=True)
    for task in TASKS:
        last = {layer.layer: layer for layer in parts.tasks[task].layers}
        for layer in drifted.tasks[task].layers:
            same = last.get(f"{layer.layer} mlp", last.get(layer.layer))
            assert same is not None
            torch.testing.assert_close(same.drift, layer.drift, rtol=1e-9, atol=1e-12)


def test_features_followed_are_those_taken_apart(family: Family) -> None:
    passes = {task: family.expert_pass(family.samples(task, "test", None, 0), 4, WalkCache(2**24)) for task in TASKS}
    both = family.run(), family.merged, passes
    followed = measure_total_drift(*both)
    for task, whole in decompose(*both).items():
        assert [layer.layer for layer in followed[task].layers] == [layer.layer for layer in whole.layers]
        for one, other in zip(followed[task].layers, whole.layers, strict=True):
            assert one.drift.equal(other.drift)
            assert one.expert_norm.equal(other.expert_norm)
        assert followed[task].model_features.equal(whole.model_features)
        assert followed[task].expert_features.equal(whole.expert_features)


def test_padding_counts_for_nothing(exact: Family, drifted: DriftLedger, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tokens under the padding: the same calibrated weights and the same drift, to rounding."""
    before = calibrate_family(exact).weights
    original = Family.samples

    def scribbled(self: Family, *args: Any, **kwargs: Any) -> Any:
        drawn = original(self, *args, **kwargs)
        ids, mask = drawn.inputs["input_ids"].clone(), drawn.inputs["attention_mask"]
        ids[mask == 0] = 7
        return type(drawn)(**{**vars(drawn), "inputs": {**drawn.inputs, "input_ids": ids}})

    monkeypatch.setattr(Family, "samples", scribbled)
    after, again = calibrate_family(exact).weights, measure_drift(exact, split="test")
    names = [name for block in exact.adapter.blocks() for name in block.names]
    for name, tensor in before.read(names).items():
        torch.testing.assert_close(after.read([name])[name], tensor, rtol=1e-9, atol=1e-9)
    for task in TASKS:
        for one, other in zip(drifted.tasks[task].layers, again.tasks[task].layers, strict=True):
            torch.testing.assert_close(one.drift, other.drift, rtol=1e-9, atol=1e-12)


def test_calibration_lowers_the_final_drift_and_leaves_the_rest(family: Family, tmp_path: Path) -> None:
    document = calibrate_to_folder(family, config_for(family, lam=0.05, rho=1.0, alpha=0.3), tmp_path / "out")
    before, after = measure_drift(family), measure_drift(family, str(tmp_path / "out"))
    for task in TASKS:
        assert after.tasks[task].layers[-1].relative_drift < before.tasks[task].layers[-1].relative_drift
    written = load_file(tmp_path / "out" / "model.safetensors")
    inside = {f"{block.name}.{name}.weight" for block in family.adapter.blocks() for name in block.linears}
    merged = family.merged.read(family.adapter.tower)
    assert {name for name, tensor in written.items() if not tensor.equal(merged[name])} == inside
    assert document["tasks"][TASKS[0]]["tokens"] == int(
        family.samples(TASKS[0], "calibration", None, 0).inputs["attention_mask"].sum()
    )


def test_the_export_reloads_in_transformers_with_equal_outputs(
    family: Family, repaired: CalibrationResult, tmp_path: Path
) -> None:
    repaired.save(tmp_path / "out")
    inputs = family.adapter.probe()
    features = final_features(family.adapter, repaired.weights, {}, [inputs], family.compute)
    scores = family.adapter.output(repaired.weights.read(family.adapter.scoring), features)
    torch.testing.assert_close(family.adapter.reference(tmp_path / "out", inputs), scores, rtol=1e-5, atol=1e-5)


def test_the_head_is_never_calibrated(family: Family, repaired: CalibrationResult) -> None:
    adapter: Any = family.adapter
    names = [*adapter.vocabulary, *adapter.scoring]
    for name, tensor in family.merged.read(names).items():
        assert repaired.weights.read([name])[name].equal(tensor)


def test_rmsnorms_are_left_alone_unless_asked_for(family: Family, plain: CalibrationResult) -> None:
    scales = [name for b in family.adapter.blocks() for name in b.names if "norm" in name and name.endswith("weight")]
    merged = family.merged.read(scales)
    left = plain.weights.read(scales)
    extended = calibrate_family(family, config_for(family, lam=0.05, rmsnorms=True)).weights.read(scales)
    assert all(left[name].equal(merged[name]) for name in scales)
    if adapted(family):  # all models have the same scales, which are therefore the solution
        assert all(torch.allclose(extended[name], merged[name], rtol=1e-6) for name in scales)
    else:
        assert all(not extended[name].equal(merged[name]) for name in scales)


def test_a_repeated_tensor_must_repeat(tmp_path: Path) -> None:
    from featcal.system.errors import InputError

    file = write_text_suite(tmp_path / "s", "t5")
    path = tmp_path / "s" / "experts" / TASKS[0] / "model.safetensors"
    tensors = load_file(path)
    tensors["encoder.embed_tokens.weight"] = tensors["shared.weight"].clone()
    save_file(tensors, path, {"format": "pt"})
    open_family(load_suite(file), "cpu")
    tensors["encoder.embed_tokens.weight"] = tensors["shared.weight"] + 1
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(
        InputError, match=r"expert 'left': 'encoder\.embed_tokens\.weight' must repeat 'shared\.weight'"
    ):
        open_family(load_suite(file), "cpu")


def test_a_shared_tensor_is_read_under_another_of_its_names(tmp_path: Path) -> None:
    file = write_text_suite(tmp_path / "s", "t5")
    path = tmp_path / "s" / "base" / "model.safetensors"
    tensors = load_file(path)
    shared = tensors.pop("shared.weight")
    save_file(tensors | {"decoder.embed_tokens.weight": shared}, path, {"format": "pt"})
    assert open_family(load_suite(file), "cpu").base.read(["shared.weight"])["shared.weight"].equal(shared)


def test_defaults_are_the_papers_for_the_architecture(family: Family) -> None:
    config = config_for(family)
    assert (config.lam, config.rho, config.alpha) == {"t5": (1e-5, 2.0, 0.6), "llama": (1e-5, 0.5, 0.15)}[
        family.adapter.family
    ]


def test_expert_passes_can_be_used_again(family: Family, plain: CalibrationResult) -> None:
    config = config_for(family, lam=0.05)
    passes = expert_passes(family, config, kept=WalkCache(2**30))
    names = [name for block in family.adapter.blocks() for name in block.names]
    first, second = (calibrate_family(family, config, experts=passes).weights.read(names) for _ in range(2))
    alone = plain.weights.read(names)
    for name in names:
        assert first[name].equal(second[name])
        assert first[name].equal(alone[name])


def test_a_wider_recipe_is_said_in_the_config(tmp_path: Path) -> None:
    """transformers rounds what it loads to the dtype that config.json names."""
    import json

    import yaml

    from featcal.export.merge import merge_to_folder

    file = write_text_suite(tmp_path / "s", "llama", dtype=torch.bfloat16)
    config = tmp_path / "s" / "base" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "dtype": "bfloat16"}))
    content = yaml.safe_load(file.read_text())
    content["merged"]["dtype"] = "float32"
    file.write_text(yaml.safe_dump(content))
    merge_to_folder(load_suite(file), None, None, tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for tensor in written.values()} == {torch.float32}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float32"


def test_half_precision_checkpoints_keep_their_dtype(tmp_path: Path) -> None:
    family = open_family(load_suite(write_text_suite(tmp_path / "s", "llama", dtype=torch.bfloat16)), "cpu")
    before = measure_drift(family, split="test")
    calibrate_to_folder(family, config_for(family, lam=0.05, rho=1.0, alpha=0.3), tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for tensor in written.values()} == {torch.bfloat16}
    after = measure_drift(family, str(tmp_path / "out"), split="test")
    for task in TASKS:
        assert after.tasks[task].layers[-1].relative_drift < before.tasks[task].layers[-1].relative_drift


def test_corollary_1_stops_where_a_stage_begins(family: Family) -> None:
    """What leads over from encoder to decoder has no skip connection, so no certified run goes across it."""
    for task in measure_drift(family).tasks.values():
        run = task.last_run()
        assert len(run) == len(family.adapter.stages[-1].blocks)
        grown = task.growth()
        names = list(grown)[-len(run) :]
        assert all(one.gamma.equal(grown[name].gamma) for one, name in zip(run, names, strict=True))

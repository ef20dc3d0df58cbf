"""Polishing: its loss and first step against transformers and autograd alone, and what it leaves alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from library_references import text_reference
from safetensors.torch import load_file
from tiny_clip import TASKS
from torch import Tensor
from transformers import CLIPConfig, CLIPVisionModelWithProjection, T5ForConditionalGeneration

from featcal import evaluate
from featcal.baselines.common.fit import fit
from featcal.baselines.polished import Polish
from featcal.calibration.calibrate import calibrate_to_folder, config_for, expert_passes
from featcal.cli import featcal_command
from featcal.family.opening import Family
from featcal.models.lane import WalkCache
from featcal.session.session import Session
from featcal.system.errors import InputError, NumericalError
from featcal.system.fingerprints import sha256
from featcal.system.json_files import read_json

FEW = Polish(samples=12, steps=5, rate=1e-3, batch=5)


def tensors(family: Family) -> Mapping[str, Tensor]:
    return family.merged.read(family.adapter.tower)


def library_model(root: Path, weights: Mapping[str, Tensor]) -> CLIPVisionModelWithProjection:
    """The tower as transformers has it, in float64, with the base's projection."""
    config = CLIPConfig.from_pretrained(root / "base")
    config.vision_config.projection_dim = config.projection_dim
    model = CLIPVisionModelWithProjection(config.vision_config).double().eval()
    stored = {**load_file(root / "base" / "model.safetensors"), **weights}
    model.load_state_dict({name: stored[name] for name in model.state_dict()})
    return model


def test_the_loss_and_the_first_step_are_autograds_of_the_library(tiny64: Family, tiny_suite_file: Path) -> None:
    """Where a step sees all samples, the first one of Adam is -rate g / (|g| + eps)."""
    root = tiny_suite_file.parent
    model = library_model(root, tensors(tiny64))
    drawn = load_file(root / "samples.safetensors")
    loss = torch.zeros((), dtype=torch.float64)
    for task in TASKS:
        pixels = drawn[f"{task}.calibration"].double()
        with torch.no_grad():
            target = library_model(root, load_file(root / "experts" / task / "model.safetensors"))(pixels).image_embeds
        loss = loss + (model(pixels).image_embeds - target).square().mean() / len(TASKS)
    loss.backward()  # type: ignore[no-untyped-call]
    found = fit(tiny64, replace(FEW, steps=1, batch=12))
    assert found.record["loss_before"] == pytest.approx(float(loss.detach()), rel=1e-10)
    moved = found.weights.read(tiny64.adapter.tower)
    for name, before in tensors(tiny64).items():
        gradient = model.get_parameter(name).grad
        assert gradient is not None
        step = 1e-3 * gradient / (gradient.abs() + 1e-8)
        sure = gradient.abs() > 1e-9  # of others rounding decides the sign
        torch.testing.assert_close((before - moved[name])[sure], step[sure], rtol=1e-4, atol=1e-9)


def test_steps_lower_the_loss_and_none_change_nothing(tiny: Family) -> None:
    found = fit(tiny, FEW)
    assert found.record["loss"] < 0.9 * found.record["loss_before"]
    again = fit(tiny.with_merged(found.weights, "found"), replace(FEW, steps=0))
    assert again.record["loss"] == again.record["loss_before"] == pytest.approx(found.record["loss"], rel=1e-5)
    untouched = fit(tiny, replace(FEW, steps=0))
    for name, tensor in tensors(tiny).items():
        assert untouched.weights.read([name])[name].equal(tensor)


def test_the_same_options_give_the_same_model(tiny: Family) -> None:
    passes = expert_passes(tiny, FEW.counting, WalkCache(2**26))
    first, second = (fit(tiny, FEW, experts=one).weights.read(tiny.adapter.tower) for one in (None, passes))
    other = fit(tiny, replace(FEW, seed=43)).weights.read(tiny.adapter.tower)
    assert all(first[name].equal(second[name]) for name in first)
    assert not all(first[name].equal(other[name]) for name in first)


def test_text_moves_and_its_padding_counts_for_nothing(tmp_path: Path) -> None:
    family = text_reference(tmp_path / "t5", "t5-gated", T5ForConditionalGeneration).exact
    losses = []
    for under in (0, 7):
        passes = expert_passes(family, FEW.counting, WalkCache(2**26))
        for one in passes.values():
            for batch in one.batches:
                batch["input_ids"].masked_fill_(batch["attention_mask"] == 0, under)
        found = fit(family, FEW, experts=passes).record
        losses.append((found["loss_before"], found["loss"]))
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    assert losses[0][1] < 0.9 * losses[0][0]


def test_what_cannot_be_polished_says_why(tiny: Family) -> None:
    for name, message in {
        "polished:steps=-1": "steps is -1; it is at least 0",
        "polished:rate=0": "rate is 0; it is above 0 and finite",
        "polished:batch=0": "batch is 0; it is at least 1",
        "polished@nowhere": "no folder .*nowhere",
    }.items():
        with pytest.raises(InputError, match=message):
            evaluate(tiny, name)
    with pytest.raises(NumericalError, match="the loss is nan; lower the rate"):
        fit(tiny, replace(FEW, rate=1e30))


@pytest.mark.slow
def test_the_command_writes_it(tiny_suite_file: Path, tiny: Family, tmp_path: Path) -> None:
    out = tmp_path / "out"
    given = ["merge", str(tiny_suite_file), "--method", "polished:steps=3,samples=8@calibrated:samples=8"]
    done = CliRunner().invoke(featcal_command, [*given, "--out", str(out), "--json"])
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    told = CliRunner().invoke(featcal_command, [*given, "--out", str(tmp_path / "told")]).stdout.splitlines()
    losses = [["loss"], ["before", f"{document['loss_before']:.4f}"], ["after", f"{document['loss']:.4f}"]]
    assert [line.split() for line in told[:3]] == losses
    assert told[3].startswith(f"written to {tmp_path / 'told'} after ")
    assert document["loss"] < document["loss_before"]
    assert document["seconds"]["polished"] > 0
    name = "polished:samples=8,seed=42,steps=3,rate=0.0001,batch=8@calibrated:lam=0.05,rho=2,alpha=0.3,samples=8"
    assert document["model"] == name
    assert evaluate(tiny, str(out)).average == evaluate(tiny, name).average


def test_the_record_and_the_card_name_the_model_that_was_polished(tiny: Family, tmp_path: Path) -> None:
    """Another model than the suite's stands with its hash among the inputs, with hashes of the samples."""
    suite = Session(tiny)
    calibrate_to_folder(tiny, config_for(tiny, samples=6), tmp_path / "own")
    record = suite.fit.baseline(f"polished:samples=6,steps=1@{tmp_path / 'own'}").save(tmp_path / "out")
    weights = tmp_path / "own" / "model.safetensors"
    assert record["inputs"]["merged"] == {weights.name: sha256(weights)}
    assert f"| merged model | {tmp_path / 'own'} |" in (tmp_path / "out" / "README.md").read_text()
    calibrated = read_json(tmp_path / "own" / "featcal.json")
    same = ("samples", "indices", "truncated", "sha256")
    for task in TASKS:
        assert {name: record["tasks"][task][name] for name in same} == {
            name: calibrated["tasks"][task][name] for name in same
        }
    assert record["suite_file"] == calibrated["suite_file"]
    assert record["machine"] == calibrated["machine"]

"""Representation Surgery and ProbSurgery: maps of final features that come closer to the experts'."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from library_references import text_reference
from tiny_clip import TASKS
from torch import Tensor
from transformers import T5ForConditionalGeneration

from featcal import evaluate, measure_drift
from featcal.baselines.common.fit import fit
from featcal.baselines.polished import Polish
from featcal.baselines.probsurgery import ProbSurgery
from featcal.baselines.surgery import LowRank, Surgery
from featcal.cli import featcal_command
from featcal.evaluation.evaluate import task_features
from featcal.family.opening import Family, batches_of
from featcal.formats.weights import Weights
from featcal.models.model import Model, map_features
from featcal.session.model_ref import resolve_model
from featcal.system.errors import InputError

FEW = Surgery(samples=12, steps=100, rate=0.01, rank=4, batch=5)
PROBABLY = ProbSurgery(samples=12, steps=100, rate=0.01, rank=4, batch=5)


def features(family: Family, model: Weights, task: str) -> Tensor:
    drawn = family.samples(task, "calibration", 12, 42)
    return task_features(family, model, task, batches_of(drawn, 12, family.compute.device))


def differences(family: Family, model: Weights) -> list[float]:
    """The mean absolute difference to the expert's features, by task."""
    pairs = ((features(family, model, task), features(family, family.experts[task], task)) for task in TASKS)
    return [float((own - expert).abs().mean()) for own, expert in pairs]


def test_a_module_by_hand() -> None:
    module = LowRank(torch.tensor([[1.0, -1.0]]), torch.tensor([[2.0], [3.0]]))
    given = torch.tensor([[4.0, 1.0], [1.0, 4.0]], dtype=torch.float64)
    assert module(given).tolist() == [[4.0 - 2 * 3, 1.0 - 3 * 3], [1.0, 4.0]]


@pytest.mark.parametrize("options", [FEW, PROBABLY])
def test_features_come_closer_and_weights_stay(tiny: Family, options: Surgery) -> None:
    found = fit(tiny, options)
    before, after = differences(tiny, tiny.merged), differences(tiny, found.weights)
    assert all(b < 0.95 * a for a, b in zip(before, after, strict=True))
    assert found.record["loss_before"] == pytest.approx(sum(before) / 2, rel=1e-5)
    assert found.record["loss"] == pytest.approx(sum(after) / 2, rel=1e-5)
    assert isinstance(found.weights, Model)
    assert set(found.weights.maps) == set(TASKS)
    names = tiny.adapter.tower
    for tensor, other in zip(found.weights.read(names).values(), tiny.merged.read(names).values(), strict=True):
        assert tensor.equal(other)


@pytest.mark.parametrize("options", [FEW, PROBABLY])
def test_without_steps_it_does_nothing_and_the_seed_decides(tiny: Family, options: Surgery) -> None:
    given = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    still = fit(tiny, replace(options, steps=0)).weights
    first, second, other = (fit(tiny, one).weights for one in (options, options, replace(options, seed=1)))
    for task in TASKS:
        assert map_features(still, task, given).equal(given)
        assert map_features(first, task, given).equal(map_features(second, task, given))
        assert not map_features(first, task, given).equal(map_features(other, task, given))


def test_the_first_step_is_adams_on_the_absolute_difference(tiny64: Family) -> None:
    """U starts at 0, so D has no gradient and U moves by the rate, with the sign of sum_i sign(f - h)_a relu(D f)_b."""
    options = replace(FEW, steps=1, batch=12)
    found = fit(tiny64, options).weights
    assert isinstance(found, Model)
    for task in TASKS:
        module = found.maps[task]
        assert isinstance(module, LowRank)
        own, expert = features(tiny64, tiny64.merged, task), features(tiny64, tiny64.experts[task], task)
        slope = torch.sign(own - expert).mT @ torch.relu(own @ module.down.mT)
        moved = slope.abs() > 1e-3  # of others Adam's eps decides
        assert moved.sum() > 10
        torch.testing.assert_close(module.up[moved], options.rate * torch.sign(slope)[moved], rtol=1e-3, atol=0)


@pytest.mark.slow
def test_a_model_like_any_other_that_no_checkpoint_holds(tiny: Family, tiny_suite_file: Path, tmp_path: Path) -> None:
    name = "surgery:samples=12,steps=100,rate=0.01,rank=4,batch=5@calibrated:samples=8"
    assert resolve_model("surgery", tiny).name == "surgery:samples=256,seed=42,rank=16,steps=1000,rate=0.001,batch=16"
    assert "rank=128" in resolve_model("probsurgery", tiny).name
    assert measure_drift(tiny, name, split="calibration").macro_cosine > (
        measure_drift(tiny, "calibrated:samples=8", split="calibration").macro_cosine
    )
    assert 0 <= evaluate(tiny, name).average <= 1
    out = tmp_path / "out"
    done = CliRunner().invoke(featcal_command, ["merge", str(tiny_suite_file), "--method", name, "--out", str(out)])
    assert isinstance(done.exception, InputError)
    assert "have no place in a checkpoint" in str(done.exception)
    assert not list(tmp_path.iterdir())


def test_after_it_a_model_can_be_polished_and_not_operated_again(tiny: Family) -> None:
    operated = fit(tiny, FEW).weights
    polished = fit(tiny.with_merged(operated, "operated"), Polish(samples=12, steps=5, rate=1e-4, batch=12))
    assert polished.record["loss"] < polished.record["loss_before"]
    assert map_features(polished.weights, TASKS[0], torch.ones(1, 8)).equal(
        map_features(operated, TASKS[0], torch.ones(1, 8))
    )
    with pytest.raises(InputError, match="polished already has maps or heads for 'pets', 'signs'"):
        fit(tiny.with_merged(polished.weights, "polished"), FEW)


def test_text_is_refused(tmp_path: Path) -> None:
    family = text_reference(tmp_path / "t5", "t5-gated", T5ForConditionalGeneration).float32
    with pytest.raises(InputError, match="surgery: its modules stand after the final features, where the library"):
        fit(family, FEW)
    with pytest.raises(InputError, match="kl is -1"):
        replace(PROBABLY, kl=-1.0)

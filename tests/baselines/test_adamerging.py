"""AdaMerging: its loss and first step against transformers and autograd alone, whose inputs it sees, and its record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from library_references import calibration_samples, reference_of
from tiny_clip import TASKS
from torch import Tensor
from torch.func import functional_call

from featcal import evaluate
from featcal.baselines.adamerging import AdaMerging
from featcal.baselines.adamerging_test import AdaMergingTest
from featcal.baselines.common.fit import fit
from featcal.calibration.calibrate import expert_passes
from featcal.evaluation.evaluate import heads_of
from featcal.family.opening import Family
from featcal.models.lane import WalkCache
from featcal.session.session import Session
from featcal.suite.recipe import MergeRecipe
from featcal.system.errors import InputError, NumericalError

FEW = AdaMerging(samples=6, steps=5, rate=0.01, batch=4)


def tensors(family: Family, options: AdaMerging) -> Mapping[str, Tensor]:
    return fit(family, options).weights.read(family.adapter.tower)


@pytest.mark.parametrize("kind", ["clip", "t5-gated"])
def test_the_loss_and_the_first_step_are_autograds_of_the_library(
    kind: str, tmp_path: Path, tiny_suite_file: Path, tiny64: Family
) -> None:
    """Where a step sees all samples, the first one of Adam is -rate g / (|g| + eps)."""
    reference = reference_of(kind, tmp_path, tiny_suite_file.parent, tiny64)[0]
    family, base = reference.exact, reference.models["base"]
    heads = heads_of(family, dict.fromkeys(reference.experts, family.base), "calibration")
    names, start = family.adapter.tower, dict(base.named_parameters())
    coefficients = torch.full((2, len(names)), 0.3, dtype=torch.float64, requires_grad=True)
    theta = {name: parameter.detach() for name, parameter in start.items()}
    for k, name in enumerate(names):
        for own, expert in zip(coefficients, reference.experts.values(), strict=True):
            theta[name] = theta[name] + own[k] * (expert.get_parameter(name) - start[name]).detach()
    entropy = torch.zeros((), dtype=torch.float64)
    options = replace(FEW, steps=1, batch=6)
    for task, samples in calibration_samples(reference, options.counting).items():
        for sample in samples:
            answer: Any = functional_call(base, theta, (), dict(sample))
            head = heads[task]
            scores = answer.logits[:, 0] if head is None else head.scores(answer.image_embeds)
            entropy = entropy + torch.distributions.Categorical(logits=scores[0]).entropy() / len(samples)
    gradient = torch.autograd.grad(entropy, coefficients)[0]
    record = fit(family, options).record
    assert record["entropy_before"] == pytest.approx(float(entropy.detach()), rel=1e-9)
    found = torch.tensor([list(row.values()) for row in record["coefficients"].values()], dtype=torch.float64)
    step = -0.01 * gradient / (gradient.abs() + 1e-8)
    sure = gradient.abs() > 1e-10  # of others rounding decides the sign
    assert int(sure.sum()) > 0.8 * sure.numel()
    torch.testing.assert_close((found - 0.3)[sure], step[sure], rtol=1e-4, atol=1e-9)


def test_without_steps_it_is_task_arithmetic(tiny64: Family) -> None:
    recipe = tiny64.merge(MergeRecipe(method="task-arithmetic", scale=0.3)).read(tiny64.adapter.tower)
    for name, tensor in tensors(tiny64, replace(FEW, steps=0)).items():
        torch.testing.assert_close(tensor, recipe[name], rtol=1e-12, atol=1e-12)


def test_steps_make_the_model_surer_and_the_record_says_how(tiny: Family) -> None:
    found = fit(tiny, replace(FEW, steps=20, samples=12, batch=12))
    record = found.record
    assert record["entropy"] < 0.95 * record["entropy_before"]
    assert record["split"] == "calibration"
    merged, base = found.weights.read(tiny.adapter.tower), tiny.base.read(tiny.adapter.tower)
    experts = {task: one.read(tiny.adapter.tower) for task, one in tiny.experts.items()}
    for name, tensor in merged.items():
        said = {task: record["coefficients"][task][name] for task in TASKS}
        expected = base[name] + sum((own * (experts[task][name] - base[name]) for task, own in said.items()), 0.0)
        torch.testing.assert_close(tensor, expected, rtol=1e-5, atol=1e-6)


def test_the_same_options_give_the_same_model(tiny: Family) -> None:
    passes = expert_passes(tiny, FEW.counting, WalkCache(2**26))
    first, second = (fit(tiny, FEW, experts=one).weights.read(tiny.adapter.tower) for one in (None, passes))
    other = tensors(tiny, replace(FEW, seed=43))
    assert all(first[name].equal(second[name]) for name in first)
    assert not all(first[name].equal(other[name]) for name in first)


def test_test_inputs_are_seen_under_a_name_that_says_so_alone(tiny: Family) -> None:
    """Neither labels nor another split: the test inputs of a suite whose other splits are gone."""
    session = Session(tiny)
    on_test, own = (session.fit.baseline(f"{kind}:samples=6,steps=5") for kind in ("adamerging-test", "adamerging"))
    assert (on_test.record["split"], own.record["split"]) == ("test", "calibration")
    assert on_test.record["entropy_before"] != own.record["entropy_before"]
    drawn = {task: tiny.samples(task, "test", 6, 42).indices for task in TASKS}
    assert {task: tuple(one["indices"]) for task, one in on_test.record["tasks"].items()} == drawn
    blind = {
        task: spec.model_copy(
            update={
                "test": spec.source("test").model_copy(update={"labels": None}),
                "calibration": None,
                "validation": None,
            }
        )
        for task, spec in tiny.suite.tasks.items()
    }
    family = replace(tiny, suite=tiny.suite.model_copy(update={"tasks": blind}))
    again = fit(family, AdaMergingTest(samples=6, steps=5))
    assert again.record["entropy"] == on_test.record["entropy"]


def test_what_is_written_says_so(tiny: Family, tmp_path: Path) -> None:
    found = fit(tiny, AdaMergingTest(samples=6, steps=2))
    document = found.save(tmp_path / "out")
    assert document["model"] == "adamerging-test:samples=6,seed=42,steps=2,rate=0.001,batch=16"
    assert {*document["coefficients"][TASKS[0]]} == {*tiny.adapter.tower}
    assert "on the entropy for *test* inputs" in (tmp_path / "out" / "README.md").read_text()
    assert evaluate(tiny, str(tmp_path / "out")).average == evaluate(tiny, found).average


def test_padding_counts_for_nothing(tmp_path: Path, tiny: Family) -> None:
    family = reference_of("t5-gated", tmp_path, tmp_path, tiny)[0].exact
    found = []
    for under in (0, 7):
        passes = expert_passes(family, FEW.counting, WalkCache(2**26))
        for one in passes.values():
            for batch in one.batches:
                batch["input_ids"].masked_fill_(batch["attention_mask"] == 0, under)
        record = fit(family, FEW, experts=passes).record
        found.append((record["entropy_before"], record["entropy"]))
    assert found[0] == pytest.approx(found[1], rel=1e-12)


def test_what_cannot_be_done_says_why(tiny: Family) -> None:
    for name, message in {
        "adamerging:steps=-1": "steps is -1; it is at least 0",
        "adamerging:rate=0": "rate is 0; it is above 0 and finite",
        "adamerging-test:batch=0": "batch is 0; it is at least 1",
        "adamerging:split=test": "no option 'split'; it takes samples, seed, steps, rate, batch",
    }.items():
        with pytest.raises(InputError, match=message):
            evaluate(tiny, name)
    with pytest.raises(NumericalError, match="the entropy is nan; lower the rate"):
        fit(tiny, replace(FEW, rate=1e30))

"""Distillation: its loss and first step against transformers and autograd alone, and that it never ends worse."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from library_references import Reference, reference_of
from tiny_encoders import VARIANTS, tiny_encoder
from torch import Tensor
from torch.nn.functional import normalize

from featcal.baselines.common.fit import fit
from featcal.baselines.distillation import CHECKS, Distillation, Distiller, TargetSample
from featcal.calibration.calibrate import expert_passes
from featcal.evaluation.evaluate import heads_of
from featcal.evaluation.heads import CosineHead
from featcal.family.opening import Family
from featcal.models.model import Head
from featcal.testing.reference import Sample
from featcal.testing.trial import write_trial

ALL = Distillation(samples=12, steps=1, rate=1e-3, batch=12)
Found = tuple[Tensor, Tensor]
"""Final features `[tokens, k]` and scores `[tokens, c]` of one sample."""


def distil_on_the_same(family: Family, options: Distillation) -> tuple[Any, Mapping[str, Head | None]]:
    """Distil, with the samples that are fitted as those that choose: suites of text have no others here."""
    passes = expert_passes(family, options.counting)
    heads = heads_of(family, {task: one.weights for task, one in passes.items()}, "calibration")
    return Distiller(family.run(), family.merged, heads).distil(passes, passes, options), heads


def see(model: Any, sample: Sample, head: Head | None) -> Found:
    """Features and scores of the library's model at every position that decides a token of an answer."""
    if head is not None:
        assert isinstance(head, CosineHead)
        features = model(**sample).image_embeds
        return features, head.scale * normalize(features) @ head.prompts.double().mT
    found = model(**sample, output_hidden_states=True)
    labels, state = sample["labels"][0], found.get("decoder_hidden_states", found.get("hidden_states"))[-1][0]
    if found.get("decoder_hidden_states") is not None:
        return state, found.logits[0]
    deciding = (labels != -100).roll(-1)
    return state[deciding], found.logits[0][deciding]


def error(found: Sequence[Found], wanted: Sequence[Found]) -> Tensor:
    """The loss of one task."""
    scale = torch.stack([features.square().sum(1).mean() for features, _ in wanted]).mean()
    errors = []
    for (features, scores), (theirs, right) in zip(found, wanted, strict=True):
        p, q = right.softmax(1), scores.softmax(1)
        errors.append((features - theirs).square().sum(1).mean() / scale + (p * (p / q).log()).sum(1).mean())
    return torch.stack(errors).mean()


@pytest.mark.parametrize("kind", ["clip", "t5-gated", "llama"])
def test_the_loss_and_the_first_step_are_autograds_of_the_library(
    kind: str, tmp_path: Path, tiny_suite_file: Path, tiny64: Family
) -> None:
    """If a step sees all samples, the first one of Adam is -rate g / (|g| + eps); answers have 1 to 5 tokens."""
    reference: Reference = reference_of(kind, tmp_path / "suite", tiny_suite_file.parent, tiny64)[0]
    family = reference.exact
    (weights, record), heads = distil_on_the_same(family, ALL)
    model, before = reference.models.get("merged", reference.models["base"]), family.merged.read(family.adapter.tower)
    model.load_state_dict(before, strict=False)
    loss = torch.zeros((), dtype=torch.float64)
    for task, samples in reference.samples["calibration"].items():
        with torch.no_grad():
            wanted = [see(reference.experts[task], one, heads[task]) for one in samples]
        loss = loss + error([see(model, one, heads[task]) for one in samples], wanted) / len(reference.experts)
    loss.backward()  # type: ignore[no-untyped-call]
    assert record["loss_before"] == pytest.approx(float(loss.detach()), rel=1e-6)
    assert (record["rate"], record["steps"]) == (ALL.rate, 1)
    moved, blocks = weights.read(family.adapter.tower), {n for block in family.adapter.blocks() for n in block.names}
    for name, old in before.items():
        gradient = model.get_parameter(name).grad
        assert gradient is not None
        step = ALL.rate * gradient / (gradient.abs() + 1e-8) if name in blocks else torch.zeros_like(old)
        sure = gradient.abs() > 1e-7  # of others rounding decides the sign
        torch.testing.assert_close((old - moved[name])[sure], step[sure], rtol=1e-4, atol=1e-9)


def test_held_out_samples_choose_the_steps(tiny: Family) -> None:
    few = Distillation(samples=8, steps=6, rate=3e-3, batch=4)
    found = fit(tiny, few)
    assert found.record["loss"] < found.record["loss_before"]
    assert 0 < found.record["steps"] <= 6
    again = fit(tiny.with_merged(found.weights, "found"), replace(few, steps=0))
    assert again.record["loss"] == again.record["loss_before"] == pytest.approx(found.record["loss"], rel=1e-6)


@pytest.mark.parametrize("steps", [1, 4, 10, 11, 13, 44, 100])
def test_the_last_step_is_measured(tiny: Family, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Distiller, "loss", lambda *_: None)
    start = {name: torch.zeros(1) for block in tiny.adapter.blocks() for name in block.names}
    samples = [[TargetSample("t", {}, number, *torch.zeros(2, 1, 2), torch.ones(())) for number in range(4)]]
    options = Distillation(samples=4, steps=steps, batch=4)
    measured = [step for step, _ in Distiller(tiny.run(), tiny.merged, {})._train(start, samples, 1e-3, options)]
    assert measured[-1] == steps
    assert len(measured) == min(steps, CHECKS)


def test_a_start_that_no_step_betters_is_kept(tiny: Family) -> None:
    """On held-out samples whose experts are the start itself every step away from it is worse."""
    passes = expert_passes(tiny, ALL.counting)
    own = {task: replace(one, weights=tiny.merged) for task, one in passes.items()}
    heads = heads_of(tiny, {task: one.weights for task, one in passes.items()}, "calibration")
    weights, record = Distiller(tiny.run(), tiny.merged, heads).distil(passes, own, replace(ALL, steps=4))
    assert record == {"loss_before": pytest.approx(0, abs=1e-6), "loss": record["loss_before"], "rate": 0, "steps": 0}
    for name, tensor in tiny.merged.read(tiny.adapter.tower).items():
        assert weights.read([name])[name].equal(tensor)


def test_encoders_with_heads_of_their_own_learn_too(tmp_path: Path) -> None:
    facts, options = VARIANTS["bert"]
    family = write_trial(tiny_encoder(facts, **options), facts, tmp_path).family
    record = fit(family, replace(ALL, steps=10, rate=3e-3)).record
    assert record["loss"] < record["loss_before"]
    assert record["steps"] > 0

"""Fisher merging against transformers and autograd alone, and what its definition implies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lanes import rows
from library_references import Reference, calibration_samples, reference_of
from tiny_clip import TASKS
from torch import Tensor

from featcal import evaluate
from featcal.baselines.common.fit import fit
from featcal.baselines.fisher import Fisher, labels_of
from featcal.evaluation.evaluate import heads_of
from featcal.family.opening import Family
from featcal.models.model import Head
from featcal.system.errors import InputError
from featcal.testing.reference import Sample

ALL = Fisher(samples=12, labels=64)
"""More labels than any of the models has."""


@pytest.fixture(
    scope="module",
    params=rows(["clip", "t5-gated", "llama-tied"], quick=("clip",), slow=("t5-gated", "llama-tied")),
)
def reference(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny_suite_file: Path, tiny64: Family
) -> Reference:
    return reference_of(request.param, tmp_path_factory.mktemp(request.param), tiny_suite_file.parent, tiny64)[0]


def scores(model: Any, sample: Sample, head: Head | None) -> Tensor:
    """Of the classes, or of the first token of the answer."""
    if head is not None:
        return head.scores(model(**sample).image_embeds)[0]
    logits: Tensor = model(**sample).logits[0]
    causal = len(sample["labels"][0]) == len(sample["input_ids"][0])
    first = int((sample["labels"][0] != -100).nonzero()[0]) - 1 if causal else 0
    return logits[first]


def information(model: Any, samples: Sequence[Sample], head: Head | None) -> dict[str, Tensor]:
    """The mean over samples of sum_y p(y) (d log p(y) / d theta)^2."""
    wanted = dict(model.named_parameters())
    total = {name: torch.zeros_like(parameter) for name, parameter in wanted.items()}
    for sample in samples:
        logs = torch.log_softmax(scores(model, sample, head), 0)
        for label, log in enumerate(logs):
            gradients = torch.autograd.grad(log, [*wanted.values()], retain_graph=True, allow_unused=True)
            for name, gradient in zip(wanted, gradients, strict=True):
                if gradient is not None:
                    total[name] += float(logs[label].detach().exp()) * gradient.square() / len(samples)
    return total


@pytest.mark.parametrize("normalize", [False, True])
def test_every_tensor(reference: Reference, normalize: bool) -> None:
    """Entry by entry, where there is information at all: what is noise of rounding weighs in any way."""
    family, options = reference.exact, replace(ALL, samples=3, normalize=normalize)
    found = fit(family, options).weights.read(family.adapter.tower)
    heads = heads_of(family, family.experts, "calibration")
    samples = calibration_samples(reference, options.counting)
    mass, moved = ({name: torch.zeros_like(tensor) for name, tensor in found.items()} for _ in range(2))
    for task, expert in reference.experts.items():
        own = information(expert, samples[task], heads[task])
        norm = torch.cat([own[name].flatten() for name in found]).norm() if normalize else 1.0
        for name in found:
            mass[name] += own[name] / norm
            moved[name] += own[name] / norm * expert.get_parameter(name).detach()
    largest = max(float(one.max()) for one in mass.values())
    known = {name: one > 1e-15 * largest for name, one in mass.items()}
    assert sum(int(one.sum()) for one in known.values()) > 0.8 * sum(one.numel() for one in known.values())
    for name, tensor in found.items():
        sure = known[name]
        torch.testing.assert_close(
            tensor[sure], (moved[name] / mass[name])[sure], rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_it_lies_between_the_experts(tiny64: Family) -> None:
    found = fit(tiny64, ALL).weights.read(tiny64.adapter.tower)
    average = fit(tiny64, replace(ALL, labels=2)).weights.read(tiny64.adapter.tower)
    for name, tensor in found.items():
        both = torch.stack([expert.read([name])[name] for expert in tiny64.experts.values()])
        assert bool(((tensor <= both.amax(0) + 1e-9) & (tensor >= both.amin(0) - 1e-9)).all()), name
    assert not all(torch.allclose(average[name], tensor) for name, tensor in found.items())


@pytest.mark.slow
def test_experts_that_agree_are_returned_in_any_order(tiny64: Family) -> None:
    expert = tiny64.experts[TASKS[0]]
    same = replace(tiny64, experts=dict.fromkeys(TASKS, expert))
    found = fit(same, ALL).weights.read(tiny64.adapter.tower)
    for name, tensor in expert.read(tiny64.adapter.tower).items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-12, atol=1e-12)
    turned = replace(
        tiny64,
        suite=tiny64.suite.model_copy(update={"tasks": dict(reversed(tiny64.suite.tasks.items()))}),
        experts=dict(reversed(tiny64.experts.items())),
    )
    one, other = (fit(family, ALL).weights.read(tiny64.adapter.tower) for family in (tiny64, turned))
    for name, tensor in one.items():
        torch.testing.assert_close(other[name], tensor, rtol=1e-9, atol=1e-9)


def shares(p: Tensor, most: int, seeds: int) -> Tensor:
    """The mean over seeds of the shares that every label has in the expectation."""
    total = torch.zeros_like(p)
    for seed in range(seeds):
        labels, found = labels_of(p, most, torch.Generator().manual_seed(seed))
        assert len(labels) == min(most, len(p))
        total.index_add_(0, labels, found)
    return total / seeds


def test_labels_that_are_drawn_stand_for_all_the_others() -> None:
    p = torch.tensor([0.05, 0.5, 0.1, 0.02, 0.3, 0.03], dtype=torch.float64)
    assert shares(p, 6, 1).equal(p)
    assert shares(p, 16, 1).equal(p)
    mean = shares(p, 3, 4000)
    assert mean[[1, 4]].tolist() == pytest.approx([0.5, 0.3], rel=1e-12)
    assert mean.tolist() == pytest.approx(p.tolist(), abs=0.2 * 5 * 0.5 / 4000**0.5)
    certain = torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64)
    assert shares(certain, 2, 3).equal(certain)


def test_options(tiny: Family) -> None:
    for name, message in {
        "fisher:labels=1": "labels is 1; it is at least 2",
        "fisher:normalize=1": "normalize is true or false, not '1'",
        "fisher:samples=0": "samples is 0",
    }.items():
        with pytest.raises(InputError, match=message):
            evaluate(tiny, name)
    assert isinstance(fit(tiny, Fisher(samples=2)).record["seconds"]["fisher"], float)


def test_a_vocabulary_is_sampled(tmp_path: Path, tiny: Family) -> None:
    """The same seed gives the same labels; another one others."""
    family = reference_of("t5-gated", tmp_path, tmp_path, tiny)[0].float32
    few = Fisher(samples=4, labels=3)
    one, again, other = (
        fit(family, options).weights.read(family.adapter.tower) for options in (few, few, replace(few, seed=43))
    )
    assert all(one[name].equal(tensor) for name, tensor in again.items())
    assert not all(one[name].equal(tensor) for name, tensor in other.items())
